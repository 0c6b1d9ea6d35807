"""Make `.env` from `.env.example`, or complete it: a fresh value for each password and the gateway's key that has none.

What stands in `.env` stays, so that a new role can be added to a running stack. The gateway reads only hashes of its
keys: `deploy/keys/gateway.keys` gets that of a new `GATEWAY_API_KEY`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEYS = Path("deploy", "keys", "gateway.keys")
API_KEY = "GATEWAY_API_KEY"
_SECRET = re.compile(rf"^(\w+_PASSWORD|{API_KEY})=[ \t]*(.*)$", re.MULTILINE)


def filled(text: str) -> str:
    """Return `text` with a fresh secret in each empty `…_PASSWORD=` and in an empty `GATEWAY_API_KEY=`."""
    return _SECRET.sub(lambda line: line[0] if line[2] else f"{line[1]}={_fresh(line[1])}", text)


def completed(text: str, example: str) -> tuple[str, list[str]]:
    """Return `text` with the secrets of `example` that it lacks, and the names of those that are new."""
    had = {name for name, value in _SECRET.findall(text) if value}
    named = [name for name, _ in _SECRET.findall(text)]
    missing = [name for name, _ in _SECRET.findall(example) if name not in named]
    if missing:
        text = text.rstrip("\n") + "\n\n" + "".join(f"{name}=\n" for name in missing)
    text = filled(text)
    return text, [name for name, _ in _SECRET.findall(text) if name not in had]


def main(root: Path = ROOT) -> int:
    """Write both files; returns the exit status, 1 where there was nothing to do."""
    target, example = root / ".env", (root / ".env.example").read_text()
    made = not target.exists()
    text, new = (filled(example), [API_KEY]) if made else completed(target.read_text(), example)
    keys = _with_key(root / KEYS, dict(_SECRET.findall(text))[API_KEY], API_KEY in new)
    if not new and keys is None:
        print(f"{target} has all passwords already; to replace them, edit it or delete it", file=sys.stderr)
        return 1
    if keys is not None:  # first: where this fails, the key is not in `.env` either, and the next call makes both
        (root / KEYS).parent.mkdir(exist_ok=True, parents=True)
        _write(root / KEYS, keys, 0o644)  # hashes only, which the gateway's user must be able to read
        print(f"wrote the hash of {API_KEY} to {root / KEYS}, as a key of the tenant default")
    if made:
        _write(target, text, 0o600)
        print(f"wrote {target}")
    elif new:
        _write(target, text, target.stat().st_mode & 0o777)
        print(f"added {', '.join(new)} to {target}; the other lines are as they were")
    return 0


def _fresh(name: str) -> str:
    return ("sk-" if name == API_KEY else "") + secrets.token_urlsafe(24)


def _with_key(target: Path, key: str, new: bool) -> str | None:
    """Return the text of the keys file with the key's hash; None where the file is there and the key is not new.

    A key that an operator removed from the file stays removed.
    """
    if target.exists() and not new:
        return None
    before = target.read_text() if target.exists() else "# <SHA-256 of a key> <tenant>; docs/gateway.md\n"
    return before.rstrip("\n") + f"\n{hashlib.sha256(key.encode()).hexdigest()} default\n"


def _write(target: Path, text: str, mode: int) -> None:
    """Put the file in place at once: a half-written one would lose passwords."""
    target = target.resolve()  # where `.env` is a link, the file behind it
    draft = target.with_name(f"{target.name}.{secrets.token_hex(8)}")  # a fixed name could be another file's
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(text)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
