"""The shipped variants of the Triton kernels, one module for each module of `kernels.triton`, under the same name.

Each has `calls(capability)`, which lists a name and a call for each variant. The call runs the code that launches the
kernel on tensors of torch's device `meta`, which have shapes but no memory; `bench.triton_resources` records what is
launched. `capability` is that of the GPU, (9, 0) for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

Calls = Iterator[tuple[str, Callable[[], object]]]
"""Name of a variant, and a call that launches it."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
