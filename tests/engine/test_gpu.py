"""The whole engine on a pretended GPU: nothing mixes host and device, and the ids are those of the CPU."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

import engine.build
from engine.build import CacheOptions, build_engine
from engine.config import EngineConfig, ModelOptions
from engine.device.graphs import Graph
from engine.device.runner import DeviceRunner
from engine.engine import Engine
from engine.models.loading import LoadedModel
from engine.request import Request
from engine.scheduling import policy
from engine.start.device_memory import DoesNotFit
from kernels import ops
from tests.engine.stub import expect_short_outputs
from tests.engine.test_model import ask, finish, prompts
from tests.kernels.flash_stand_in import FlashStandIn
from tests.models.tiny import FUSED, STOCK, Case, build_case
from tests.pretend_gpu import Gpu, GpuTensor, pretend_gpu

NAMES = ("llama", "qwen3-windows", "gemma2", "llama-biases-forced")
PLAYED = ("qwen3-windows", "gemma2")
"""Run with Triton's kernels, which stand-ins play."""
CASES = {case.name: case for case in FUSED + STOCK if case.name in NAMES}


class Late(FlashStandIn):
    """The stand-in as kernels of the device: it computes when the queue gets to it."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._launch(super().flash_attn_varlen_func, args, kwargs)

    def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._launch(super().flash_attn_with_kvcache, args, kwargs)

    def _launch(self, compute: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        assert all(isinstance(x, GpuTensor) for x in tensors)
        raw = [x.raw if isinstance(x, GpuTensor) else x for x in args]
        named = {name: x.raw if isinstance(x, GpuTensor) else x for name, x in kwargs.items()}
        out: Any = torch.empty_like(args[0])
        self.gpu.launch("flash", lambda: out.raw.copy_(compute(*raw, **named)), tensors, [out], fills=True)  # type: ignore[arg-type]
        return out  # type: ignore[no-any-return]


@pytest.fixture
def paths(tmp_path: Path) -> Any:
    return lambda case: str(build_case(tmp_path / case.name, case))


def build(
    path: str,
    device: str,
    dtype: str = "float32",
    blocks: int | None = 64,
    swap: int = 0,
    graphs: bool = True,
    **config: Any,
) -> tuple[Engine, LoadedModel]:
    return build_engine(
        ModelOptions(
            path,
            device=device,
            dtype=dtype,
            backend=config.pop("backend", "auto"),
            quantize=config.pop("quantize", "none"),
        ),
        EngineConfig(**{"block_size": 0, "max_num_batched_tokens": 64, **config}),
        CacheOptions(num_blocks=blocks, swap_bytes=swap, cuda_graphs=graphs),
    )


def crowd() -> list[Request]:
    """Everything that the sampler does, and something of each path."""
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.9, "seed": 9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
        {"logit_bias": ((11, 4.0), (12, -3.0)), "min_tokens": 4},
        {"temperature": 0.7, "seed": 10, "n": 3},
        {"logprobs": 3, "prompt_logprobs": 2},
    ]
    return [ask(f"r{i}", p, **params[i]) for i, p in enumerate(prompts(300, [70, 5, 33, 12, 40, 21, 9], seed=2))]


def results(engine: Engine, requests: list[Request]) -> dict[str, list[tuple[int, ...]]]:
    return {name: [choice.token_ids for choice in done.choices] for name, done in finish(engine, *requests).items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_sampling_gives_the_ids_of_the_cpu(paths: Any, name: str) -> None:
    path, backend = paths(CASES[name]), CASES[name].backend if name.endswith("forced") else "auto"
    want = results(build(path, "cpu", backend=backend)[0], crowd())
    with pretend_gpu(stand_ins=name in PLAYED):  # the others run without Triton
        engine, loaded = build(path, "cuda", backend=backend)
        assert isinstance(engine.runner.pool, GpuTensor)  # type: ignore[attr-defined]
        assert not loaded.batch_invariant
        assert results(engine, crowd()) == want
    assert all(len(ids) == 8 for choices in want.values() for ids in choices)


@pytest.mark.parametrize("swap", [0, 1 << 22])
def test_preempted_requests_give_the_ids_of_the_cpu(paths: Any, swap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policy._RATES, "cuda", (1e12, 1e9))  # so that swapping pays for a model as small as this
    path = paths(CASES["llama"])
    asked = [ask(f"r{i}", p, 30) for i, p in enumerate(prompts(300, [9, 14, 6, 11], seed=5))]
    want = results(build(path, "cpu")[0], asked)
    with pretend_gpu():
        engine, _ = build(path, "cuda", blocks=6, swap=swap)
        expect_short_outputs(engine)
        assert results(engine, asked) == want
        stats = engine.stats()
    assert (stats.preemptions_swap if swap else stats.preemptions_recompute) > 0


def test_flash_is_preferred_and_a_greedy_step_waits_for_its_ids_alone(
    paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = paths(Case("long", "llama", {"max_position_embeddings": 1024}))
    with pretend_gpu() as gpu:
        monkeypatch.setitem(sys.modules, "flash_attn", library := Late(gpu))
        engine, _ = build(path, "cuda", "auto", blocks=None, max_num_batched_tokens=512)
        assert (engine.runner.model.backend.name, engine.config.block_size) == ("flash", 256)  # type: ignore[attr-defined]
        assert engine.runner.pool.dtype == torch.uint8  # type: ignore[attr-defined]
        for i, prompt in enumerate(prompts(300, [300, 20, 260], seed=1)):
            engine.add(ask(f"r{i}", prompt, 6))
        waits = []
        while engine.has_work:
            with gpu.watch() as waited:
                engine.step()
            waits.append(len(waited))
    assert {"varlen", "kvcache"} == set(library.calls)
    assert max(waits) <= 2  # the ids, and whether their logits were finite


def test_the_pool_takes_what_weights_and_the_largest_step_leave_of_the_share(paths: Any) -> None:
    with pretend_gpu() as gpu, structlog.testing.capture_logs() as logs:
        engine, _ = build(paths(CASES["llama"]), "cuda", blocks=None)
        pool = engine.runner.pool  # type: ignore[attr-defined]
        for request in crowd():
            engine.add(request)
        torch.cuda.reset_peak_memory_stats()
        while engine.has_work:
            engine.step()
        peak = torch.cuda.max_memory_allocated()
        total = gpu.memory.total
    (measured,) = (entry for entry in logs if entry["event"] == "memory_measured")
    assert measured["step_mib"] > 0
    assert pool.numel() > 0.5 * total, "the pool takes what is left"
    assert peak <= 0.9 * total, "and steps fit beside it"


@pytest.mark.parametrize(
    ("total", "sizes", "message"),
    [
        (1 << 20, {}, r"no room for the check of the kernels in .* --dtype bfloat16"),
        (1 << 25, {"num_blocks": 1 << 20}, r"no room for 1048576 KV blocks .* a lower --num-kv-blocks or none"),
        (1 << 25, {"memory_bytes": 1 << 26}, r"no room for .* KV blocks .* a lower --kv-cache-memory or none"),
        (1 << 25, {"utilization": 0.01}, r"MiB are missing\. What would help: --gpu-memory-utilization 0\.0"),
    ],
    ids=["checks", "blocks", "bytes", "share"],
)
def test_memory_that_does_not_suffice_is_told_in_one_line(
    paths: Any, total: int, sizes: dict[str, Any], message: str
) -> None:
    model = ModelOptions(paths(CASES["llama"]), device="cuda", dtype="float32")
    config = EngineConfig(block_size=0, max_num_batched_tokens=64, max_num_seqs=8)
    with pretend_gpu(total=total, stand_ins=True):
        with pytest.raises(DoesNotFit, match=message) as refused:
            build_engine(model, config, CacheOptions(**sizes))
        assert "\n" not in str(refused.value)
        share = re.search(r"--gpu-memory-utilization ([0-9.]+) or higher", str(refused.value))
        if share:
            build_engine(model, config, CacheOptions(utilization=float(share[1])))


def test_the_checks_at_the_start_take_no_more_memory_than_the_largest_step(paths: Any) -> None:
    model = ModelOptions(paths(CASES["llama"]), device="cuda", dtype="float32")
    config = EngineConfig(block_size=0, max_num_batched_tokens=64, max_num_seqs=8)
    with pretend_gpu(total=3 << 20, stand_ins=True):
        _, loaded = build_engine(model, config, CacheOptions())
    assert loaded.serving.graphs


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_graphs_are_checked_in_the_smallest_pool(paths: Any, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Graph.replay
    with pretend_gpu(stand_ins=True):
        assert build(paths(CASES["llama"]), "cuda", blocks=blocks, max_num_seqs=4)[1].serving.graphs
        monkeypatch.setattr(Graph, "replay", lambda self: replay(self) + 1)
        serving = build(paths(CASES["llama"]), "cuda", blocks=blocks, max_num_seqs=4)[1].serving
    assert "graphs" in serving.fallbacks


def test_the_runner_that_was_measured_is_freed_before_the_pool_is_allocated(
    paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = []
    init, allocate = DeviceRunner.__init__, engine.build.host_pieces

    def noted(self: DeviceRunner, *args: Any, **options: Any) -> None:
        runners.append(weakref.ref(self))
        init(self, *args, **options)

    def checked(*args: Any) -> Any:
        assert [runner() for runner in runners] == [None]
        return allocate(*args)

    monkeypatch.setattr(DeviceRunner, "__init__", noted)
    monkeypatch.setattr("engine.build.host_pieces", checked)
    gc.disable()  # as a worker does while it loads
    try:
        with pretend_gpu():
            build(paths(CASES["llama"]), "cuda", blocks=None)
    finally:
        gc.enable()
    assert len(runners) == 2


def test_compiled_kernels_keep_their_hands_off_the_device() -> None:
    x, weight = torch.randn(4, 32), torch.rand(32)
    with pretend_gpu():
        there = x.to("cuda"), weight.to("cuda")
        got = ops.rms_norm(*there, 1e-6), ops.silu_mul(there[0]), *ops.argmax(there[0])
        assert all(isinstance(y, GpuTensor) for y in got)
        assert torch.allclose(got[0].held, ops.rms_norm(x, weight, 1e-6))  # type: ignore[attr-defined]
