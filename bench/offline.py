"""Runs a workload by calling the engine: no queue, no threads, no network."""

from __future__ import annotations

import time

from bench.measure import Run
from bench.workloads import Item
from engine.request import Request, SamplingParams
from worker.loop import EngineLike


def run(engine: EngineLike, items: list[Item], salt: str) -> Run:
    """Add all items at once and step until the engine is idle; a token is timed when its step returns.

    Args:
        engine: an idle engine.
        items: the workload.
        salt: the cache salt; different in each round, so that no round finds cached prefixes of an earlier round.
    """
    start = time.monotonic()
    last: dict[str, float] = {}
    measured = Run(
        name="offline",
        requests=len(items),
        prompt_tokens=sum(len(item.prompt) for item in items),
        output_tokens=sum(item.output_tokens for item in items),
        seconds=0.0,
    )
    for number, item in enumerate(items):
        engine.add(_request(str(number), item, salt))
    generated = 0
    while engine.has_work:
        output = engine.step()
        now = time.monotonic()
        for delta in output.deltas:
            count = len(delta.token_ids)
            if delta.request_id not in last:
                measured.first_token.append(now - start)
            elif count:
                measured.inter_token += [(now - last[delta.request_id]) / count] * count
            last[delta.request_id] = now
        generated += sum(finished.completion_tokens for finished in output.finished)
    measured.seconds = time.monotonic() - start
    if generated != measured.output_tokens:
        raise RuntimeError(f"the engine generated {generated} tokens, not {measured.output_tokens}")
    return measured


def _request(name: str, item: Item, salt: str) -> Request:
    params = SamplingParams(
        max_tokens=item.output_tokens, min_tokens=item.output_tokens, temperature=0.0, ignore_eos=True
    )
    return Request(id=name, prompt=item.prompt, params=params, cache_salt=salt)
