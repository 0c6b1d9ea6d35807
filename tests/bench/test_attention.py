"""The attention benchmark counts what it should, and runs."""

from __future__ import annotations

import pytest
import torch

from bench.attention import HEADER, Case, line, measure


def test_work_is_counted_per_unmasked_pair_and_per_key_once() -> None:
    case = Case("two", (5, 3), 2, heads=4, kv_heads=2, head_dim=64)
    assert case.flop() == 4 * 64 * 4 * ((4 + 5) + (2 + 3))
    assert case.kv_bytes(torch.bfloat16) == 8 * 2 * 2 * 64 * 2


@pytest.mark.parametrize("queries", [1, 20])
def test_a_case_runs_and_is_printed(queries: int) -> None:
    case = Case("tiny", (40, 20), queries, heads=2, kv_heads=1, head_dim=64)
    found = measure(case, torch.float32, ("reference",), 1)
    assert found.seconds["reference"] > 0
    text = line(found, torch.float32, "reference")
    assert text.startswith("tiny")
    assert len(HEADER) < len(text)
