"""Input files for the batch tests, and the check that their outputs are complete."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def request(custom_id: str, prompt: str = "one two", url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """One line, as an object."""
    asked = {"prompt": prompt} if url == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **asked, **body}}


def write(path: Path, requests: Iterable[Any]) -> Path:
    """A file of objects, or of lines that are text already."""
    lines = (one if isinstance(one, str) else json.dumps(one) for one in requests)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an output; each must be one object, however lines are split."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def check_whole(ids: Iterable[str], *outputs: Path) -> None:
    """Every request has exactly one line, no line is of anything else, and what failed says so."""
    lines = [line for path in outputs for line in read(path)]
    assert sorted(line["custom_id"] for line in lines) == sorted(ids)
    assert len({line["id"] for line in lines}) == len(lines)
    for line in lines:
        ok = line["response"] is not None and line["response"]["status_code"] == 200
        assert ok == (line["error"] is None)
