"""The one place that launches Triton kernels."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a kernel on the current stream, without waiting for it.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: number of programs along each of up to three axes.
        args: the kernel's positional arguments.
        options: its `constexpr` arguments, `num_warps`, `num_stages` and `enable_fp_fusion`.
    """
    kernel[grid](*args, **options)
