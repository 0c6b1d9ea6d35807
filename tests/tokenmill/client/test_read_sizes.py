"""How many events of a job one read takes: few large ones, many small ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tokenmill.mini import Queue
from tokenmill.client.core import READ_COUNT, Read
from tokenmill.client.follow import FIRST_COUNT, READ_BYTES
from tokenmill.client.sync import Client
from tokenmill.protocol.events import TokenEvent
from tokenmill.protocol.job import Identity
from tokenmill.protocol.result import Result, Status
from tokenmill.protocol.scripts import TokenBatch

EVENTS = 200


def written(queue: Queue, text: str) -> str:
    """Write a finished job with `EVENTS` events; return its id."""
    scripts, job = queue.scripts(), Identity("a")
    ref = queue.deliver(scripts, job.id)
    fence = scripts.start(ref, job, prompt_tokens=1).fence
    batch = TokenBatch(queue.keys)
    for number in range(1, EVENTS + 1):
        batch.add(job.id, fence, number, 0, text, 1)
    assert not scripts.publish(batch)
    scripts.finalise(ref, job, Result(job.id, Status.SUCCEEDED), fence=fence, published=EVENTS)
    return job.id


@pytest.mark.parametrize("text", ["x", "x" * 5000, "x" * (2 * READ_BYTES)])
def test_a_read_takes_as_many_events_as_their_size_allows(
    queue: Queue, client: Client, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    job, sizes = written(queue, text), list[int]()
    xread = client._xread

    def counted(step: Read) -> Any:
        replies = xread(step)
        sizes.append(sum(len(entries) for _, entries in replies or ()))
        return replies

    monkeypatch.setattr(client, "_xread", counted)
    events = [event for event in client.job(job).stream(timeout=60) if isinstance(event, TokenEvent)]
    assert [(event.n, event.text) for event in events] == [(number, text) for number in range(1, EVENTS + 1)]
    assert sizes[0] == FIRST_COUNT
    assert max(sizes) * len(text) <= max(READ_BYTES, FIRST_COUNT * len(text))
    assert max(sizes) <= READ_COUNT
    if text == "x":
        assert sizes[:5] == [FIRST_COUNT * 2**number for number in range(5)]
