"""Make `.env` from `.env.example`, a fresh password in each empty `…_PASSWORD=`. One that is there stays."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def filled(example: str) -> str:
    """`example` with its empty passwords filled."""
    return re.sub(r"^(\w+_PASSWORD=)$", lambda empty: empty[1] + secrets.token_urlsafe(24), example, flags=re.MULTILINE)


def main(root: Path = ROOT) -> int:
    """The exit status."""
    target = root / ".env"
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        print(f"{target} is there already; delete it to start anew", file=sys.stderr)
        return 1
    with os.fdopen(descriptor, "w") as file:
        file.write(filled((root / ".env.example").read_text()))
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
