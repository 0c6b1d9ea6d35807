"""Races are found: `conftest.py` checks every launch of this folder's tests as these kernels are checked."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels.triton.races import Race, checked

FOUND = (Race, InterpreterError)


@triton.jit
def _sum_of_neighbours(x, out, WIDTH: tl.constexpr):
    """Correct where `x` and `out` do not overlap."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, tl.load(x + at) + tl.load(x + at + WIDTH))


@triton.jit
def _same_places(out, WIDTH: tl.constexpr):
    tl.store(out + tl.arange(0, WIDTH), tl.program_id(0))


@triton.jit
def _one_place(out, WIDTH: tl.constexpr):
    tl.store(out + tl.program_id(0) + 0 * tl.arange(0, WIDTH), tl.arange(0, WIDTH))


@triton.jit
def _reversed_twice(x, WIDTH: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(x + at, tl.load(x + at) + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + WIDTH + at, tl.load(x + WIDTH - 1 - at))


def test_programs_apart_pass_and_run_in_any_order() -> None:
    x, out = torch.arange(40), torch.zeros(32, dtype=torch.int64)
    _sum_of_neighbours[(4,)](x, out, WIDTH=8)
    assert torch.equal(out, x[:32] + x[8:])


def test_a_load_of_what_another_program_stores_is_found_in_any_order() -> None:
    for seed in (None, 1, 2, 3):
        x = torch.arange(40)
        with pytest.raises(FOUND, match="loads what another one stores"), checked(seed):
            _sum_of_neighbours[(4,)](x, x, WIDTH=8)


def test_two_programs_that_store_to_one_address_are_found() -> None:
    with pytest.raises(FOUND, match="two programs store"):
        _same_places[(2,)](torch.zeros(8, dtype=torch.int32), WIDTH=8)


def test_one_store_that_writes_twice_to_an_address_is_found() -> None:
    with pytest.raises(FOUND, match="one store writes twice"):
        _one_place[(2,)](torch.zeros(8, dtype=torch.int32), WIDTH=8)


def test_threads_see_stores_of_their_program_only_behind_a_barrier() -> None:
    with pytest.raises(FOUND, match="without a barrier"):
        _reversed_twice[(1,)](torch.arange(16), WIDTH=8, BARRIER=False)
    x = torch.arange(16)
    _reversed_twice[(1,)](x, WIDTH=8, BARRIER=True)
    assert x[8:].tolist() == list(range(8, 0, -1))
