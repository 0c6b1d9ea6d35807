"""The Triton kernels compiled ahead of time for GPUs, in processes of their own, and the table of what they take."""

from __future__ import annotations

import sys

import pytest

from bench import triton_resources as resources
from tests.support import output_of

TARGETS = tuple(resources.CAPABILITIES)


def compile_all(target: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "bench", "triton", "--target", target, *arguments]
    lines = output_of(command, timeout=900).splitlines()
    assert len(lines) > 20
    assert all(" 0 stack " in line for line in lines)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("part", "target"), [*enumerate(TARGETS)])
def test_the_table_is_of_these_kernels_and_a_third_of_them_compile_to_what_it_says(part: int, target: str) -> None:
    """Fingerprints are compared for all variants; each variant is compiled for one of the targets."""
    compile_all(target, "--part", str(part), "--parts", str(len(TARGETS)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_all_variants_compile_to_what_the_table_says(target: str) -> None:
    compile_all(target)


def test_no_entry_of_the_table_has_spilled_registers_or_too_much_shared_memory() -> None:
    table = resources.read()
    assert set(table) == set(TARGETS), "the table is of another version of Triton; run python -m bench triton --write"
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
