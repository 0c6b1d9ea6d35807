"""`tokenmill demo`: runs a dozen chat prompts through a queue, a real worker process and the demo model."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from types import FrameType
from typing import Annotated

import typer
from redis.exceptions import RedisError
from rich.console import Console

from tokenmill.cli.console import checked
from tokenmill.client.sync import Client, Job
from tokenmill.protocol.connection import command_client, redact
from tokenmill.protocol.events import FinalEvent, StartEvent, TokenEvent
from tokenmill.protocol.keys import CANCEL_TTL_S, Keys
from tokenmill.protocol.url import check_url
from worker.demo.child import WorkerEnded, WorkerProcess, worker_process
from worker.demo.embedded import EmbeddedRedisError, embedded_redis
from worker.demo.view import Row, View, summary

PROMPTS = {
    "gravity": "What is gravity? Answer in two sentences.",
    "haiku": "Write a haiku about the sea.",
    "capital": "What is the capital of France?",
    "sum": "What is 2 + 2?",
    "primes": "List the first five prime numbers.",
    "picnic": "List three things to pack for a picnic.",
    "greeting": "Say hello to a new colleague.",
    "rainbow": "What is a rainbow?",
    "cat": "Suggest a name for a black cat.",
    "week": "How many days are in a week?",
    "librarian": "What does a librarian do?",
}
MAX_TOKENS = 64

ENDLESS = "endless"
"""Name of the request that is cancelled while it runs."""
ENDLESS_PROMPT = "Tell me a story that never ends."
ENDLESS_TOKENS = 1500
SEEN_BEFORE_CANCEL = 60
"""Characters of its text after which it is cancelled."""

FRAME = 0.1
"""Seconds between two updates of the table."""
SETTLE = 15.0
"""Seconds within which the worker must show that all its blocks are free."""


class DemoError(RuntimeError):
    """The demo failed; the message says why."""


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived."""


def demo(
    redis: Annotated[
        str | None,
        typer.Option(
            help="URL of a Redis or Valkey. Default: an embedded server that ends with the demo.",
            callback=checked(check_url),
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Model that the worker serves.")] = "smollm2-135m",
    timeout: Annotated[float, typer.Option(help="Seconds after which the demo gives up.", min=1)] = 300,
) -> None:
    """Run a dozen chat prompts through a real worker, cancel one of them, and show the results."""
    console = Console()
    show = _Demo(console, model, time.monotonic() + timeout)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, show.interrupt)
    try:
        complaints = show.run(redis)
    except (DemoError, WorkerEnded, EmbeddedRedisError, RedisError) as error:
        complaints = [str(error)]
    except Interrupted:
        console.print("interrupted")
        raise typer.Exit(130) from None
    for complaint in complaints:
        console.print(f"demo failed: {complaint}", style="red", markup=False, highlight=False)
    raise typer.Exit(1 if complaints else 0)


class _Demo:
    def __init__(self, console: Console, model: str, deadline: float) -> None:
        self.console = console
        self.model = model
        self.deadline = deadline
        self.queue = f"demo-{secrets.token_hex(4)}"
        self.keys = Keys(self.queue)
        self.interrupted = False

    def interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """Handle a signal. Raises nothing, since a process that is just being started would be left running."""
        self.interrupted = True

    def run(self, url: str | None) -> list[str]:
        """Run the demo, end everything that it started, and return what went wrong, a sentence for each fault."""
        with contextlib.ExitStack() as stack:
            where = "an embedded Redis" if url is None else redact(url)
            self.say(f"queue {self.queue} on {where}; starting a worker with {self.model}")
            url = url or stack.enter_context(embedded_redis())
            options = ("--model", self.model, "--redis", url, "--queue", self.queue, "--drain-seconds", "1")
            worker = stack.enter_context(worker_process(*options))
            self.redis = stack.enter_context(command_client(url))
            client = stack.enter_context(Client(url, queue=self.queue))
            with self.console.status("loading the model"):
                name = self.ready(worker)
            rows = self.converse(client, worker)
            free, total = self.blocks(name)
            status = worker.stop()
        self.report(rows, free, total)
        return _complaints(rows, free, total, status)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def ready(self, worker: WorkerProcess) -> bytes:
        """Wait until the worker serves, so that no time of a request includes loading; return the worker's key."""
        while True:
            for key in self.redis.scan_iter(match=self.keys.worker("*"), count=1000):
                if self.redis.hget(key, "status") == b"ready":
                    return bytes(key)
            self.check(worker)
            time.sleep(FRAME)

    def check(self, worker: WorkerProcess) -> None:
        """Raise if a signal arrived, the worker has ended, or the time is up."""
        if self.interrupted:
            raise Interrupted
        worker.check()
        if time.monotonic() > self.deadline:
            raise DemoError(f"not finished within --timeout; the end of the worker's log:\n{worker.log_tail()}")

    def converse(self, client: Client, worker: WorkerProcess) -> list[Row]:
        """Submit all requests, show their progress, and cancel one of them once it has some text."""
        jobs, rows = self.submit(client)
        threads = [threading.Thread(target=_follow, args=pair, daemon=True) for pair in zip(jobs, rows, strict=True)]
        for thread in threads:
            thread.start()
        view, endless, cancelled = View(self.console, rows), rows[-1], False
        with view.shown():
            while not all(row.ended for row in rows):
                self.check(worker)
                if not cancelled and len(endless.text) >= SEEN_BEFORE_CANCEL:
                    cancelled = True
                    self.redis.set(self.keys.cancel(jobs[-1].id), "seen enough", ex=CANCEL_TTL_S)
                view.refresh()
                time.sleep(FRAME)
            view.refresh()
        return rows

    def submit(self, client: Client) -> tuple[list[Job], list[Row]]:
        jobs, rows = [], []
        for name, question in [*PROMPTS.items(), (ENDLESS, ENDLESS_PROMPT)]:
            rows.append(Row(name, question))
            endless = name == ENDLESS
            jobs.append(
                client.submit(
                    messages=[{"role": "user", "content": question}],
                    max_tokens=ENDLESS_TOKENS if endless else MAX_TOKENS,
                    ignore_eos=endless,
                    temperature=0,
                )
            )
        return jobs, rows

    def blocks(self, key: bytes) -> tuple[int, int]:
        """Return free and total KV blocks, as the worker shows them after the last job has ended."""
        seconds, micros = self.redis.time()
        ended_ms = seconds * 1000 + micros // 1000
        until = min(self.deadline, time.monotonic() + SETTLE)
        while True:
            shown = self.redis.hmget(key, ["updated_ms", "free_blocks", "total_blocks"])
            updated_ms, free, total = (int(value or 0) for value in shown)
            if (updated_ms > ended_ms and total and free == total) or time.monotonic() > until:
                return free, total
            time.sleep(FRAME)

    def report(self, rows: list[Row], free: int, total: int) -> None:
        """Print the final table and a summary line."""
        self.say("")
        self.console.print(summary(rows))
        tokens = sum(row.tokens for row in rows)
        seconds = max(row.ended_at for row in rows) - min(row.started_at or row.ended_at for row in rows)
        rate = f"{tokens / seconds:.0f}" if seconds > 0 else "-"
        self.say(f"\n{tokens} tokens in {seconds:.1f} s: {rate} tokens/s; KV blocks free: {free} of {total}")


def _follow(job: Job, row: Row) -> None:
    """Read a job's stream to its end, into `row`."""
    try:
        for event in job.stream():
            match event:
                case StartEvent():
                    row.restart()
                case TokenEvent():
                    row.text += event.text
                case FinalEvent(result=result):
                    row.end(event.status.value, result or job.result(timeout=5))
    except Exception as error:  # noqa: BLE001 - the main thread must see every error
        row.lose(f"{type(error).__name__}: {error}")


def _complaints(rows: list[Row], free: int, total: int, status: int) -> list[str]:
    """Return what went wrong, a sentence for each fault."""
    found = []
    for row in rows:
        wanted = "cancelled" if row.name == ENDLESS else "succeeded"
        if row.state != wanted:
            found.append(f"{row.name} ended as {row.state}, not {wanted}" + (f" ({row.error})" if row.error else ""))
    if not total or free != total:
        found.append(f"{free} of {total} KV blocks are free")
    if status != 0:
        found.append(f"the worker ended with status {status}")
    return found
