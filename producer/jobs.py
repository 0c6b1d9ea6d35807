"""Jobs for RQ 3: a service can use RQ for single requests, batch files and webhooks.

    queue = rq.Queue("tokenmill", connection=redis, serializer=rq.serializers.JSONSerializer)
    queue.enqueue("producer.jobs.generate", kwargs={"prompt": "Hello", "max_tokens": 32}, retry=rq.Retry(max=3))
    queue.enqueue("producer.jobs.run_batch", kwargs={"input": "in.jsonl", "output": "out.jsonl"}, job_timeout=-1)

and `rq worker --serializer json tokenmill` runs them. The jobs only submit and wait: the model runs in the tokenmill
worker. Arguments and results are plain JSON, and torch is never imported. See `docs/rq.md`.

A job that is killed and retried finds its earlier request by id and waits for it. `REDIS`, `QUEUE` and `PREFIX` are the
names of the environment variables with the queue's address, `FILES` that of the folder of the HTTP API's files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, Final

import orjson
import rq
from redis.exceptions import RedisError
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException

from producer import rqjob
from producer.aftermath import after_death
from producer.callbacks import Courier
from producer.files.catalog import delete_expired
from producer.files.folder import Folder
from producer.files.rqjobs import tend
from producer.files.run import run_batch as run_batch_on
from producer.generations import generation_ids, generation_keys, is_over
from producer.janitor import IDLE_S, clean_up
from producer.rqjob import POLL_S, check_transient
from producer.rqqueue import FOREVER
from producer.webhook import WebhookSettings
from tokenmill import batch
from tokenmill.client.core import CLEAN_UP_S
from tokenmill.client.patience import BRIEF_S
from tokenmill.client.sync import Client, Job
from tokenmill.protocol.calls import JobExists
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.protocol.keys import Keys, check_name
from tokenmill.protocol.result import Result
from tokenmill.protocol.scripts import Scripts
from tokenmill.protocol.url import check_url

log = logging.getLogger(__name__)

REDIS: Final = "TOKENMILL_REDIS"
QUEUE: Final = "TOKENMILL_QUEUE"
PREFIX: Final = "TOKENMILL_PREFIX"
FILES: Final = "TOKENMILL_FILES"
LONGEST_ID: Final = 112
"""Maximum length of an RQ job's id: with the generation behind it, it must be a valid id of a request."""
LEAST_S: Final = 2.0
"""Minimum time for which webhooks are delivered before another RQ job gets its turn."""
PROMOTE_S: Final = 0.5
"""How often due delayed jobs are moved into their lanes while webhooks are delivered."""
TURN_S: Final = 20.0
"""Minimum time for which a batch of the HTTP API runs before another RQ job gets its turn."""


class RequestFailed(Exception):
    """The request ended without success. Its result stays at its id; a retry of the RQ job submits a new request.

    Attributes:
        result: the result of the request.
    """

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
    """Run one request and return its result in the form of docs/protocol.md: `["choices"][0]["text"]` is the text.

    The request's id is the RQ job's id followed by `.g1`. A job that is retried after a crash waits for the same
    request; a job that is retried after a result without success submits a new request `.g2`, and so on.

    Args:
        redis_url, queue, prefix: address of the queue; None: from the environment.
        request: further arguments of `Client.submit`.

    Raises:
        RequestFailed: the request failed, expired or was cancelled.
        JobError: the request is malformed.
    """
    job = rqjob.running()
    with _client(redis_url, queue, prefix) as client:
        mine = client.job(_current_id(client, job))
        note = {"queue": client.keys.queue, "request": mine.id, "status": "submitted"}
        rqjob.note(job, note)
        with after_death(job, lambda: _cancel(mine.id, redis_url, queue, prefix)):
            # `JobExists`: submitted by an earlier run of this RQ job, which was killed.
            with _cancelled_when_late(job, mine), suppress(JobExists):
                client.submit(prompt, messages=messages, id=mine.id, stream=stream, **{"wait": True, **request})
            result = _wait(job, mine)
        rqjob.note(job, {**note, "status": result.status.value, "tokens": result.usage.completion_tokens})
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
    """Run a batch file, as `tokenmill batch run`; return the numbers `total`, `succeeded` and `failed`.

    A job that is retried continues the run; a job that is stopped cancels its requests in flight. Paths are paths on
    the RQ worker's machine. Enqueue it with a long `job_timeout`.

    Raises:
        tokenmill.batch.BatchInvalid: the input is not a batch file; nothing was submitted.
        tokenmill.batch.BatchError: a file cannot be written, or the job was cancelled.
    """
    job, files = rqjob.running(), (input, output, errors)

    def cancel() -> None:
        # `BatchNotFound`: the run has submitted no request yet, or Redis has lost them.
        with _client(redis_url, queue, prefix) as client, suppress(batch.BatchNotFound):
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
            raise batch.BatchStopped(f"RQ job {job.id} was cancelled in RQ")
    return {"total": report.total, "succeeded": report.succeeded, "failed": report.failed}


def _follow(job: RqJob, input: str, output: str, errors: str | None, client: Client, window: int) -> batch.BatchReport:
    """Run the file; note the progress in the RQ job, and stop if the job is cancelled in RQ."""
    stop, cancelled, noted = threading.Event(), rqjob.cancelled(job), -POLL_S

    def progress(now: batch.Progress) -> None:
        nonlocal noted
        if cancelled():
            stop.set()
        if time.monotonic() >= noted + POLL_S or now.done == now.total:
            noted = time.monotonic()
            rqjob.note(job, {"total": now.total, "succeeded": now.succeeded, "failed": now.failed, "file": input})

    return batch.run(input, output, errors, client=client, window=window, progress=progress, stop=stop)


def deliver_callbacks(
    seconds: float = 50.0, *, redis_url: str | None = None, queue: str | None = None, prefix: str | None = None
) -> dict[str, int]:
    """Deliver webhooks for `seconds`; return how many were delivered, put off to a later try, and given up.

    Meanwhile due delayed jobs are moved into their lanes, so that this happens even if no worker is alive. The job ends
    early if its RQ worker is asked to stop, or another RQ job waits behind it. The allowed hosts and the signing keys
    come from the environment.

    Raises:
        ValueError: a setting is missing or wrong; no callback is lost.
    """
    with _client(redis_url, queue, prefix) as client:
        scripts = Scripts(client.redis, client.keys)
        try:
            scripts.promote()  # before the settings of webhooks are checked, which may be wrong
        except RedisError as error:
            check_transient(error)
        courier = Courier(redis_url or place(os.environ)[0], client.keys, WebhookSettings.of(os.environ))
        try:
            makes_way = rqjob.makes_way(rq.get_current_job())
            return courier.run(seconds, _promoting(scripts, lambda: makes_way(LEAST_S)))
        finally:
            courier.close()


def run_uploaded_batch(batch_id: str, tenant: str | None = None) -> rq.Retry | None:
    """Start or continue a batch of the HTTP API; enqueue this RQ job again if it stops early for others.

    The job makes way at once if its RQ worker is asked to stop, or if another job waits in the same RQ queue after
    `TURN_S`, or ten times as long as it took to start. Its requests in flight stay in the queue.

    Raises:
        tokenmill.batch.BatchError, OSError: the files cannot be used. A retry continues the batch.
        ValueError: a setting is missing or wrong.
    """
    job = rqjob.running()
    storage, cancelled, makes_way = storage_of(os.environ), rqjob.cancelled(job), rqjob.makes_way(job)

    def stop(start_s: float) -> bool:
        try:
            return cancelled() or makes_way(max(TURN_S, 10 * start_s) if start_s else inf)
        except RedisError as error:
            check_transient(error)
            return False

    with _client(None, None, None) as client:
        done = run_batch_on(storage, tenant, batch_id, client=client, makes_way=stop)
    return None if done or cancelled() else rq.Retry(max=FOREVER)


def tend_batches() -> dict[str, int]:
    """Enqueue the batches of the HTTP API that have not ended and that RQ has lost; return how many are open."""
    job = rqjob.running()
    _, served, prefix = place(os.environ)
    queue = rq.Queue(job.origin, connection=job.connection, serializer=JSONSerializer)
    return tend(storage_of(os.environ), queue, Keys(served, prefix).root)


def clean_files() -> dict[str, int]:
    """Delete expired files and batches of the HTTP API; return how many were deleted."""
    return delete_expired(storage_of(os.environ))


def janitor(
    idle_seconds: float = IDLE_S,
    *,
    redis_url: str | None = None,
    queue: str | None = None,
    prefix: str | None = None,
) -> dict[str, int]:
    """Remove consumers without entries that were idle for `idle_seconds`, and let abandoned groups expire.

    Returns:
        How many consumers were removed, groups got a time to live, and jobs without an entry were ended.
    """
    with _client(redis_url, queue, prefix) as client:
        return client.patiently(lambda: clean_up(client.redis, client.keys, idle_seconds), outage_s=BRIEF_S)


def place(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Return URL of Redis, queue and prefix from the environment variables.

    Raises:
        ValueError: a value is wrong; the message begins with the variable's name.
    """
    try:
        url = check_url(environ.get(REDIS) or DEFAULT_URL)
    except ValueError as error:
        raise ValueError(f"{REDIS}: {error}") from None
    queue = check_name(QUEUE, environ.get(QUEUE) or "default")
    return url, queue, check_name(PREFIX, environ.get(PREFIX) or "tokenmill")


def storage_of(environ: Mapping[str, str]) -> Folder:
    """Return the storage of the HTTP API's files and batches.

    Raises:
        ValueError: the variable is missing, or its folder cannot be used; the message begins with the variable's name.
    """
    path = environ.get(FILES)
    if not path:
        raise ValueError(f"{FILES}: not set; set it to the folder of the gateway's --files to run its batches")
    try:
        return Folder(path)
    except OSError as error:
        raise ValueError(f"{FILES}: {path}: {error.strerror or error}") from None


def _client(url: str | None, queue: str | None, prefix: str | None) -> Client:
    usual = place(os.environ)
    return Client(url or usual[0], queue or usual[1], prefix=prefix or usual[2])


def _current_id(client: Client, job: RqJob) -> str:
    """Return the id of the request to submit or wait for: the first generation that has not ended without success.

    A generation for which a cancel is set counts as ended.
    """
    base = job.id if len(job.id) <= LONGEST_ID else hashlib.sha256(job.id.encode()).hexdigest()
    for request in generation_ids(base, first=f"{base}.g1"):
        names = generation_keys(client.keys, request)
        values = client.patiently(lambda names=names: client.redis.mget(names))  # type: ignore[misc]
        if not is_over(values, lambda result: not result.ok):
            return request
    raise RuntimeError("unreachable")


def _wait(job: RqJob, request: Job) -> Result:
    cancelled = rqjob.cancelled(job)
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
    """Cancel a request if its RQ job exceeds its `job_timeout` within the block and will not be retried."""
    try:
        yield
    except JobTimeoutException:
        if not job.retries_left:
            _clean_up(lambda: request.cancel("time-out in RQ", timeout=CLEAN_UP_S))
        raise


def _clean_up(cancel: Callable[[], object]) -> None:
    """Cancel the unfinished requests of a job; an error of the cancel is logged, so that it does not hide the job's."""
    try:
        cancel()
    except (RedisError, TimeoutError, batch.BatchError) as error:
        log.warning("could not cancel the requests of an RQ job that has ended; the requests keep running: %s", error)


def _cancel(request: str, url: str | None, queue: str | None, prefix: str | None) -> None:
    with _client(url, queue, prefix) as client:
        client.job(request).cancel("stopped in RQ")


def _promoting(scripts: Scripts, stop: Callable[[], bool]) -> Callable[[], bool]:
    """Return `stop`, extended to move due delayed jobs into their lanes once in `PROMOTE_S`; it is called often."""
    last = time.monotonic()

    def probe() -> bool:
        nonlocal last
        if time.monotonic() >= last + PROMOTE_S:
            last = time.monotonic()
            scripts.promote()
        return stop()

    return probe
