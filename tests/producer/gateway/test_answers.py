"""Large answers to clients that do not read them use a bounded part of the memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from producer.gateway import answers
from producer.gateway.answers import LARGE_BYTES, Answers
from producer.gateway.inflight import InFlight
from producer.gateway.sse import DONE, EventStream
from tests.producer.gateway.asgi import served
from tests.tokenmill.mini import Queue
from tokenmill.openai.errors import ApiError
from tokenmill.protocol.job import Identity
from tokenmill.protocol.result import Choice, Result, Status


def test_large_answers_are_counted_while_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_BYTES", 3 * LARGE_BYTES)
    made = Answers()
    with made.sent(2 * LARGE_BYTES), made.sent(LARGE_BYTES), made.sent(LARGE_BYTES - 1):
        assert made.bytes == 3 * LARGE_BYTES
        with pytest.raises(ApiError) as refused, made.sent(LARGE_BYTES):
            raise AssertionError("sent without room")
    assert (refused.value.status, refused.value.retry_after) == (503, 1.0)
    assert made.bytes == 0


def test_a_single_answer_may_be_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_BYTES", LARGE_BYTES)
    made = Answers()
    with made.sent(9 * LARGE_BYTES):
        assert made.bytes == 9 * LARGE_BYTES


def test_a_result_over_the_limit_of_large_answers_is_refused_and_can_be_read_later(queue: Queue) -> None:
    async def test() -> None:
        scripts = queue.scripts()
        ref = queue.deliver(scripts, "big")
        start = scripts.start(ref, Identity("big"), prompt_tokens=1)
        result = Result("big", Status.SUCCEEDED, choices=(Choice(0, "x" * LARGE_BYTES, "stop"),))
        scripts.finalise(ref, Identity("big"), result, fence=start.fence)
        async with served(queue) as (client, gateway):
            with gateway.inflight.answers.sent(answers.MAX_BYTES):
                refused = await client.get("/v1/jobs/big")
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
                assert refused.headers["retry-after"] == "1"
                assert (await client.get("/v1/jobs/nothing")).status_code == 404
            assert len((await client.get("/v1/jobs/big")).content) > LARGE_BYTES
            assert gateway.inflight.answers.bytes == 0

    asyncio.run(test())


@pytest.mark.parametrize("taken", [True, False], ids=["the first event", "a later event"])
def test_a_large_event_over_the_limit_of_large_answers_ends_its_stream_with_an_error(taken: bool) -> None:
    large = b"data: " + b"x" * LARGE_BYTES + b"\n\n"
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def frames() -> Any:
        if not taken:
            yield b"data: small\n\n"
            yield large
        yield DONE

    async def test() -> None:
        inflight = InFlight(asyncio.Event())
        with inflight.answers.sent(answers.MAX_BYTES):
            stream = EventStream(frames(), inflight, first=large if taken else b"", on_end=lambda _: None)
            await stream({"type": "http"}, receive, send)

    asyncio.run(test())
    body = b"".join(sent)
    assert body.startswith(b"data: small\n\n") or taken
    assert b'"code":"overloaded"' in body
    assert b"xxx" not in body
    assert DONE not in body
