"""A gateway inside the test's process, with a folder of files: no workers, no clerk."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from producer.gateway.app import build
from producer.gateway.settings import GatewaySettings


@contextmanager
def inside(url: str, files: Path | None, **settings: Any) -> Iterator[TestClient]:
    """A client of a gateway with these settings, on a queue of its own."""
    names = {"queue": f"q{secrets.token_hex(6)}", "batch_queue": f"rq{secrets.token_hex(4)}"}
    given = {**names, "files": None if files is None else str(files), **settings}
    with TestClient(build(GatewaySettings(redis=url, **given)), base_url="http://127.0.0.1") as client:
        yield client


def upload(client: TestClient, content: bytes = b"{}\n", name: str = "in.jsonl", **fields: str) -> Any:
    """Upload a file for a batch; return the answer."""
    data = {"purpose": "batch", **fields}
    return client.post("/v1/files", data=data, files={"file": (name, content)})
