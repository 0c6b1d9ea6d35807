"""Compile every shipped variant of the Triton kernels ahead of time, and print what each takes of a GPU.

    python -m bench triton            # compare with kernels/triton/resources.json
    python -m bench triton --write    # write the table anew

Needs no GPU: Triton brings its compiler. A variant must use no stack (spilled registers), and at most 99 KiB of shared
memory, which every card from compute capability 8.6 on has.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton import attention, ops, write

TABLE = Path(attention.__file__).with_name("resources.json")
CAPABILITIES = (80, 90, 100)
MAX_SHARED = 99 * 1024
MAX_GROWTH = 1.1
"""By how much registers or shared memory may exceed the table before a test fails."""
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Variant:
    """One kernel with the constants of one shipped use."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Argument → Triton's type of it."""
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What a program of a compiled kernel takes."""

    registers: int
    """Registers of a thread."""
    stack: int
    """Bytes of spilled registers of a thread."""
    shared: int
    """Bytes of shared memory."""


def variants() -> Iterator[Variant]:
    """List the variants: each dtype, head size and tile, with all options of attention on, which take the most."""
    for dtype, short in _TYPES.items():
        for dim, group in ((64, 3), (128, 4), (256, 2)):
            small, large = attention.tiles(dtype, dim, group)
            for tile, split, kind in ((small, True, "split"), (small, False, "whole"), (large, False, "long")):
                yield _attend(f"attend {short} {dim} {kind}", short, dim, group, tile, split)
            yield _combine(f"combine {short} {dim}", short, dim, group, small)
            yield _write(f"write {short} {dim}", short, dim)
        for cols in (576, 4096, 8192):
            yield _norm(f"norm {short} {cols}", short, cols)
        yield _gated(f"gated {short}", short)


def compiled(variant: Variant, capability: int) -> Resources:
    """Compile a variant for a compute capability, given as 80 for 8.0."""
    names = list(variant.kernel.arg_names)
    source = ASTSource(
        variant.kernel,
        {name: variant.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in variant.types.items()
            if kind.startswith("*") or name.endswith("stride")
        },
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)
    registers, stack = _usage(kernel.asm["cubin"])
    return Resources(registers, stack, kernel.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes of a thread, as `cuobjdump` of Triton's package reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
