"""The Triton kernels compiled ahead of time for GPUs, in processes of their own, and the table of what they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

from bench import triton_resources as resources
from kernels.triton import ops
from kernels.triton.attention import Lengths, attend, tiles
from kernels.triton.write import write_rotated
from tests.support import output_of

TARGETS = tuple(resources.CAPABILITIES)
same_triton = pytest.mark.skipif(
    not resources.read(), reason="kernels/triton/resources.json is of another version of Triton than is installed"
)


def compile_all(target: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "bench", "triton", "--target", target, *arguments]
    lines = output_of(command, timeout=900).splitlines()
    assert len(lines) > 20
    assert all(" 0 stack " in line for line in lines)


@same_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("part", "target"), [*enumerate(TARGETS)])
def test_the_table_is_of_these_kernels_and_a_sixth_of_them_compile_to_what_it_says(part: int, target: str) -> None:
    """Fingerprints are compared for all variants, other variants are compiled for each target: a minute in all."""
    compile_all(target, "--part", str(2 * part), "--parts", str(2 * len(TARGETS)))


@same_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_all_variants_compile_to_what_the_table_says(target: str) -> None:
    compile_all(target)


@same_triton
def test_no_entry_of_the_table_has_spilled_registers_or_too_much_shared_memory() -> None:
    table = resources.read()
    assert set(table) == set(TARGETS)
    for target, entries in table.items():
        for name, entry in entries.items():
            assert list(resources.faults(target, name, entry, entry)) == []


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ([100, 0, 50000, ""], None),
        ([110, 0, 55000, ""], None),
        ([50, 8, 50000, ""], "8 bytes of spilled registers"),
        ([111, 0, 50000, ""], "registers grew from 100 to 111"),
        ([100, 0, 55001, ""], "shared memory grew from 50000 to 55001 bytes"),
    ],
)
def test_a_variant_that_takes_more_than_the_table_says_is_a_fault(entry: list[object], fault: str | None) -> None:
    found = list(resources.faults("sm_90", "x", entry, [100, 0, 50000, ""]))
    assert found == ([] if fault is None else [f"sm_90 x: {fault}"])


def test_more_shared_memory_than_each_gpu_has_is_a_fault() -> None:
    assert list(resources.faults("sm_80", "x", [64, 0, 101376, ""], None)) == []
    (fault,) = resources.faults("sm_80", "x", [64, 0, 101377, ""], None)
    assert fault == "sm_80 x: 101377 bytes of shared memory, more than 101376"


def test_a_change_of_a_kernel_changes_its_fingerprint_and_no_other() -> None:
    code = """
from bench import triton_resources as r
from kernels.triton import attention
before = {s.name: s.fingerprint() for s in r.sources("sm_90")}
attention._merge._unsafe_update_src(attention._merge.src + "    # changed\\n")
after = {s.name: s.fingerprint() for s in r.sources("sm_90")}
print(*sorted({name.split()[0] for name in before if before[name] != after[name]}))
"""
    assert output_of([sys.executable, "-c", code]).split() == ["attention.attend", "attention.combine"]


def fingerprints(module: str, call: Callable[[], object]) -> list[str]:
    return [source.fingerprint() for source in resources._launched(module, "", call)]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_attention_is_compiled_once_for_all_numbers_of_rows_sequences_items_splits_and_table_widths() -> None:
    pool = meta(9, 2, 2, 16, 8, 128)
    tile, _ = tiles(torch.bfloat16, 128, 4)

    def launched(rows: int, sequences: int, items: int, blocks: int, splits: int) -> list[str]:
        q = meta(rows, 32, 128)
        sizes = ((sequences, blocks), (sequences,), (sequences,), (sequences + 1,), (items, 2))
        *lengths, work = (meta(*size, dtype=torch.int32) for size in sizes)
        k, v = pool[:, 1, 0], pool[:, 1, 1]
        call = partial(attend, q, k, v, q, Lengths(*lengths), work, tile, scale=0.1, splits=splits)
        return fingerprints("attention", call)

    split = {tuple(launched(*shape, splits)) for shape in SHAPES for splits in (2, 3, 16, 64)}
    whole = {tuple(launched(*shape, 1)) for shape in SHAPES}
    assert [len(x) for x in split] == [2]
    assert [len(x) for x in whole] == [1]


SHAPES = [(1, 1, 1, 1), (2, 2, 2, 7), (16, 16, 16, 16), (17, 3, 5, 48), (64, 16, 32, 33)]
"""Rows, sequences, items, blocks of a table."""


def test_small_operations_and_the_store_are_compiled_once_for_all_numbers_of_rows() -> None:
    pool, weight = meta(9, 2, 2, 16, 8, 128), meta(4096)
    store, norm, gate, cap = (set[str]() for _ in range(4))
    for rows in (1, 2, 16, 17, 160):
        qkv, slots, angles = meta(rows, 48, 128), meta(rows, dtype=torch.int64), meta(rows, 64, dtype=torch.float32)
        call = partial(write_rotated, qkv, pool[:, 0, 0], pool[:, 0, 1], slots, rotation=(angles, angles))
        store.update(fingerprints("write", call))
        norm.update(fingerprints("ops", partial(ops.add_rms_norm, *(meta(rows, 4096),) * 2, weight, 1e-6)))
        gate.update(fingerprints("ops", partial(ops.silu_mul, meta(rows, 2 * 14336))))
        cap.update(fingerprints("ops", partial(ops.softcap, meta(rows, 49153), 30.0)))
    assert [len(x) for x in (store, norm, gate, cap)] == [1, 1, 1, 1]
