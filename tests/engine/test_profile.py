"""The steps without requests that warm a GPU up."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.sampling.row import Computed, Sampled
from engine.scheduling.plan import Plan
from engine.sequence import Sequence
from engine.start.profile import warm_up

moe = pytest.importorskip("kernels.triton.moe")


class Counting:
    """A runner that only notes how many rows each step has."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def move(self, plan: Plan) -> None: ...

    def launch(self, plan: Plan) -> Computed:
        self.rows.append(plan.num_tokens)
        return Computed(Sampled((), ()))

    def forget(self, seq: Sequence) -> None: ...


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("experts", "per_row"), [(8, 2), (64, 6), (128, 8), (512, 10)])
def test_every_tile_of_a_mixture_of_experts_is_compiled_while_the_engine_warms_up(
    dtype: torch.dtype, experts: int, per_row: int
) -> None:
    def tile(rows: int) -> object:
        return moe.tile_of(dtype, rows * per_row, experts, 2048, torch.device("cpu"), invariant=False)

    runner = Counting()
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=3000, num_blocks=500)
    warm_up(runner, config, 8000, lambda token: b"a", True)
    assert {tile(rows) for rows in range(1, 3001)} == {tile(rows) for rows in runner.rows}
