"""Counts how often the host waits for the device: by PyTorch's own warnings, and by a hook, since these miss some."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu_check.table import Setup

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "is_nonzero", "item")
"""Operations whose result, or its shape, the host must know."""
_COPIES = ("to", "_to_copy", "copy_")
"""In inference mode `to` is not cut into smaller operations."""


class _Hook(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations that wait: reads of the device, and copies that are not asynchronous."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _READS and any(isinstance(x, Tensor) and x.is_cuda for x in args):
            self.found[name] += 1
        out = func(*args, **kwargs)
        if name in _COPIES and isinstance(out, Tensor):
            source = args[1] if name == "copy_" else args[0]
            if source.is_cuda != out.is_cuda and not _asynchronous(source, out, args, kwargs):
                self.found["copy"] += 1
        return out


def _asynchronous(source: Tensor, out: Tensor, args: Any, kwargs: Any) -> bool:
    """Return whether a copy between host and device is one that the host does not wait for."""
    flags = [x for x in args if isinstance(x, bool)]  # the first one is `non_blocking`
    return bool(kwargs.get("non_blocking") or (flags and flags[0])) and (out if source.is_cuda else source).is_pinned()


@contextlib.contextmanager
def count_waits(setup: Setup) -> Iterator[Counter[str]]:
    """Count the waits within the block, by kind: `event` is the one that each step may have."""
    found: Counter[str] = Counter()
    event: Any = torch.cuda.Event
    if setup.reduced:
        from tests.pretended import streams

        event = streams.Event
    wait = event.synchronize

    def counted(self: Any) -> Any:
        found["event"] += 1
        return wait(self)

    def synchronized(*_: Any) -> None:
        found["synchronize"] += 1

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(event, "synchronize", counted))
        stack.enter_context(mock.patch("torch.cuda.synchronize", synchronized))
        seen = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if not setup.reduced:
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        stack.enter_context(_Hook(found))
        yield found
    for warning in seen:
        if "synchroniz" in str(warning.message).lower():
            found["warned"] += 1
