"""Runs a batch of the HTTP API from its state to its end, with the code of `tokenmill batch run`.

    validating ──► in_progress ──► finalizing ──► completed        each line of the input has one line in a file
        │               ├────────► finalizing ──► expired          also here: the lines not done say batch_expired
        │               └────────► (cancelling) ─► cancelled       also here: batch_cancelled
        └─► failed                                                 the input is no batch file

`outcome` in the record says how the batch is to end, once that is decided: after a kill, the next run goes on from
there. Only the run that holds the batch's lock writes the record.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import orjson
import structlog

from producer.files.objects import CANCEL, ENDED, file_record
from producer.files.storage import FILE, Json, Storage, new_id
from tokenmill import batch
from tokenmill.client.sync import Client
from tokenmill.protocol.errors import clean

POLL_S: Final = 0.5
"""How often a running batch looks whether it was cancelled, has expired, or should make way."""
COUNTS_S: Final = 1.0
"""How often the counts of a running batch are written."""
CLOSE_S: Final = 60.0
"""Seconds, from the decision on, that the end of a cancelled or expired batch waits for its requests that still run."""
GIVE_UP_S: Final = 3600
"""Seconds after its `expires_at` from which on a batch that cannot be run becomes `failed`."""
PRIORITY: Final = "low"
"""Lane of the requests of all batches."""
_GZIP: Final = b"\x1f\x8b"
_CODES: Final = {"cancelled": "batch_cancelled", "expired": "batch_expired"}
_REASONS: Final = {
    "cancelled": "The batch was cancelled before this request was done.",
    "expired": "The batch's time ran out before this request was done.",
}

log = structlog.get_logger(__name__)


def run_batch(
    storage: Storage, tenant: str | None, batch_id: str, *, client: Client, makes_way: Callable[[float], bool]
) -> bool:
    """Start or continue a batch; return False if it stopped early to make way and must be continued.

    Does nothing for a batch that has ended or was deleted, or that another process runs.

    Args:
        client: of the queue for which the batch was created.
        makes_way: called about twice a second, in a thread, with the seconds that the run took to start (0 until it
            has started); the run stops soon after it returns true.

    Raises:
        tokenmill.batch.BatchError, OSError: the files cannot be used, or the batch belongs to another queue; a later
            call continues the batch.
        redis.RedisError: Redis stayed away; a later call continues the batch.
    """
    bucket = storage.batches(tenant)
    try:
        with bucket.lock(batch_id) as held:
            if not held:
                log.info("batch_runs_elsewhere", id=batch_id)
                return True
            record = bucket.load(batch_id)
            if record is None:
                return True
            if record["root"] != client.keys.root:
                raise batch.BatchError(f"{batch_id}: is a batch of the queue with the keys {record['root']}…")
            run = _Run(storage, tenant, batch_id, record, client, makes_way)
            if record["status"] not in ENDED and not run.go():
                return False
            bucket.clear(batch_id)
            storage.close_batch(batch_id)
            return True
    except KeyError:  # deleted
        return True


class _Run:
    """One run of one batch, under its lock."""

    def __init__(
        self,
        storage: Storage,
        tenant: str | None,
        batch_id: str,
        record: Json,
        client: Client,
        makes_way: Callable[[float], bool],
    ) -> None:
        self._files, self._bucket = storage.files(tenant), storage.batches(tenant)
        self._tenant, self._id, self._record = tenant, batch_id, record
        self._client, self._makes_way = client, makes_way
        self._input = self._bucket.content(batch_id)
        folder = self._bucket.workspace(batch_id)
        self._output, self._errors = folder / "output.jsonl", folder / "errors.jsonl"
        self._stop, self._way, self._done = threading.Event(), threading.Event(), threading.Event()
        self._begun, self._start_s, self._counted = time.monotonic(), 0.0, -COUNTS_S

    def go(self) -> bool:
        """Start or continue the batch; return False if it stopped early to make way."""
        try:
            self._refuse_gzip()
            with self._watch():
                outcome = self._record["outcome"] or self._due() or self._work()
                if outcome is not None:
                    self._decide(outcome)
                if outcome is None or not self._close(outcome):
                    return False
            self._finish(outcome)
        except batch.BatchInvalid as invalid:
            self._fail(invalid.faults)
        except (batch.BatchError, OSError):
            if time.time() < self._record["expires_at"] + GIVE_UP_S:
                raise
            log.exception("batch_given_up", id=self._id)
            message = "The batch could not be run; the log of the clerk says why."
            self._fail([batch.Fault(None, "internal_error", message)])
        return True

    # ── when to stop ──────────────────────────────────────────────────────────────────────────────────────────────

    def _due(self) -> str | None:
        """Return how the batch must end now; None if it may go on."""
        if self._bucket.noted(self._id, CANCEL) is not None:
            return "cancelled"
        return "expired" if time.time() >= self._record["expires_at"] else None

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Within the block, a thread sets the events that stop the work, also while the work waits for Redis."""
        thread = threading.Thread(target=self._watching, name="batch-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _watching(self) -> None:
        while not self._done.wait(POLL_S):
            try:
                if self._makes_way(self._start_s):
                    self._way.set()
                if self._way.is_set() or self._due() is not None:
                    self._stop.set()
            except OSError as error:
                log.warning("batch_not_readable", id=self._id, message=str(error))

    # ── the work ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse_gzip(self) -> None:
        """Raise `BatchInvalid` for a compressed input, which could unpack to any size."""
        with self._input.open("rb") as file:
            if file.read(2) == _GZIP:
                message = "the file is compressed; upload it as plain JSONL"
                raise batch.BatchInvalid([batch.Fault(None, "invalid_file", message)], 1)

    def _work(self) -> str | None:
        """Run the requests; return how the batch must end now, or None if the run made way."""
        report = None
        with suppress(batch.BatchStopped):
            report = batch.run(
                *(self._input, self._output, self._errors),
                client=self._client,
                url=self._record["endpoint"],
                priority=PRIORITY,
                tenant=self._tenant,
                progress=self._count,
                stop=self._stop,
            )
        return "completed" if report is not None and report.complete else self._due()

    def _close(self, outcome: str) -> bool:
        """Give the requests of a cancelled or expired batch their lines; return False if that made way."""
        code = _CODES.get(outcome)
        if code is None:
            return True
        with suppress(batch.BatchStopped):
            return batch.close(
                *(self._input, self._output, self._errors),
                client=self._client,
                code=code,
                reason=_REASONS[outcome],
                url=self._record["endpoint"],
                grace_s=max(0.0, self._record["decided_at"] + CLOSE_S - time.time()),
                progress=self._count,
                stop=self._way,
            ).complete
        return False

    def _count(self, now: batch.Progress) -> None:
        """Write the counts, about once a second, and the state `in_progress`, when the input has been checked."""
        if not self._start_s:
            self._start_s = time.monotonic() - self._begun
        counts = {"total": now.total, "completed": now.succeeded, "failed": now.failed}
        begins = self._record["status"] == "validating" and self._record["outcome"] is None
        due = time.monotonic() >= self._counted + COUNTS_S or now.done == now.total
        if not begins and (not due or counts == self._record["request_counts"]):
            return
        self._counted = time.monotonic()
        if begins:
            self._save(status="in_progress", in_progress_at=int(time.time()), request_counts=counts)
        else:
            self._save(request_counts=counts)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _decide(self, outcome: str) -> None:
        """Write how the batch will end, and the ids that its files will have; a later run keeps to both."""
        if self._record["outcome"] is not None:
            return
        now = int(time.time())
        cancel = self._bucket.noted(self._id, CANCEL)
        if outcome == "cancelled":
            moments = {"cancelling_at": cancel["at"] if cancel else now}
        else:
            moments = {"status": "finalizing", "finalizing_at": now}
        made = {"output": new_id(FILE), "errors": new_id(FILE)}
        self._save(outcome=outcome, decided_at=now, made=made, **moments)

    def _finish(self, outcome: str) -> None:
        made = self._record["made"]
        model, usage = _summary(self._output)
        self._end(
            outcome,
            output_file_id=self._publish(self._output, made["output"]),
            error_file_id=self._publish(self._errors, made["errors"]),
            model=model,
            usage=usage,
        )

    def _publish(self, path: Path, file_id: str) -> str | None:
        """Put a file of lines among the tenant's files; return its id, or None for a file without lines."""
        if not path.exists() or not path.stat().st_size:
            return None
        name = f"{self._id}_{path.stem}.jsonl"
        record = file_record(name, path.stat().st_size, "batch_output", int(time.time()), self._record["output_ttl_s"])
        self._files.add(file_id, record, path)
        return file_id

    def _fail(self, faults: Sequence[batch.Fault]) -> None:
        def text(message: str) -> str:
            return clean(message.replace(str(self._input), self._record["input_file_id"]))

        errors = [
            {"code": one.code, "line": one.line, "message": text(one.message), "param": one.param} for one in faults
        ]
        self._end("failed", errors=errors)

    def _end(self, status: str, **more: Any) -> None:
        self._save(status=status, **{f"{status}_at": int(time.time())}, **more)
        counts = self._record["request_counts"]
        log.info("batch_ended", id=self._id, status=status, **counts)

    def _save(self, **changes: Any) -> None:
        self._record = {**self._record, **changes}
        self._bucket.save(self._id, self._record)


def _summary(output: Path) -> tuple[str | None, Json | None]:
    """Return the model that the lines of an output name, and their tokens as OpenAI's object of a batch has them."""
    model, prompt, cached, completion = None, 0, 0, 0
    if output.exists():
        with output.open("rb") as lines:
            for line in lines:
                body: Any = orjson.loads(line)["response"]["body"]
                model, usage = body["model"] or model, body["usage"]
                prompt += usage["prompt_tokens"]
                cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
                completion += usage.get("completion_tokens", 0)
    if not prompt + completion:
        return model, None
    return model, {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
