"""Delivers the stream `callbacks`: posts the result of each finished job with a `callback` to its URL.

    Courier(url, keys, settings).run(50) -> {"delivered": …, "put_off": …, "dead": …}

Clerks read the stream as a consumer group. An entry is acknowledged and deleted, in one transaction, when its receiver
has answered 2xx, when it is put off to a later try (a sorted set), or when it is given up (the stream
`callbacks-dead`). Entries of a clerk that died are taken over after a lease. So a webhook is delivered at least once: a
second time, with the same `webhook-id`, if the clerk dies or Redis goes away between the receiver's 2xx and the
acknowledgement.
"""

from __future__ import annotations

import enum
import random
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from os import getpid
from typing import Any, Final, Self

import redis
import structlog
from redis.client import Pipeline
from redis.exceptions import ResponseError

from producer.webhook import Refused, Undelivered, WebhookSettings, post
from tokenmill.protocol.callback import CallbackError, parse_callback
from tokenmill.protocol.connection import blocking_client, command_client
from tokenmill.protocol.errors import clean
from tokenmill.protocol.faults import transient
from tokenmill.protocol.keys import DEAD_MAXLEN, Keys, is_name
from tokenmill.protocol.lua import Runner, encode
from tokenmill.protocol.worker_calls import remove_consumer_call

CLERKS: Final = "clerks"
"""The consumer group of `callbacks`."""
THREADS: Final = 16
"""Maximum number of calls at the same time."""
BLOCK_MS: Final = 500
"""How long one blocking read waits."""
KEEP_S: Final = 86_400
"""Minimum time that a result lives after the next try of its callback."""
QUIET_S: Final = 30.0
"""Time for which a host that did not answer is not called, so that it does not delay callbacks to other hosts."""

_COUNT: Final = re.compile(r"[0-9]{1,9}")

Post = Callable[[WebhookSettings, str, str, bytes], None]
log = structlog.get_logger(__name__)


class Outcome(enum.StrEnum):
    """How the handling of a callback ended."""

    DELIVERED = "delivered"
    PUT_OFF = "put_off"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Callback:
    """An entry of the stream `callbacks`."""

    entry: str
    """The ID of the entry."""
    id: str
    """The job's id."""
    url: str
    attempts: int
    """Number of earlier tries."""

    @classmethod
    def of(cls, entry: bytes, fields: dict[bytes, bytes]) -> Self:
        """Read the fields of an entry; a missing or malformed field becomes empty or 0."""
        texts = {name: fields.get(name, b"").decode("utf-8", "replace") for name in (b"id", b"url", b"attempts")}
        attempts = _COUNT.fullmatch(texts[b"attempts"])
        return cls(entry.decode(), texts[b"id"], texts[b"url"], int(attempts[0]) if attempts else 0)

    @property
    def host(self) -> str:
        """Host of the URL; empty for a malformed URL."""
        try:
            return parse_callback(self.url).host
        except CallbackError:
            return ""


def ensure_clerks(client: redis.Redis, keys: Keys) -> None:
    """Create the consumer group at 0, so that it also gets the entries that were written before."""
    try:
        client.xgroup_create(keys.callbacks, CLERKS, id="0", mkstream=True)
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise


class Courier:
    """Delivers the callbacks of one queue; several couriers may run at the same time. Call `close` at the end."""

    def __init__(
        self, url: str, keys: Keys, settings: WebhookSettings, send: Post = post, block_ms: int = BLOCK_MS
    ) -> None:
        self._client = command_client(url)
        self._blocking = blocking_client(url, block_ms)
        self._runner = Runner(self._client)
        self._keys, self._settings, self._send, self._block_ms = keys, settings, send, block_ms
        self._name = f"{socket.gethostname()}:{getpid()}:{secrets.token_hex(4)}"
        self._quiet: dict[str, float] = {}
        """Host that did not answer → moment of `time.monotonic()` until which it is not called."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._blocking.close()

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> dict[str, int]:
        """Deliver for `seconds`, or until `stop` returns true or Redis is away; return {outcome: number}.

        Entries that were held when Redis went away are delivered again after a lease.

        Raises:
            redis.RedisError: Redis refuses a command.
            ValueError: a callback waits, and a setting that its delivery needs is missing.
        """
        tally: Counter[str] = Counter()
        try:
            self._run(time.monotonic() + seconds, stop, tally)
        except redis.RedisError as error:
            if not transient(error):
                raise
            log.warning("callbacks_interrupted", why=str(error))
        return {outcome.value: tally[outcome] for outcome in Outcome}

    def _run(self, end: float, stop: Callable[[], bool], tally: Counter[str]) -> None:
        ensure_clerks(self._client, self._keys)
        flying = set[Future[Outcome]]()
        with ThreadPoolExecutor(THREADS) as pool:
            while time.monotonic() < end and not stop():
                taken = self._take(THREADS - len(flying), idle=not flying)
                flying |= {pool.submit(self._deliver, callback) for callback in taken}
                done, flying = wait(flying, 0 if taken else self._block_ms / 1000, FIRST_COMPLETED)
                tally.update(future.result() for future in done)
        tally.update(future.result() for future in flying)
        self._runner.run(*remove_consumer_call(self._keys.callbacks, CLERKS, self._name))

    def _take(self, count: int, idle: bool) -> list[Callback]:
        """Read at most `count` callbacks: due retries, entries of dead clerks, and new entries; wait only if `idle`.

        The lease of an entry runs from here on, so `count` must not exceed the number of calls that can begin now.
        """
        if count == 0:
            return []
        stream = self._keys.callbacks
        self._runner.run("callbacks_due", [self._keys.callbacks_delayed, stream], [encode(limit=count)])
        lease_ms = round(self._settings.lease_s * 1000)
        claimed: Any = self._client.xautoclaim(stream, CLERKS, self._name, lease_ms, count=count)
        entries: list[Any] = [entry for entry in claimed[1] if entry[1] is not None]
        if len(entries) < count:
            reader, block = (self._blocking, self._block_ms) if idle and not entries else (self._client, None)
            streams: dict[Any, Any] = {stream: ">"}
            read: Any = reader.xreadgroup(CLERKS, self._name, streams, count=count - len(entries), block=block)
            entries += read[0][1] if read else []
        if entries:
            self._settings.check_complete()
        return [Callback.of(entry, fields) for entry, fields in entries]

    def _deliver(self, callback: Callback) -> Outcome:
        if time.monotonic() < self._quiet.get(callback.host, 0.0):
            return self._put_off(callback, callback.attempts, self._silence_s)
        try:
            self._send(self._settings, callback.url, callback.id, self._result(callback.id))
        except Refused as refusal:
            return self._bury(callback, callback.attempts, str(refusal))
        except Undelivered as failure:
            return self._failed(callback, failure)
        self._settle(callback)
        log.info("callback_delivered", id=callback.id, host=callback.host, attempts=callback.attempts + 1)
        return Outcome.DELIVERED

    def _result(self, job_id: str) -> bytes:
        """Read the result of a job.

        Raises:
            Refused: the job has no result. Any id may be in an entry: a wrong id must end the entry, not the clerk.
        """
        if not is_name(job_id):
            raise Refused("the id is not the id of a job")
        try:
            body: Any = self._client.get(self._keys.result(job_id))
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            raise Refused("there is no result under its key, but a value of another type") from None
        if body is None:
            raise Refused("the result has expired")
        return bytes(body)

    @property
    def _silence_s(self) -> float:
        return min(QUIET_S, self._settings.pause_s(1))

    def _failed(self, callback: Callback, failure: Undelivered) -> Outcome:
        attempts = callback.attempts + 1
        if failure.silent:
            self._quiet[callback.host] = time.monotonic() + self._silence_s
        if attempts >= self._settings.max_attempts:
            return self._bury(callback, attempts, str(failure))
        pause = max(self._settings.pause_s(attempts), failure.retry_after_s) * random.uniform(1.0, 1.2)
        log.warning("callback_failed", id=callback.id, attempts=attempts, again_in_s=round(pause), why=str(failure))
        return self._put_off(callback, attempts, pause)

    def _put_off(self, callback: Callback, attempts: int, seconds: float) -> Outcome:
        now, micros = self._client.time()
        due = now * 1000 + micros // 1000 + round(seconds * 1000)
        again = f"{attempts} {callback.id} {callback.url}"

        def instead(pipe: Pipeline) -> None:
            pipe.zadd(self._keys.callbacks_delayed, {again: due})
            pipe.expire(self._keys.result(callback.id), round(seconds) + KEEP_S, gt=True)

        self._settle(callback, instead)
        return Outcome.PUT_OFF

    def _bury(self, callback: Callback, attempts: int, reason: str) -> Outcome:
        why = clean(reason)
        fields: dict[Any, Any] = {"id": callback.id, "url": callback.url, "attempts": attempts, "reason": why}
        self._settle(callback, lambda pipe: pipe.xadd(self._keys.callbacks_dead, fields, maxlen=DEAD_MAXLEN))
        log.error("callback_dead", id=callback.id, host=callback.host, attempts=attempts, why=why)
        return Outcome.DEAD

    def _settle(self, callback: Callback, instead: Callable[[Pipeline], object] | None = None) -> None:
        """Acknowledge and delete the entry, in one transaction with the commands that `instead` adds."""
        with self._client.pipeline(transaction=True) as pipe:
            if instead is not None:
                instead(pipe)
            pipe.xack(self._keys.callbacks, CLERKS, callback.entry)
            pipe.xdel(self._keys.callbacks, callback.entry)
            pipe.execute()
