"""Make `.env` from `.env.example`, or complete it: a fresh password for each `…_PASSWORD` that has none.

What stands in `.env` stays, so that a new role can be added to a running stack.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PASSWORD = re.compile(r"^(\w+_PASSWORD)=[ \t]*(.*)$", re.MULTILINE)


def filled(text: str) -> str:
    """Return `text` with a fresh password in each empty `…_PASSWORD=`."""
    return _PASSWORD.sub(lambda line: line[0] if line[2] else f"{line[1]}={secrets.token_urlsafe(24)}", text)


def completed(text: str, example: str) -> tuple[str, list[str]]:
    """Return `text` with the passwords of `example` that it lacks, and the names of those that are new."""
    had = {name for name, value in _PASSWORD.findall(text) if value}
    named = [name for name, _ in _PASSWORD.findall(text)]
    missing = [name for name, _ in _PASSWORD.findall(example) if name not in named]
    if missing:
        text = text.rstrip("\n") + "\n\n" + "".join(f"{name}=\n" for name in missing)
    text = filled(text)
    return text, [name for name, _ in _PASSWORD.findall(text) if name not in had]


def main(root: Path = ROOT) -> int:
    """Write the file; returns the exit status, 1 where there was nothing to do."""
    target, example = root / ".env", (root / ".env.example").read_text()
    if not target.exists():
        _write(target, filled(example), 0o600)
        print(f"wrote {target}")
        return 0
    text, new = completed(target.read_text(), example)
    if not new:
        print(f"{target} has all passwords already; to replace them, edit it or delete it", file=sys.stderr)
        return 1
    _write(target, text, target.stat().st_mode & 0o777)
    print(f"added {', '.join(new)} to {target}; the other lines are as they were")
    return 0


def _write(target: Path, text: str, mode: int) -> None:
    """Put the file in place at once: a half-written one would lose passwords."""
    target = target.resolve()  # where `.env` is a link, the file behind it
    draft = target.with_name(f"{target.name}.{secrets.token_hex(8)}")  # a fixed name could be another file's
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
