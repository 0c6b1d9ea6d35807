"""Loads the compiled kernels (`csrc/`) through ctypes: a plain shared library, which builds without the headers of
torch and works with any version of torch.

It links no OpenMP runtime, but starts its threads with the `GOMP_parallel` of the runtime that torch has loaded, so it
shares the threads of torch and `torch.set_num_threads`.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

INSTRUCTION_SETS = ("none", "avx2", "avx512", "avx512_bf16")
DTYPES = (torch.float32, torch.bfloat16)


class Cache(Structure):
    """The struct `Cache` of csrc/native.h."""

    _fields_ = (
        ("pool", c_void_p),
        ("block_bytes", c_int64),
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("block_size", c_int32),
        ("is_bf16", c_int32),
    )


class Batch(Structure):
    """The struct `Batch` of csrc/native.h."""

    _fields_ = (
        ("id", c_int64),
        ("sequences", c_int32),
        ("rows", c_int32),
        ("padded_rows", c_int32),
        ("cu", c_void_p),
        ("contexts", c_void_p),
        ("tables", c_void_p),
        ("table_at", c_void_p),
        ("slots", c_void_p),
    )


class Attend(Structure):
    """The struct `Attend` of csrc/native.h."""

    _fields_ = (
        ("layer", c_int32),
        ("heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
    )


class Write(Structure):
    """The struct `Write` of csrc/native.h."""

    _fields_ = (
        ("layer", c_int32),
        ("heads", c_int32),
        ("qkv", c_void_p),
        ("stride", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("wide_norms", c_int32),
    )


class Product(Structure):
    """The struct `Product` of csrc/native.h."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int32),
        ("cols", c_int32),
        ("steps", c_int32),
        ("gated", c_int32),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("x_scales", c_void_p),
    )


_VERSION = 4
"""Version of functions and structures; the same number as in csrc/native.cpp."""
_RETURN_INT = ("tm_version", "tm_choose", "tm_huge_pages", "tm_has_matmul")
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "tm_version": (),
    "tm_choose": (c_int,),
    "tm_set_parallel": (c_void_p,),
    "tm_huge_pages": (c_void_p, c_int64),
    "tm_attend": (POINTER(Cache), POINTER(Batch), POINTER(Attend), c_int),
    "tm_store": (POINTER(Cache), POINTER(Batch), c_int, c_void_p, c_int64, c_void_p, c_int64, c_int),
    "tm_write": (POINTER(Cache), POINTER(Batch), POINTER(Write), c_int),
    "tm_add_rms_norm": (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float, c_int, c_int, c_int),
    "tm_argmax": (c_void_p, c_int64, c_int, c_int, c_int, c_void_p, c_void_p, c_int),
    "tm_has_matmul": (),
    "tm_matmul": (POINTER(Product), c_int),
    "tm_quantize": (c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int),
    "tm_silu_mul": (c_void_p, c_void_p, c_int, c_int, c_int, c_int),
    "tm_gelu_mul": (c_void_p, c_void_p, c_int, c_int, c_int, c_int),
    "tm_softcap": (c_void_p, c_int, c_int, c_float, c_int, c_int),
}


@cache
def _load() -> tuple[Any | None, str]:
    """Load the library; return it, or None and the reason."""
    path = _path()
    if path is None:
        return None, "the compiled kernels are not installed"
    found = ctypes.CDLL(str(path))
    if found.tm_version() != _VERSION:  # before all other functions, which another version may not have
        return None, "the compiled kernels are of another version: reinstall the package"
    for name, arguments in _SIGNATURES.items():
        getattr(found, name).argtypes = arguments
        getattr(found, name).restype = c_int if name in _RETURN_INT else None
    if not found.tm_choose(len(INSTRUCTION_SETS)):
        return None, "the compiled kernels need a CPU with AVX2"
    parallel = _gomp_parallel()
    if parallel is None:
        log.warning("torch's OpenMP runtime was not found: the compiled kernels run on one thread")
    found.tm_set_parallel(parallel)
    return found, ""


def library() -> Any | None:
    """Return the library; None if it was not built or the CPU has no AVX2."""
    return _load()[0]


def huge_pages(memory: torch.Tensor) -> None:
    """Ask the kernel for huge pages for the memory of a contiguous tensor; call it before the first write."""
    if (found := library()) is not None:
        found.tm_huge_pages(memory.data_ptr(), memory.nbytes)


def missing() -> str:
    """Return why `library` returns None; empty if it returns a library."""
    return _load()[1]


def _path() -> Path | None:
    folder = Path(__file__).parent
    return next((p for suffix in EXTENSION_SUFFIXES if (p := folder / f"_native{suffix}").is_file()), None)


def _gomp_parallel() -> int | None:
    """Return the address of torch's `GOMP_parallel`, from libtorch_cpu and its dependencies; None: not found."""
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(torch_cpu)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, c_void_p).value
