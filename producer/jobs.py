"""Jobs for RQ 3: a service that enqueues with RQ gets its answers, files and webhooks through it.

    queue = rq.Queue("tokenmill", connection=redis, serializer=rq.serializers.JSONSerializer)
    queue.enqueue("producer.jobs.generate", kwargs={"prompt": "Hello", "max_tokens": 32}, retry=rq.Retry(max=3))
    queue.enqueue("producer.jobs.run_batch", kwargs={"input": "in.jsonl", "output": "out.jsonl"}, job_timeout=-1)

and `rq worker --serializer json tokenmill` runs them. They only submit and wait: the model is the tokenmill worker's.
Arguments and results are plain JSON, and torch is never imported. `docs/rq.md` has the whole of it.

Where a job is killed and retried, it finds its request by id and waits for that one. `REDIS`, `QUEUE` and `PREFIX`
name the variables that say where the queue is.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import orjson
import rq
from redis.exceptions import RedisError
from rq.exceptions import InvalidJobOperation
from rq.job import Job as RqJob
from rq.timeouts import JobTimeoutException
from rq.worker import Worker as RqWorker

from producer.aftermath import after_death
from producer.callbacks import Courier
from producer.janitor import IDLE_S, clean_up
from producer.webhook import WebhookSettings
from tokenmill import batch
from tokenmill.client.core import CLEAN_UP_S
from tokenmill.client.patience import BRIEF_S
from tokenmill.client.sync import Client, Job
from tokenmill.protocol.calls import JobExists
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.protocol.faults import transient
from tokenmill.protocol.keys import check_name
from tokenmill.protocol.result import Result
from tokenmill.protocol.scripts import Scripts
from tokenmill.protocol.url import check_url

log = logging.getLogger(__name__)

REDIS: Final = "TOKENMILL_REDIS"
QUEUE: Final = "TOKENMILL_QUEUE"
PREFIX: Final = "TOKENMILL_PREFIX"
LONGEST_ID: Final = 112
"""Of an RQ job, so that ids with a generation are ids of ours."""
LEAST_S: Final = 2.0
"""Webhooks are delivered for so long before another job gets its turn."""
PROMOTE_S: Final = 0.5
"""How often delayed jobs are moved while webhooks are delivered."""
POLL_S: Final = 1.0
"""How often a waiting job asks RQ whether it was cancelled."""


class RequestFailed(Exception):
    """The request ended, and did not succeed; what it came to stays at its id. A retry submits it anew."""

    def __init__(self, result: Result) -> None:
        self.result = result
        why = result.error.message if result.error else result.cancel_reason or ""
        code = f" ({result.error.code})" if result.error else ""
        super().__init__(f"request {result.id} {result.status}{code}: {why}")


def generate(
    prompt: str | Sequence[int] | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    redis_url: str | None = None,
    queue: str | None = None,
    prefix: str | None = None,
    stream: bool = False,
    **request: Any,
) -> dict[str, Any]:
    """Run one request and return its result as docs/protocol.md has it: `["choices"][0]["text"]` is the text.

    Its id is the RQ job's with `.g1` behind it: a job that is retried after a crash waits for that same request, one
    that is retried after a result that was no success submits `.g2`, and so on. `request`: as `Client.submit`.

    Raises:
        RequestFailed: it failed, expired or was cancelled.
        JobError: the request is malformed.
    """
    job = _running()
    with _client(redis_url, queue, prefix) as client:
        mine = client.job(_current_id(client, job))
        note = {"queue": client.keys.queue, "request": mine.id, "status": "submitted"}
        _tell(job, note)
        with after_death(job, lambda: _cancel(mine.id, redis_url, queue, prefix)):
            with (
                _cancelled_when_late(job, mine),
                suppress(JobExists),
            ):  # submitted by this very job, before it was killed
                client.submit(prompt, messages=messages, id=mine.id, stream=stream, **{"wait": True, **request})
            result = _wait(job, mine)
        _tell(job, {**note, "status": result.status.value, "tokens": result.usage.completion_tokens})
    if not result.ok:
        raise RequestFailed(result)
    return dict(orjson.loads(result.to_json()))


def run_batch(
    input: str,
    output: str,
    errors: str | None = None,
    window: int = batch.WINDOW,
    *,
    redis_url: str | None = None,
    queue: str | None = None,
    prefix: str | None = None,
) -> dict[str, int]:
    """Run a batch file, as `tokenmill batch run`; returns how many lines there are, succeeded and failed.

    A job that is retried goes on where it was; one that is stopped cancels what is in flight. Paths are the RQ
    worker's. Give it a long `job_timeout`.

    Raises:
        tokenmill.batch.BatchInvalid: the file is no batch; nothing was submitted.
        tokenmill.batch.BatchError: a file cannot be written, or the job was cancelled.
    """
    job, files = _running(), (input, output, errors)

    def cancel() -> None:
        with _client(redis_url, queue, prefix) as client:
            batch.cancel(*files, client=client, reason="stopped in RQ")

    with _client(redis_url, queue, prefix) as client, after_death(job, cancel):
        try:
            report = _follow(job, *files, client=client, window=window)
        except JobTimeoutException:
            if not job.retries_left:
                _clean_up(cancel)
            raise
        if not report.complete:
            _clean_up(cancel)
            raise batch.BatchStopped("the job was cancelled in RQ")
    return {"total": report.total, "succeeded": report.succeeded, "failed": report.failed}


def _follow(job: RqJob, input: str, output: str, errors: str | None, client: Client, window: int) -> batch.BatchReport:
    """Run the file; its progress goes to RQ, and a cancel in RQ stops it."""
    stop, asked, told = threading.Event(), _asked(job), -POLL_S

    def progress(now: batch.Progress) -> None:
        nonlocal told
        if asked():
            stop.set()
        if time.monotonic() >= told + POLL_S or now.done == now.total:
            told = time.monotonic()
            _tell(job, {"total": now.total, "succeeded": now.succeeded, "failed": now.failed, "file": input})

    return batch.run(input, output, errors, client=client, window=window, progress=progress, stop=stop)


def deliver_callbacks(
    seconds: float = 50.0, *, redis_url: str | None = None, queue: str | None = None, prefix: str | None = None
) -> dict[str, int]:
    """Deliver webhooks for so long, then return how many were delivered, put off to a later try and given up.

    Delayed jobs that are due are moved into their lanes meanwhile, so that they join with no worker alive, too. Ends
    early where its RQ worker is asked to stop or another job waits behind it. Whom it may call and how it signs
    is the environment's to say.

    Raises:
        ValueError: a setting is missing or wrong; nothing is lost.
    """
    with _client(redis_url, queue, prefix) as client:
        scripts = Scripts(client.redis, client.keys)
        try:
            scripts.promote()  # whatever is wrong with the settings of webhooks
        except RedisError as error:
            _check_transient(error)
        courier = Courier(redis_url or place(os.environ)[0], client.keys, WebhookSettings.of(os.environ))
        try:
            return courier.run(seconds, _promoting(scripts, _makes_way(rq.get_current_job())))
        finally:
            courier.close()


def janitor(
    idle_seconds: float = IDLE_S,
    *,
    redis_url: str | None = None,
    queue: str | None = None,
    prefix: str | None = None,
) -> dict[str, int]:
    """Remove consumers that hold nothing and did nothing for so long, and let abandoned groups expire."""
    with _client(redis_url, queue, prefix) as client:
        return client.patiently(lambda: clean_up(client.redis, client.keys, idle_seconds), outage_s=BRIEF_S)


def _running() -> RqJob:
    job = rq.get_current_job()
    if job is None:
        raise RuntimeError("not inside of an RQ job; without RQ use producer.Client")
    return job


def place(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """URL, queue and prefix as the environment has them.

    Raises:
        ValueError: one is wrong; the message begins with its variable.
    """
    try:
        url = check_url(environ.get(REDIS) or DEFAULT_URL)
    except ValueError as error:
        raise ValueError(f"{REDIS}: {error}") from None
    queue = check_name(QUEUE, environ.get(QUEUE) or "default")
    return url, queue, check_name(PREFIX, environ.get(PREFIX) or "tokenmill")


def _client(url: str | None, queue: str | None, prefix: str | None) -> Client:
    usual = place(os.environ)
    return Client(url or usual[0], queue or usual[1], prefix=prefix or usual[2])


def _current_id(client: Client, job: RqJob) -> str:
    """The id of the first generation that has not failed, and is not about to be cancelled."""
    base = job.id if len(job.id) <= LONGEST_ID else hashlib.sha256(job.id.encode()).hexdigest()
    for generation in itertools.count(1):
        request = f"{base}.g{generation}"
        names = [client.keys.result(request), client.keys.cancel(request)]
        raw, cancel = client.patiently(lambda names=names: client.redis.mget(names))  # type: ignore[misc]
        if Result.from_json(raw).ok if raw is not None else cancel is None:
            return request
    raise RuntimeError("unreachable")


def _wait(job: RqJob, request: Job) -> Result:
    cancelled = _asked(job)
    with _cancelled_when_late(job, request):
        while True:
            try:
                return request.result(timeout=POLL_S)
            except TimeoutError:
                if cancelled():
                    with suppress(TimeoutError):  # Redis is away: the next round tries again
                        request.cancel("cancelled in RQ", timeout=POLL_S)


@contextmanager
def _cancelled_when_late(job: RqJob, request: Job) -> Iterator[None]:
    """Cancel a request whose RQ job runs out of time within the block and is not retried."""
    try:
        yield
    except JobTimeoutException:
        if not job.retries_left:
            _clean_up(lambda: request.cancel("time-out in RQ", timeout=CLEAN_UP_S))
        raise


def _clean_up(cancel: Callable[[], object]) -> None:
    """Cancel what a job leaves unfinished; an error of the cancel is logged, so that it does not hide the job's own."""
    try:
        cancel()
    except (RedisError, TimeoutError, batch.BatchError) as error:
        log.warning("requests of an RQ job that has ended go on, as they could not be cancelled: %s", error)


def _cancel(request: str, url: str | None, queue: str | None, prefix: str | None) -> None:
    with _client(url, queue, prefix) as client:
        client.job(request).cancel("stopped in RQ")


def _asked(job: RqJob) -> Callable[[], bool]:
    """Whether somebody cancelled or deleted the job while it runs; RQ is asked once in `POLL_S`."""
    asked, last = False, -POLL_S

    def probe() -> bool:
        nonlocal asked, last
        if not asked and time.monotonic() >= last + POLL_S:
            last = time.monotonic()
            try:
                asked = job.get_status(refresh=True) == "canceled"
            except InvalidJobOperation:
                asked = True
            except RedisError as error:
                _check_transient(error)
        return asked

    return probe


def _promoting(scripts: Scripts, stop: Callable[[], bool]) -> Callable[[], bool]:
    """`stop`, which is asked all the time, with a look at the delayed jobs once in `PROMOTE_S`."""
    last = time.monotonic()

    def probe() -> bool:
        nonlocal last
        if time.monotonic() >= last + PROMOTE_S:
            last = time.monotonic()
            scripts.promote()
        return stop()

    return probe


def _makes_way(job: RqJob | None) -> Callable[[], bool]:
    """Whether the RQ worker, which waits for this job, was asked to stop, or another job waits behind it."""
    if job is None:
        return lambda: False
    key = f"{RqWorker.redis_worker_namespace_prefix}{job.worker_name}"
    worker = RqWorker.find_by_key(key, connection=job.connection)
    queue, begun = rq.Queue(job.origin, connection=job.connection), time.monotonic()

    def probe() -> bool:
        if worker is not None and worker.shutdown_requested_date is not None:
            return True
        return time.monotonic() > begun + LEAST_S and queue.count > 0

    return probe


def _tell(job: RqJob, what: dict[str, Any]) -> None:
    """Note it where `rq` and its dashboards show it. A Redis that is away does not end the job for that."""
    job.meta["tokenmill"] = what
    try:
        job.save_meta()  # type: ignore[no-untyped-call]
    except RedisError as error:
        _check_transient(error)


def _check_transient(error: RedisError) -> None:
    if not transient(error):
        raise error
