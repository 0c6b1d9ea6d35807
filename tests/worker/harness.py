"""A worker in this process with a fake engine, and a producer that knows only the wire protocol."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import redis

from tests.support import eventually
from tests.worker.fakes import FakeEngine, FakeModel
from tokenmill.protocol.keys import GROUP, Keys
from worker.cli import settings_from
from worker.jobs.translate import Translator
from worker.loading import Loaded
from worker.ops.exits import Exit
from worker.ops.threads import Signal
from worker.service import Worker

SIGTERM = 15


class Refusal(Exception):
    """The error of a fake chat template."""


@dataclass
class Queue:
    """A queue of its own on a shared Redis, as a producer sees it."""

    client: redis.Redis
    url: str
    keys: Keys

    def add(self, body: Any, lane: str = "normal", id: str | None = None, **fields: Any) -> str:
        """Add a job with a bare XADD, as a producer in any language would, and return its id."""
        job_id = id or secrets.token_hex(16)
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        entry: dict[Any, Any] = {"id": job_id, "body": raw, **fields}
        self.client.xadd(self.keys.lane(lane), entry)
        return job_id

    def result(self, job_id: str, timeout: float = 10) -> dict[str, Any]:
        raw: Any = eventually(lambda: self.client.get(self.keys.result(job_id)), timeout)
        return dict(orjson.loads(raw))

    def events(self, job_id: str) -> list[tuple[str, dict[str, str]]]:
        entries: Any = self.client.xrange(self.keys.out(job_id))
        return [(i.decode(), {k.decode(): v.decode() for k, v in fields.items()}) for i, fields in entries]

    def cancel(self, job_id: str, reason: str = "user") -> None:
        self.client.set(self.keys.cancel(job_id), reason, ex=3600)

    def depth(self) -> int:
        pipe = self.client.pipeline(transaction=False)
        for lane in self.keys.lanes:
            pipe.xlen(lane)
        return sum(pipe.execute())

    def pending(self) -> int:
        pipe = self.client.pipeline(transaction=False)
        for lane in self.keys.lanes:
            pipe.xpending(lane, GROUP)
        return sum(int(one["pending"]) for one in pipe.execute())

    def check_ending(self, job_id: str) -> dict[str, Any]:
        """Check the invariants of every ending, and return the result."""
        result = self.result(job_id)
        events = self.events(job_id)
        assert [fields["type"] for _, fields in events].count("final") == 1
        assert events[-1][1]["type"] == "final"
        assert events[-1][1]["status"] == result["status"]
        assert orjson.loads(events[-1][1]["result"]) == result
        starts = [i for i, fields in events if fields["type"] == "start"]
        assert starts
        fence = starts[-1].partition("-")[0]
        latest = [(i, f) for i, f in events if i.startswith(f"{fence}-") and f["type"] == "token"]
        assert [i for i, _ in latest] == [f"{fence}-{n}" for n in range(1, len(latest) + 1)]
        for choice in result["choices"]:
            mine = [f for _, f in latest if int(f["index"]) == choice["index"]]
            assert "".join(f["text"] for f in mine) == choice["text"]
        assert sum(int(f["tokens"]) for _, f in latest) == (result["usage"]["completion_tokens"] or 0)
        assert not self.client.exists(self.keys.cancel(job_id))
        return result


class Inside:
    """A worker that runs on a thread of this process."""

    def __init__(self, queue: Queue, engine: FakeEngine | None = None, **options: Any) -> None:
        self.queue = queue
        self.engine = engine or FakeEngine()
        self.model = FakeModel()
        self.settings = settings_from(
            {
                "model": "fake",
                "redis": queue.url,
                "queue": queue.keys.queue,
                "block_ms": "50",
                "drain_seconds": "5",
                **options,
            }
        )
        self.worker = Worker(self.settings, self._load)
        self.status: Exit | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _load(self, settings: Any) -> Loaded:
        return Loaded(self.engine, self.model, Translator(settings, self.engine, self.model, Refusal))

    def _run(self) -> None:
        self.status = self.worker.run()

    def start(self) -> Inside:
        self._thread.start()
        eventually(lambda: self.queue.client.exists(self.queue.keys.worker(self.worker.name)))
        return self

    def signal(self) -> None:
        self.worker.mailbox.put(Signal(SIGTERM))

    def join(self, timeout: float = 15) -> Exit | None:
        self._thread.join(timeout)
        assert not self._thread.is_alive()
        return self.status

    def stop(self) -> Exit | None:
        self.signal()
        return self.join()

    def at_rest(self) -> None:
        """Wait until no job is held or running."""
        eventually(lambda: len(self.worker.held) == 0)
        eventually(lambda: not self.engine.has_work)
        assert self.worker.held.waiting == 0


@contextmanager
def inside(queue: Queue, engine: FakeEngine | None = None, **options: Any) -> Iterator[Inside]:
    """Run a worker for the length of the block, and check that it ends with status 0."""
    worker = Inside(queue, engine, **options).start()
    try:
        yield worker
    finally:
        status = worker.stop()
    assert status is Exit.OK
