"""Clients that read slowly, or never, cost the gateway a bounded amount of memory, and no other client its stream."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from tests.producer.gateway.harness import HOST, GatewayProcess, Stack, get
from tests.producer.gateway.streams import Call, chat, texts_of
from tests.support import eventually
from tokenmill.protocol.job import Identity
from tokenmill.protocol.result import Choice, Result, Status, Usage
from tokenmill.protocol.scripts import TokenBatch

pytestmark = pytest.mark.redis_server

CLIENTS = 60
EVENTS = 3000
TEXT = "x" * 1000
"""Text of each event."""
MAX_BYTES_PER_CLIENT = 512 << 10
"""Of the gateway's memory; what a client leaves unread is more than five times as much."""


def large_job(stack: Stack) -> str:
    """Write a finished job with `EVENTS` events, as a worker does; return its id."""
    queue, scripts, job = stack.queue, stack.queue.scripts(), Identity("large")
    ref = queue.deliver(scripts, job.id)
    fence = scripts.start(ref, job, prompt_tokens=1).fence
    for first in range(1, EVENTS + 1, 100):
        batch = TokenBatch(queue.keys)
        for number in range(first, first + 100):
            batch.add(job.id, fence, number, 0, TEXT, 1)
        assert not scripts.publish(batch)
    result = Result(job.id, Status.SUCCEEDED, choices=(Choice(0, TEXT * EVENTS, "stop"),), usage=Usage(1, EVENTS, 0))
    scripts.finalise(ref, job, result, fence=fence, published=EVENTS)
    return job.id


@contextmanager
def connections(gateway: GatewayProcess, path: str, count: int) -> Iterator[list[socket.socket]]:
    """Ask for a path on many connections, without reading the answers."""
    with ExitStack() as opened:
        made = []
        for _ in range(count):
            one = opened.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect((HOST, gateway.port))
            one.sendall(f"GET {path} HTTP/1.1\r\nhost: {HOST}\r\n\r\n".encode())
            made.append(one)
        yield made


def read_nothing(_: socket.socket) -> None:
    return None


def read_one_byte(connection: socket.socket) -> None:
    connection.setblocking(False)
    with suppress(BlockingIOError):
        connection.recv(1)


def settled(gateway: GatewayProcess, step: Callable[[], Any]) -> int:
    """Call `step` until the gateway's memory has stopped to grow; return it."""
    steps = [gateway.rss]
    while len(steps) < 8 or steps[-1] > steps[-6]:
        step()
        time.sleep(0.5)
        steps.append(gateway.rss)
    return steps[-1]


@pytest.mark.parametrize("read", [read_nothing, read_one_byte])
def test_clients_that_do_not_read_a_stream_cost_little_memory(
    own_stack: Stack, read: Callable[[socket.socket], None]
) -> None:
    gateway = own_stack.gateway()
    job = large_job(own_stack)
    path = f"/v1/jobs/{job}/events"
    whole = list(Call(gateway, path).events())
    unread = sum(len(event.data) for event in whole)
    assert unread > 5 * MAX_BYTES_PER_CLIENT
    with connections(gateway, path, 2) as few:
        settled(gateway, lambda: [read(one) for one in few])
    before = gateway.rss
    with connections(gateway, path, CLIENTS) as many:
        eventually(lambda: all(one.recv(1, socket.MSG_PEEK) for one in many), 60)
        after = settled(gateway, lambda: [read(one) for one in many])
        assert after - before < CLIENTS * MAX_BYTES_PER_CLIENT
        own_stack.worker()
        events = list(Call(gateway, "/v1/chat/completions", chat("Hi", stream=True)).events())
        assert events[-1].data == "[DONE]"
        assert texts_of(events)
    again = list(Call(gateway, path).events())
    assert [json.loads(event.data) for event in again] == [json.loads(event.data) for event in whole]


def test_slow_clients_that_come_and_go_leave_no_memory_behind(own_stack: Stack) -> None:
    gateway = own_stack.gateway()
    path = f"/v1/jobs/{large_job(own_stack)}/events"
    list(Call(gateway, path).events())
    before = gateway.rss
    for _ in range(4):
        with connections(gateway, path, CLIENTS) as many:
            eventually(lambda many=many: all(one.recv(1, socket.MSG_PEEK) for one in many), 60)  # type: ignore[misc]
            settled(gateway, lambda: None)
        eventually(lambda: streams_open(gateway) == 0, 30)
    assert gateway.rss - before < CLIENTS * MAX_BYTES_PER_CLIENT


def streams_open(gateway: GatewayProcess) -> float:
    lines = get(f"{gateway.url}/metrics").body.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("tokenmill_gateway_streams_open "))
