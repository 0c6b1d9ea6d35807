"""Measures streams over HTTP against readers on Redis: first tokens, gaps between tokens, memory of the gateway.

A real Redis, a worker process with an engine that computes nothing at a fixed rate, a gateway process, and all clients
in this process. Rounds over HTTP and rounds on Redis alternate. In a round each client reads two streams in turn; the
first begins at a random time within the length of a stream, so that all clients read while streams begin and end. In a
burst each client reads one stream, and all begin at once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from bench.measure import percentile, spread
from tests.producer.gateway.harness import HOST, GatewayProcess, Stack, stack
from tests.support import running_redis
from tokenmill.client.aio import AsyncClient
from tokenmill.protocol.events import TokenEvent

BUDGET = 1.2
"""Maximum ratio of a latency over HTTP to the same one on Redis."""
MAX_GROWTH = 1.1
"""Maximum ratio of the gateway's memory after the last round to that after the first one over HTTP."""
SAMPLE_SECONDS = 0.5


class StreamFailed(RuntimeError):
    """A stream that did not deliver its whole text; the message says why."""


@dataclass
class Round:
    """Latencies of the streams of one round, and the CPU time that it took, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    gateway: float = 0.0
    """CPU time of the gateway."""
    clients: float = 0.0
    """CPU time of this process, which has all clients."""

    def add(self, begun: float, arrivals: list[tuple[float, int]], tokens: int) -> None:
        """Add one stream.

        Args:
            begun: time of its request.
            arrivals: time and number of tokens of each of its events.
            tokens: number of tokens that it should have.

        Raises:
            StreamFailed: tokens are missing.
        """
        found = sum(count for _, count in arrivals)
        if found != tokens:
            raise StreamFailed(f"a stream had {found} tokens instead of {tokens}")
        self.first.append(arrivals[0][0] - begun)
        for (before, _), (now, count) in itertools.pairwise(arrivals):
            self.gaps += [(now - before) / count] * count


Read = Callable[[Stack, int, int, Round], Awaitable[None]]
"""Reads one stream with a prompt of this number, so many tokens long, and adds it to the round."""


@dataclass
class Memory:
    """Resident memory of a process over time, in bytes."""

    process: GatewayProcess
    samples: list[int] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample on a thread while the context is open."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.samples.append(self.process.rss)


async def over_http(made: Stack, number: int, tokens: int, result: Round) -> None:
    """Read one stream of `POST /v1/completions`."""
    body = orjson.dumps({"model": "fake", "prompt": str(number), "max_tokens": tokens, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    begun, arrivals = time.perf_counter(), []
    reader, writer = await asyncio.open_connection(HOST, made.first_gateway.port)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    async for event in sse_events(reader):
        now, text = time.perf_counter(), "".join(choice["text"] for choice in event["choices"])
        if text:
            arrivals.append((now, text.count(" ")))
    writer.close()
    result.add(begun, arrivals, tokens)


async def sse_events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, list[dict[str, str]]]]:
    """Read a chunked answer of server-sent events until `[DONE]`.

    Raises:
        StreamFailed: the answer has another status than 200, or ends early.
    """
    header = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in header.partition(b"\r\n")[0]:
        raise StreamFailed(header.decode() + (await reader.read(2000)).decode())
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if not event.startswith(b":"):
                yield orjson.loads(data)
    raise StreamFailed("a stream ended before [DONE]")


def on_redis(client: AsyncClient) -> Read:
    """Return the reader of one job's events by the client library."""

    async def read(made: Stack, number: int, tokens: int, result: Round) -> None:
        begun, arrivals = time.perf_counter(), []
        job = await client.submit(str(number), max_tokens=tokens)
        async for event in job.stream():
            if isinstance(event, TokenEvent):
                arrivals.append((time.perf_counter(), event.tokens))
        result.add(begun, arrivals, tokens)

    return read


@dataclass(frozen=True)
class Load:
    """What the clients of a round do."""

    clients: int
    tokens: int
    """Length of each stream."""
    spread_s: float
    """The first streams begin within this time; 0: all at once."""

    @property
    def streams(self) -> int:
        """Streams that each client reads in turn."""
        return 2 if self.spread_s else 1

    async def run(self, made: Stack, read: Read, result: Round) -> None:
        """Run all clients to their ends; the same random times in each round."""
        rng = random.Random(1)
        delays = [rng.uniform(0, self.spread_s) for _ in range(self.clients)]

        async def client(number: int) -> None:
            await asyncio.sleep(delays[number])
            for _ in range(self.streams):
                await read(made, number, self.tokens, result)

        await asyncio.gather(*(client(number) for number in range(self.clients)))


async def rounds(made: Stack, load: Load, count: int, memory: Memory) -> dict[str, list[Round]]:
    """Run `count` rounds of each kind in turn, and print them; return kind → rounds."""
    found: dict[str, list[Round]] = {"HTTP": [], "Redis": []}
    async with AsyncClient(made.url, made.queue.keys.queue) as client:
        kinds = {"HTTP": over_http, "Redis": on_redis(client)}
        for read in kinds.values():  # so that connections and code are warm
            await Load(load.clients, 4, 0).run(made, read, Round())
            memory.samples.clear()
        for number, (name, read) in itertools.product(range(count), kinds.items()):
            one, gateway = Round(), made.first_gateway
            one.gateway, one.clients = -gateway.cpu_seconds, -time.process_time()
            await load.run(made, read, one)
            one.gateway, one.clients = one.gateway + gateway.cpu_seconds, one.clients + time.process_time()
            found[name].append(one)
            print(_line(f"round {number + 1} {name:<5}", one, load, gateway), flush=True)
    return found


def _line(name: str, one: Round, load: Load, gateway: GatewayProcess) -> str:
    """Return a round as one line of text."""
    tokens = load.clients * load.streams * load.tokens
    cpu = f"µs of CPU a token: gateway {one.gateway / tokens * 1e6:.0f}, clients {one.clients / tokens * 1e6:.0f}"
    return (
        f"{name}: first token {spread(one.first)} ms, between tokens {spread(one.gaps)} ms (p50/p90/p99); {cpu}; "
        f"gateway {gateway.rss / 2**20:.1f} MiB"
    )


def report(clients: int, rate: float, tokens: int, count: int, burst: bool) -> bool:
    """Run the rounds and print the ratios of their medians; return whether all are within their limits."""
    with TemporaryDirectory() as name, running_redis(Path(name)) as server, stack(server.url, Path(name)) as made:
        gateway = made.gateway(wait=False, log_level="warning", max_requests=str(2 * clients))
        slots = str(clients)
        made.worker(FAKE_STEP=str(1 / rate), max_num_seqs=slots, max_waiting=slots, lease_seconds="30")
        gateway.wait_until_it_answers()
        memory = Memory(gateway)
        with memory.sampled():
            found = asyncio.run(rounds(made, Load(clients, tokens, 0 if burst else tokens / rate), count, memory))
    good = True
    for what, share in itertools.product(("first", "gaps"), (0.5, 0.99)):
        medians = {
            kind: statistics.median(percentile(getattr(one, what), share) for one in some)
            for kind, some in found.items()
        }
        ratio = medians["HTTP"] / medians["Redis"]
        good &= ratio <= BUDGET
        print(
            f"{'first token' if what == 'first' else 'between tokens'} p{share * 100:.0f}: "
            f"HTTP {medians['HTTP'] * 1000:.1f} ms, Redis {medians['Redis'] * 1000:.1f} ms, ratio {ratio:.2f} "
            f"(at most {BUDGET:g})"
        )
    third = max(1, len(memory.samples) // 3)
    early, late = max(memory.samples[:third]), max(memory.samples[-third:])
    print(
        f"memory of the gateway: {early / 2**20:.1f} MiB in the first third of the time, {late / 2**20:.1f} MiB in the "
        f"last, highest {max(memory.samples) / 2**20:.1f} MiB"
    )
    return good and late <= MAX_GROWTH * early
