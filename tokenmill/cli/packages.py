"""Import this project's `producer`, `worker`, `engine` and `kernels`, not a service's files of the same names.

These names are common. In a folder that has files of these names, `python -m tokenmill` and `PYTHONPATH=.` put that
folder before the one that holds this project's packages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import tokenmill

NAMES = frozenset({"producer", "worker", "engine", "kernels"})
_FOLDER = str(Path(tokenmill.__file__).parents[1])


class _Beside(MetaPathFinder):
    """Finds only the packages of `NAMES`, in the folder that holds `tokenmill`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [_FOLDER]) if fullname in NAMES else None


def prefer_ours() -> None:
    """Make imports look for the packages of `NAMES` in the folder that holds `tokenmill`, before `sys.path`.

    Only for processes of the `tokenmill` command: a service that imports `tokenmill` keeps its own modules.
    """
    if not any(isinstance(finder, _Beside) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Beside())
