"""The whole engine on the pretended GPU with Triton kernels, graphs and a step in flight: ids are the CPU's, and the
host waits for one event a step. The model has one layer and prompts are short, as the interpreter is slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import triton
from kernels.attention.triton import TritonBackend
from tests.engine.gpus import engine_on_gpu, expect_one_event_a_step, play, runner_of
from tests.engine.kinds import requests
from tests.engine.test_gpu import build
from tests.models.tiny import Case, build_case
from tests.pretend_gpu import pretend_gpu

DENSE = Case("dense", "qwen3", {"num_hidden_layers": 1, "head_dim": 16})
MOE = Case(
    "moe",
    "qwen3_moe",
    {"num_hidden_layers": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
)
KINDS = ("penalties", "top-k, top-p and min-p", "grammar", "logprobs", "greedy")


@pytest.mark.parametrize("case", [DENSE, MOE], ids=lambda case: case.name)
def test_ids_are_those_of_the_cpu_and_each_step_waits_for_one_event(
    tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The checks at the start run each kernel on input of a real size, which takes minutes here.
    for check in ("check_overlap", "check_graphs"):
        monkeypatch.setattr(f"engine.start.prepare.{check}", lambda *_: None)
    monkeypatch.setattr("engine.checks.selfcheck.attempt", lambda *_: None)
    path = str(build_case(tmp_path, case))

    def asked(loaded: Any) -> list[Any]:
        return [one for kind in KINDS for one in requests(kind, loaded, (5,), 4)]

    engine, loaded = build(path, "cpu")
    want = play(engine, asked(loaded))
    with pretend_gpu() as gpu:
        engine, loaded = engine_on_gpu(path, overlap=True, graphs=True, max_num_seqs=5, max_num_batched_tokens=16)
        model: Any = runner_of(engine).model
        assert isinstance(model.backend, TritonBackend)
        model.parameters.embedding[0] = torch.nan  # what rows of padding hold in a graph
        got = play(engine, asked(loaded), gpu)
    assert not triton.disabled()
    expect_one_event_a_step(got)
    assert got.replays
    assert got.ids == want.ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
