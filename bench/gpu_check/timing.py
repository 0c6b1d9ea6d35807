"""Times of work on the device: events on a GPU, the host's clock in the reduced form."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_check.table import Setup

_ROUNDS = 3


def seconds(setup: Setup, call: Callable[[], Any], budget: float = 0.15) -> float:
    """Return the seconds that the device takes for `call`, the least of three rounds.

    Args:
        setup: the GPU, real or pretended.
        call: launches the work, and doesn't wait for it.
        budget: seconds of a round.
    """
    for _ in range(setup.pick(2, 1)):
        call()
    one = _round(setup, call, 1)
    count = setup.pick(max(1, min(200, int(budget / max(one, 1e-6)))), 1)
    return max(min(_round(setup, call, count) for _ in range(setup.pick(_ROUNDS, 1))), 1e-9)


def _round(setup: Setup, call: Callable[[], Any], count: int) -> float:
    torch.cuda.synchronize()
    if setup.reduced:
        begun = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def recorded(setup: Setup, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that replays `call` as a CUDA graph, so that launches cost nothing; eager if it can't be
    recorded."""
    if setup.reduced:
        return call
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call()
    except RuntimeError:
        return call
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def copy_bandwidth(setup: Setup) -> float:
    """Return the bytes a second, read and written, of a large copy on this device."""
    size: int = setup.pick(2 << 30, 1 << 12)
    if not setup.reduced:
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    taken = seconds(setup, lambda: target.copy_(source))
    return 2 * size / max(taken, 1e-9)
