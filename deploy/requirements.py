"""Print what pip is to install for extras of pyproject.toml, this package itself left out: `requirements.py worker`.

So that an image has its dependencies in a layer of their own. Nor is torch there: it comes from another index.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, list[str] | dict[str, list[str]]], extras: list[str]) -> list[str]:
    """Return the requirements of a `[project]` table and of these extras, in its order, each once.

    Raises:
        KeyError: there is no such extra.
    """
    optional = dict(project["optional-dependencies"])
    found = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [line for line in dict.fromkeys(found) if re.match(r"[\w.-]+", line)[0] != "torch"]


if __name__ == "__main__":
    with Path("pyproject.toml").open("rb") as file:
        print("\n".join(requirements(tomllib.load(file)["project"], sys.argv[1:])))
