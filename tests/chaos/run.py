"""Kill, pause, cut off and restart workers and Redis at random (seeded); then check the result of every job."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from redis.exceptions import RedisError

from tests.chaos.jobs import Task, make_task
from tests.chaos.proxy import Proxy
from tests.steps import Steps
from tests.support import RedisServer, eventually, running_redis
from tests.worker.harness import Queue
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.faults import transient
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.scripts import JobExists

LEASE = 1.0
SETTINGS = {
    "lease_seconds": str(LEASE), "block_ms": "100", "drain_seconds": "2", "max_waiting": "8", "max_attempts": "1000",
    "log_format": "json", "cancel_poll_ms": "20",
}  # fmt: skip


@dataclass
class Child:
    """A worker process, and whether this test asked it to end."""

    popen: subprocess.Popen[bytes]
    log: Path
    leaving: bool = False
    stopped_until: float | None = None

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)


@dataclass
class Chaos:
    """One run. `check` raises AssertionError if a promise was broken."""

    folder: Path
    server: RedisServer
    seed: int
    num_workers: int = 3
    overlap: str = "mixed"
    """`on`, `off`, or `mixed`: every other worker overlaps its steps."""
    rng: random.Random = field(init=False)
    tasks: dict[str, Task] = field(default_factory=dict)
    cancels: list[tuple[float, Task]] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.proxy = Proxy(self.server.port)
        self.keys = Keys(f"chaos-{secrets.token_hex(4)}")
        self.client = command_client(self.server.url, retries=0)
        self.queue = Queue(self.client, self.server.url, self.keys)
        self.scripts = Steps(self.client, self.keys, "harness")
        self.client.hset(self.keys.meta, "max_running_per_tenant", 3)

    # ── producers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def until_done(self, what: Callable[[], Any]) -> Any:
        """Repeat a call while Redis is away, as a producer would; a bare XADD may be executed twice."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return what()
            except RedisError as error:
                if not transient(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def submit(self) -> None:
        task = make_task(self.rng, len(self.tasks))
        self.tasks[task.id] = task
        fields = {"id": task.id, "body": task.body, **task.fields}
        if task.delay_ms:
            self.until_done(lambda: self._delay(task, fields))
        elif task.bare:
            self.until_done(lambda: self.client.xadd(self.keys.lane(task.lane), fields))
        else:
            with contextlib.suppress(JobExists):  # it was taken before its reply was lost
                self.until_done(lambda: self.scripts.enqueue(_entry(task), task.lane))
        if task.cancel_after is not None:
            self.cancels.append((time.monotonic() + task.cancel_after, task))

    def _delay(self, task: Task, fields: dict[str, Any]) -> None:
        seconds, micros = self.client.time()
        with self.client.pipeline(transaction=True) as pipe:
            pipe.hset(self.keys.delayed_job(task.id), mapping={**fields, "lane": task.lane})
            pipe.zadd(self.keys.delayed, {task.id: seconds * 1000 + micros // 1000 + task.delay_ms})
            pipe.execute()

    def cancel_due(self) -> None:
        now = time.monotonic()
        for due in [one for one in self.cancels if one[0] <= now]:
            self.cancels.remove(due)
            if due[1].bare_cancel:
                self.until_done(lambda task=due[1]: self.queue.cancel(task.id))
            else:
                self.until_done(lambda task=due[1]: self.scripts.cancel(task.id))

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def spawn(self) -> None:
        log = self.folder / f"worker-{len(self.children)}.log"
        settings = {**SETTINGS, "redis": f"redis://127.0.0.1:{self.proxy.port}/0", "queue": self.keys.queue}
        given = {f"TOKENMILL_{name.upper()}": value for name, value in settings.items()}
        overlap = ("on", "off")[len(self.children) % 2] if self.overlap == "mixed" else self.overlap
        given["TOKENMILL_OVERLAP"] = overlap
        environ = {**os.environ, **given, "CHAOS_STEP": "0.004", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            command = [sys.executable, "-m", "tests.chaos.worker"]
            self.children.append(Child(subprocess.Popen(command, env=environ, stdout=out, stderr=out), log))

    @property
    def working(self) -> list[Child]:
        return [child for child in self.children if child.popen.poll() is None and not child.leaving]

    def tend(self) -> None:
        """Resume paused workers that are due, replace workers that have ended, and report unexpected ends."""
        for child in self.children:
            # A SIGTERM before Python has come to our handler ends it as any process; nothing was read by then.
            expected = (0, -signal.SIGKILL, -signal.SIGTERM) if child.leaving else (None,)
            if child.popen.poll() not in (None, *expected):
                raise AssertionError(f"worker ended with {child.popen.returncode}:\n{child.log.read_text()[-3000:]}")
            if child.stopped_until is not None and time.monotonic() > child.stopped_until:
                child.signal(signal.SIGCONT)
                child.stopped_until = None
        while len(self.working) < self.num_workers:
            self.spawn()

    # ── the die ───────────────────────────────────────────────────────────────────────────────────────────────────

    def strike(self) -> None:
        """Cause one random fault."""
        name, deed = self.rng.choices(
            [
                ("kill", self._kill),
                ("pause", self._pause),
                ("terminate", self._terminate),
                ("cut", self.proxy.cut),
                ("swallow", lambda: self.proxy.swallow(self.rng.random() * 0.3)),
                ("silence", lambda: self.proxy.silence(self.rng.random() * 1.5 * LEASE)),
                ("restart", self._restart),
            ],
            weights=[4, 4, 3, 4, 3, 2, 1],
        )[0]
        self.events[name] += 1
        deed()

    def _victim(self) -> Child | None:
        awake = [child for child in self.working if child.stopped_until is None]
        return self.rng.choice(awake) if awake else None

    def _kill(self) -> None:
        if (victim := self._victim()) is not None:
            victim.leaving = True
            victim.signal(signal.SIGKILL)

    def _pause(self) -> None:
        if (victim := self._victim()) is not None:
            victim.signal(signal.SIGSTOP)
            victim.stopped_until = time.monotonic() + self.rng.random() * 3 * LEASE

    def _terminate(self) -> None:
        if (victim := self._victim()) is not None:
            victim.leaving = True
            victim.signal(signal.SIGTERM)
            if self.rng.random() < 0.3:
                victim.signal(signal.SIGTERM)

    def _restart(self) -> None:
        self.server.kill()
        self.server.start()

    # ── a run ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, seconds: float, jobs_per_second: float = 15.0, pause: float = 0.7) -> None:
        """Submit jobs and cause faults for `seconds`, then wait until all jobs have ended, and check them."""
        end = time.monotonic() + seconds
        next_job = next_strike = time.monotonic()
        self.tend()
        while (now := time.monotonic()) < end:
            self.tend()
            self.cancel_due()
            if now >= next_job:
                self.submit()
                next_job = now + self.rng.expovariate(jobs_per_second)
            if now >= next_strike + pause:
                self.strike()
                next_strike = now + self.rng.random() * pause
            time.sleep(0.002)
        self.calm()
        self.check()

    def calm(self) -> None:
        """Cause no more faults; wait until all jobs have ended."""

        def over() -> bool:
            self.tend()
            self.cancel_due()
            return not self.cancels and self.queue.depth() + self.client.zcard(self.keys.delayed) == 0

        for child in self.children:
            if child.stopped_until is not None:
                child.stopped_until = 0.0
        eventually(over, 60 + len(self.tasks) / 5, 0.05)
        eventually(lambda: all(c.popen.poll() is not None for c in self.children if c.leaving), 40)
        self.tend()

    def check(self) -> None:
        """Check the invariants of all jobs."""
        for task in self.tasks.values():
            task.check(check_ending(self.queue, task))
        assert (self.queue.depth(), self.queue.pending()) == (0, 0)
        assert self.client.xlen(self.keys.dead) == 0
        for tenant in ("red", "blue"):
            assert int(self.client.get(self.keys.quota(tenant)) or 0) == 0, tenant
            assert not self.client.exists(self.keys.running(tenant)), tenant
        eventually(lambda: not self.client.exists(self.keys.returned, self.keys.reading))
        for group in ("one", "two", "three"):
            self._check_group(group)
        eventually(self._workers_at_rest, 20)

    def _check_group(self, group: str) -> None:
        mine = {task.id for task in self.tasks.values() if task.fields.get("group") == group}
        counts = {k.decode(): int(v) for k, v in self.client.hgetall(self.keys.group(group)).items()}
        statuses = Counter(orjson.loads(self.client.get(self.keys.result(job)) or b"{}")["status"] for job in mine)
        assert counts.pop("total", 0) == len(mine), group
        assert counts == statuses, group
        listed = [fields[b"id"].decode() for _, fields in self.client.xrange(self.keys.group_out(group))]
        assert sorted(listed) == sorted(mine), group

    def _workers_at_rest(self) -> bool:
        """Return whether every live worker reports that all its blocks are free and that it holds no job."""
        shown = [self.client.hgetall(key) for key in self.client.keys(self.keys.worker("*"))]
        return len(shown) == self.num_workers and all(
            row[b"free_blocks"] == row[b"total_blocks"] and row[b"waiting"] == row[b"running"] == b"0" for row in shown
        )

    def close(self) -> None:
        for child in self.children:
            if child.popen.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    child.signal(signal.SIGCONT)
                    child.signal(signal.SIGKILL)
                child.popen.wait()
        self.proxy.close()
        self.client.close()


def check_ending(queue: Queue, task: Task) -> dict[str, Any]:
    """One final event, at the end, as the result says."""
    if task.bare_cancel:
        queue.client.delete(queue.keys.cancel(task.id))  # a plain SET that came after the end stays until its TTL
    if task.fields.get("stream") != "0":
        return queue.check_ending(task.id)
    result = queue.result(task.id)
    kinds = [fields["type"] for _, fields in queue.events(task.id)]
    assert "token" not in kinds
    assert kinds.count("final") == 1
    assert kinds[-1] == "final"
    return result


def _entry(task: Task) -> JobEntry:
    fields = dict(task.fields)
    return JobEntry(
        id=task.id,
        body=task.body,
        ttl_ms=int(fields["ttl_ms"]) if "ttl_ms" in fields else None,
        stream=fields.get("stream") != "0",
        group=fields.get("group"),
        tenant=fields.get("tenant"),
    )


@contextlib.contextmanager
def chaos(folder: Path, seed: int, num_workers: int = 3, overlap: str = "mixed") -> Iterator[Chaos]:
    """Set a run up; with `appendfsync always`, so that even a killed Redis keeps all confirmed writes."""
    with running_redis(folder, "--appendfsync", "always") as server:
        run = Chaos(folder, server, seed, num_workers, overlap)
        try:
            yield run
        finally:
            run.close()
