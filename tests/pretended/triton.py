"""Launches of Triton kernels on the pretended GPU: Triton's interpreter runs them when the queue gets to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from kernels import sampling, triton
from tests.pretended.kernels import GROUPS, STAND_INS, SamplerOf
from tests.pretended.tensor import GpuTensor

if TYPE_CHECKING:
    from tests.pretended.gpu import Gpu

_ALIGNED = 16
"""Triton compiles a kernel again for an integer or an address that is a multiple of this."""


def interprets() -> bool:
    """Return whether this process runs Triton kernels in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def triton_on(gpu: Gpu, *, stand_ins: bool) -> Iterator[None]:
    """Launch Triton kernels on the pretended GPU.

    In a process that does not interpret them, `stand_ins` plays some of them in torch; without it Triton is not there.
    """
    with ExitStack() as stack:
        if interprets():
            from triton.runtime.interpreter import InterpretedFunction

            launch = _launcher(gpu, InterpretedFunction.run)
            stack.enter_context(mock.patch.object(InterpretedFunction, "run", launch))
        elif stand_ins:
            from triton.runtime.jit import JITFunction

            stack.enter_context(mock.patch.object(JITFunction, "run", _launcher(gpu, _stand_in)))
            sampler: Any = SamplerOf(gpu)
            real = sampling._operations
            chosen = lambda logits: sampler if isinstance(logits, GpuTensor) else real(logits)  # noqa: E731
            stack.enter_context(mock.patch("kernels.sampling._operations", chosen))
            others = {name: "it has no stand-in" for name in triton.NAMES if name not in GROUPS}
            stack.enter_context(mock.patch.dict("kernels.triton._disabled", others))
        else:
            refusal = ValueError("Triton compiles for no pretended GPU")
            stack.enter_context(mock.patch("kernels.attention.triton._kernels", side_effect=refusal))
            stack.enter_context(mock.patch("kernels.triton._installed", return_value=False))
        yield


def _stand_in(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    STAND_INS[kernel.__name__](**dict(zip(kernel.arg_names, args, strict=False)), **options)


def _launcher(gpu: Gpu, run: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        given = {**dict(zip(self.arg_names, args, strict=False)), **options}
        tensors = [(name, x) for name, x in given.items() if isinstance(x, Tensor)]
        if not any(isinstance(x, GpuTensor) for _, x in tensors):
            return run(self, *args, grid=grid, warmup=warmup, **options)
        for at, (name, x) in enumerate(tensors):
            if not isinstance(x, GpuTensor):
                raise ValueError(f"Pointer argument (at {at}: {name}) cannot be accessed from Triton (cpu tensor?)")
        there = [x for _, x in tensors if isinstance(x, GpuTensor)]
        _compile(gpu, self, given)
        raw = [x.raw if isinstance(x, GpuTensor) else x for x in args]
        named = {name: x.raw if isinstance(x, GpuTensor) else x for name, x in options.items()}
        if all(grid):  # Triton does not launch an empty grid
            gpu.launch(self.__name__, lambda: run(self, *raw, grid=grid, warmup=False, **named), [], there)
        return None

    return launch


def _compile(gpu: Gpu, kernel: Any, given: dict[str, Any]) -> None:
    """Note a specialisation of a kernel. A capture must not be the first to launch it: loading a module may wait."""
    kept = kernel.kwargs.get("do_not_specialize") if interprets() else kernel.do_not_specialize
    named = {kernel.arg_names[x] if isinstance(x, int) else x for x in kept or ()}
    key = (kernel.__module__ if hasattr(kernel, "__module__") else "", kernel.__name__, *(
        (name, _class(x, name not in named)) for name, x in sorted(given.items())
    ))  # fmt: skip
    if gpu.capturing is not None and key not in gpu.loaded:
        gpu.forbid_in_capture(f"the Triton kernel {kernel.__name__} is compiled, as it was not launched so before")
    gpu.loaded.add(key)


def _class(x: Any, specialized: bool) -> object:
    """Return what of an argument Triton compiles a kernel for."""
    if isinstance(x, GpuTensor):
        return x.dtype, x.raw.storage_offset() * x.element_size() % _ALIGNED == 0
    if isinstance(x, torch.dtype | str | bool | float | None):
        return type(x) if isinstance(x, float) else x
    if isinstance(x, int) and specialized:
        return "one" if x == 1 else x % _ALIGNED == 0
    return type(x)
