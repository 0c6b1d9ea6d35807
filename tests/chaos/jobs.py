"""The jobs of the chaos test, and how each of them may end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from engine.request import Request, SamplingParams
from tests.engine.stub import VOCAB, alone

LIMITS: dict[str, Any] = {"max_model_len": 96, "block_size": 4, "num_blocks": 96, "max_num_seqs": 16, "host_slots": 24}
"""A small pool: there is preemption and swapping."""
LANES = ("high", "normal", "low")


@dataclass
class Task:
    """One job of a chaos run."""

    id: str
    prompt: list[int]
    params: dict[str, Any]
    lane: str = "normal"
    bare: bool = False
    """A plain XADD, not the enqueue script."""
    fields: dict[str, Any] = field(default_factory=dict)
    delay_ms: int = 0
    cancel_after: float | None = None
    """Seconds after which it is cancelled."""
    bare_cancel: bool = False

    @property
    def body(self) -> bytes:
        return orjson.dumps({"prompt": self.prompt, **self.params})

    @cached_property
    def undisturbed(self) -> list[str]:
        """Return each choice's text, computed on an engine without other requests."""
        params = SamplingParams(**self.params)
        last = alone(Request(self.id, self.prompt, params), max_model_len=LIMITS["max_model_len"], num_blocks=100)
        return [choice.text for choice in last.choices]

    def check(self, result: dict[str, Any]) -> None:
        """Check that a whole text is the undisturbed text, and a partial text its beginning."""
        status, texts = result["status"], [choice["text"] for choice in result["choices"]]
        if status == "succeeded":
            assert texts == self.undisturbed, (self.id, result, self.undisturbed)
            return
        assert status in ("cancelled", "expired"), (self.id, result)
        assert status != "cancelled" or self.cancel_after is not None
        assert status != "expired" or "ttl_ms" in self.fields
        assert not texts or len(texts) == len(self.undisturbed)
        for text, whole in zip(texts, self.undisturbed, strict=False):
            assert whole.startswith(text), (self.id, text, whole)


def make_task(rng: random.Random, number: int) -> Task:
    """Make a random job of any kind."""
    stem = [rng.randrange(1, VOCAB) for _ in range(8)] if rng.random() < 0.5 else list(range(1, 9))
    task = Task(
        id=f"job-{number}-{rng.getrandbits(64):x}",
        prompt=stem + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 12))],
        params={
            "max_tokens": rng.randrange(2, 40),
            "temperature": rng.choice((0.0, 1.0)),
            "seed": rng.getrandbits(32),
            "n": rng.choice((1, 1, 1, 2, 4)),
            "ignore_eos": rng.random() < 0.5,
        },
        lane=rng.choice(LANES),
        bare=rng.random() < 0.4,
        bare_cancel=rng.random() < 0.5,
    )
    for name, odds, value in (
        ("tenant", 0.4, rng.choice(("red", "blue"))),
        ("group", 0.4, rng.choice(("one", "two", "three"))),
        ("stream", 0.1, "0"),
        ("ttl_ms", 0.15, str(rng.choice((20, 300, 1500)))),
    ):
        if rng.random() < odds:
            task.fields[name] = value
    if rng.random() < 0.25:
        task.cancel_after = rng.random() * 2
    if not task.bare and rng.random() < 0.1:
        task.delay_ms = rng.randrange(100, 1500)
    return task
