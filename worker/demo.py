"""`tokenmill demo`: a dozen chat prompts through the stream, with a real worker process and the demo model."""

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

from producer.client import Client, Job
from producer.protocol.connection import command_client, redact
from producer.protocol.events import FinalEvent, StartEvent, TokenEvent
from producer.protocol.keys import CANCEL_TTL_S, Keys
from worker.child import WorkerEnded, WorkerProcess, worker_process
from worker.demo_view import Row, View, summary
from worker.embedded import EmbeddedRedisError, embedded_redis

PROMPTS = {
    "gravity": "What is gravity? Answer in two sentences.",
    "haiku": "Write a haiku about the sea.",
    "capital": "What is the capital of France?",
    "recipe": "How do I cook plain rice? Give me the steps.",
    "story": "Tell me a very short story about a fox and a crow.",
    "primes": "List the first five prime numbers.",
    "spanish": "How do you say 'good morning' in Spanish?",
    "polite": "Rewrite this politely: 'Send me the report now.'",
    "moon": "Why does the moon have phases?",
    "python": "Write a Python function that adds two numbers.",
    "advice": "Give me one tip for sleeping better.",
}
MAX_TOKENS = 64

ENDLESS = "endless"
"""The request that is cancelled while it runs."""
ENDLESS_PROMPT = "Tell me a story that never ends."
ENDLESS_TOKENS = 1500
SEEN_BEFORE_CANCEL = 60
"""Characters of it."""

FRAME = 0.1
"""Seconds between two looks at the rows."""
SETTLE = 15.0
"""Seconds that the worker has to say that all its blocks are free; it tells of itself every few seconds."""


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


def demo(
    redis: Annotated[
        str | None, typer.Option(help="URL of a real Redis or Valkey. Default: an embedded one, gone afterwards.")
    ] = None,
    model: Annotated[str, typer.Option(help="What the worker serves.")] = "smollm2-135m",
    timeout: Annotated[float, typer.Option(help="Seconds after which the demo gives up.", min=1)] = 300,
) -> None:
    """Run a dozen chat prompts through a real worker, cancel one of them, and show what came of it."""
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        complaints = _Demo(console, model, time.monotonic() + timeout).run(redis)
    except (DemoError, WorkerEnded, EmbeddedRedisError, RedisError) as error:
        complaints = [str(error)]
    except KeyboardInterrupt:
        console.print("interrupted")
        raise typer.Exit(130) from None
    for complaint in complaints:
        console.print(f"not as it should be: {complaint}", style="red", markup=False, highlight=False)
    raise typer.Exit(1 if complaints else 0)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Demo:
    def __init__(self, console: Console, model: str, deadline: float) -> None:
        self.console = console
        self.model = model
        self.deadline = deadline
        self.queue = f"demo-{secrets.token_hex(4)}"
        self.keys = Keys(self.queue)

    def run(self, url: str | None) -> list[str]:
        """The whole demo; returns what is not as it should be. Everything it started has ended then."""
        with contextlib.ExitStack() as stack:
            where = "an embedded Redis" if url is None else redact(url)
            self.say(f"queue {self.queue} on {where}; starting a worker with {self.model}")
            url = url or stack.enter_context(embedded_redis())
            options = ("--model", self.model, "--redis", url, "--queue", self.queue)
            worker = stack.enter_context(worker_process(*options))
            self.redis = stack.enter_context(command_client(url))
            client = stack.enter_context(Client(url, queue=self.queue))
            rows = self.converse(client, worker)
            free, total = self.blocks(rows)
            status = worker.stop()
        self.report(rows, free, total)
        return _complaints(rows, free, total, status)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def converse(self, client: Client, worker: WorkerProcess) -> list[Row]:
        """Submit everything, watch it, cancel one request once it has said something."""
        jobs, rows = self.submit(client)
        threads = [threading.Thread(target=_follow, args=pair, daemon=True) for pair in zip(jobs, rows, strict=True)]
        for thread in threads:
            thread.start()
        view, endless, cancelled = View(self.console, rows), rows[-1], False
        with view.shown():
            while not all(row.ended for row in rows):
                worker.check()
                if time.monotonic() > self.deadline:
                    raise DemoError(f"not finished in time; the end of the worker's log:\n{worker.last_words()}")
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

    def blocks(self, rows: list[Row]) -> tuple[int, int]:
        """Free and total KV blocks of the worker once it says that nothing runs, or when its patience is over."""
        key = self.keys.worker(next((row.worker for row in rows if row.worker), ""))
        until = min(self.deadline, time.monotonic() + SETTLE)
        while True:
            told = {name.decode(): value for name, value in self.redis.hgetall(key).items()}
            free, total = int(told.get("free_blocks", 0)), int(told.get("total_blocks", 0))
            if (total and free == total) or time.monotonic() > until:
                return free, total
            time.sleep(FRAME)

    def report(self, rows: list[Row], free: int, total: int) -> None:
        """The last table and the line under it."""
        self.say("")
        self.console.print(summary(rows))
        tokens = sum(row.tokens for row in rows)
        seconds = max(row.ended_at for row in rows) - min(row.started_at or row.ended_at for row in rows)
        rate = f"{tokens / seconds:.0f}" if seconds > 0 else "-"
        self.say(f"\n{tokens} tokens in {seconds:.1f} s: {rate} tokens/s; KV blocks free: {free} of {total}")


def _follow(job: Job, row: Row) -> None:
    """Write into `row` what the job's stream says, to its end."""
    try:
        for event in job.stream():
            match event:
                case StartEvent():
                    row.restart(event.worker)
                case TokenEvent():
                    row.text += event.text
                case FinalEvent(result=result):
                    row.end(event.status.value, result or job.result(timeout=5))
    except Exception as error:  # noqa: BLE001 - whatever it is, the main thread must hear of it
        row.lose(f"{type(error).__name__}: {error}")


def _complaints(rows: list[Row], free: int, total: int, status: int) -> list[str]:
    """What is not as it should be, one sentence each."""
    said = []
    for row in rows:
        wanted = "cancelled" if row.name == ENDLESS else "succeeded"
        if row.state != wanted:
            said.append(f"{row.name} ended as {row.state}, not {wanted}" + (f" ({row.error})" if row.error else ""))
    if not total or free != total:
        said.append(f"{free} of {total} KV blocks are free")
    if status != 0:
        said.append(f"the worker ended with status {status}")
    return said
