"""A worker without an engine: it answers each job with the words of its prompt, through the real scripts.

A prompt is words between blanks; the worker publishes each as one event. Special words: `HOLD` waits until the test
calls `release()`, `FAIL` ends with `engine_error`, `DIE` drops the job without a word as a killed worker would.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field

import redis

from tests.steps import Steps
from tokenmill.protocol.body import parse_body
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.events import Event, parse_event
from tokenmill.protocol.job import Identity, JobEntry, parse_entry
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Choice, ErrorInfo, Result, Status, Usage
from tokenmill.protocol.scripts import Delivery, Ref, StartStatus, TokenBatch


@dataclass
class Queue:
    """One queue on one server."""

    url: str
    redis: redis.Redis
    keys: Keys
    real: bool = True
    """A redis-server, as opposed to fakeredis (whose Lua is some fifty times slower)."""

    def scripts(self, consumer: str = "w1", **settings: int) -> Steps:
        made = Steps(self.redis, self.keys, consumer, **settings)
        made.ensure_groups()
        return made

    def add(self, job_id: str = "a", body: bytes = b'{"prompt":"x"}', lane: str = "normal", **fields: str) -> Ref:
        """A bare XADD, as from any language."""
        pairs = {"id": job_id, "body": body, **fields}
        entry = self.redis.xadd(self.keys.lane(lane), pairs)  # type: ignore[arg-type]
        return Ref(lane, entry.decode(), job_id)

    def deliver(self, scripts: Steps, job_id: str = "a", **fields: str) -> Ref:
        """Add an entry and let `scripts`' worker read it."""
        ref = self.add(job_id, **fields)
        assert [d.entry for d in scripts.read(100) or ()] == [ref.entry]
        return ref

    def events(self, job_id: str = "a") -> list[Event]:
        return [parse_event(i, f) for i, f in self.redis.xrange(self.keys.out(job_id))]

    def hash(self, key: str) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.redis.hgetall(key).items()}

    def depth(self) -> int:
        return sum(self.redis.xlen(lane) for lane in self.keys.lanes)


@dataclass
class MiniWorker:
    queue: Queue
    name: str = field(default_factory=lambda: f"mini-{secrets.token_hex(3)}")
    pause: float = 0.002

    def __post_init__(self) -> None:
        self._client = command_client(self.queue.url)
        self.scripts = Steps(self._client, self.queue.keys, self.name)
        self._stop, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.running = 0
        self.most = 0
        self.errors: list[Exception] = []

    def start(self) -> None:
        self.scripts.ensure_groups()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._go.set()
        self._thread.join(10)
        self._client.close()
        assert not self.errors, self.errors

    def release(self) -> None:
        self._go.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.scripts.promote()
                self.most = max(self.most, self.queue.depth())
                for delivery in self.scripts.read(1) or ():
                    self._serve(delivery)
                self._stop.wait(self.pause)
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.errors.append(error)

    def _serve(self, delivery: Delivery) -> None:
        entry = parse_entry(delivery.fields)
        ref, job = Ref(delivery.lane, delivery.entry, entry.id), entry.identity
        words = str(parse_body(entry.body).prompt).split()
        started = self.scripts.start(ref, job, prompt_tokens=len(words), ttl_ms=entry.ttl_ms)
        if started.status is StartStatus.CANCELLED:
            result = Result(entry.id, Status.CANCELLED, cancel_reason=started.reason)
            self.scripts.answer(ref, job, result)
        elif started.status is StartStatus.EXPIRED:
            error = ErrorInfo.of(JobError(ErrorCode.DEADLINE_EXCEEDED, "ttl_ms ran out"))
            self.scripts.answer(ref, job, Result(entry.id, Status.EXPIRED, error=error))
        elif started.status is StartStatus.OK:
            self._say(ref, job, entry, words, started.fence)

    def _say(self, ref: Ref, job: Identity, entry: JobEntry, words: list[str], fence: int) -> None:
        said: list[str] = []
        status, error, reason = Status.SUCCEEDED, None, None
        for word in words:
            reason = self._cancelled(entry.id)
            if word == "HOLD":
                while not self._go.wait(0.005) and reason is None:
                    reason = self._cancelled(entry.id)
            if word == "DIE":
                return
            if word == "FAIL":
                status, error = Status.FAILED, ErrorInfo.of(JobError(ErrorCode.ENGINE_ERROR, "told to"))
            if reason is not None:
                status = Status.CANCELLED
            if status is not Status.SUCCEEDED:
                break
            said.append(word + " ")
            if job.stream:
                batch = TokenBatch(self.queue.keys)
                batch.add(entry.id, fence, len(said), 0, said[-1], 1)
                assert not self.scripts.publish(batch)
        choice = Choice(0, "".join(said), "stop" if status is Status.SUCCEEDED else status.value)
        usage = Usage(len(words), len(said), 0)
        result = Result(
            entry.id, status, choices=(choice,), usage=usage, error=error, cancel_reason=reason, worker=self.name
        )
        self.scripts.finalise(ref, job, result, fence=fence, published=len(said) if job.stream else 0)

    def _cancelled(self, job_id: str) -> str | None:
        raw = self._client.get(self.queue.keys.cancel(job_id))
        return raw.decode() if isinstance(raw, bytes) else None
