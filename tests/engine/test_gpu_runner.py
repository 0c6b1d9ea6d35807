"""The runner of a GPU with Triton and CUDA graphs, on the pretended GPU: its ids are those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.device.graphs import NOT_CAPTURED
from engine.device.runner import DeviceRunner
from engine.engine import Engine
from engine.scheduling.plan import Plan, Slice
from tests.engine.devices import device_engine
from tests.engine.test_gpu import CASES, build, results
from tests.engine.test_model import ask, prompts
from tests.models.tiny import build_case
from tests.pretend_gpu import Gpu, pretend_gpu

NAMES = ("llama", "qwen3-windows", "llama-biases-forced")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(build_case(tmp_path_factory.mktemp(name), CASES[name])) for name in NAMES}


def on_gpu(path: str, graphs: bool, **options: Any) -> tuple[Engine, DeviceRunner]:
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 32, **options}
    engine, runner = device_engine(path, "cuda", attention="triton", **limits)
    if graphs:
        runner.capture()
        assert (runner.graphs.reason, runner.graphs.count) == (None, len(runner.graphs.sizes))
    return engine, runner


@pytest.mark.parametrize(
    ("name", "graphs"), [("llama", False), *((name, True) for name in NAMES)], ids=lambda x: str(x).lower()
)
def test_prefill_decodes_and_forks_give_the_ids_of_the_cpu(paths: dict[str, str], name: str, graphs: bool) -> None:
    asked = [ask(f"r{i}", p, 4, n=1 + i % 2) for i, p in enumerate(prompts(300, [34, 5], seed=3))]
    backend = "transformers" if name.endswith("forced") else "auto"
    want = results(build(paths[name], "cpu", backend=backend)[0], asked)
    with pretend_gpu(total=1 << 30, stand_ins=True):
        engine, _ = on_gpu(paths[name], graphs, backend=backend, overlap=graphs)
        assert results(engine, asked) == want


def decodes(engine: Engine, count: int) -> Plan:
    """A step of decodes of the first running sequences."""
    seqs = engine.scheduler.running[:count]
    assert len(seqs) == count
    assert all(engine.scheduler.blocks.allocate(seq, seq.num_tokens) for seq in seqs)
    return Plan(tuple(Slice(seq, seq.num_tokens - 1, 1, True) for seq in seqs))


@torch.inference_mode()
def logits_of(runner: DeviceRunner, plan: Plan, active: bool) -> torch.Tensor:
    runner.graphs.active = active
    logits, _ = runner._forward(runner._read(plan))
    return logits.clone().cpu().view(torch.int32)


def test_a_graph_gives_the_bits_of_an_eager_step_whatever_its_padding_holds(paths: dict[str, str]) -> None:
    """Rows of padding are NaN from the embedding on."""
    with pretend_gpu(total=1 << 30, stand_ins=True):
        engine, runner = on_gpu(paths["qwen3-windows"], True, max_num_seqs=12, max_num_batched_tokens=64)
        runner.model.parameters.embedding[0] = torch.nan  # type: ignore[attr-defined]
        for i, prompt in enumerate(prompts(300, [3 + i % 5 for i in range(9)], seed=4)):
            engine.add(ask(f"r{i}", prompt, 30))
        while len(engine.scheduler.running) < 9 or any(
            seq.num_uncomputed_tokens > 1 for seq in engine.scheduler.running
        ):
            engine.step()
        for count in (9, 1, 3):
            plan = decodes(engine, count)
            eager = logits_of(runner, plan, False)
            written = runner.pool.clone().cpu()
            assert torch.equal(logits_of(runner, plan, True), eager)
            assert torch.equal(runner.pool.cpu(), written)


def test_steps_with_a_prefill_or_prompt_logprobs_run_without_a_graph(paths: dict[str, str]) -> None:
    with pretend_gpu(total=1 << 30, stand_ins=True):
        engine, runner = on_gpu(paths["llama"], True)
        found: list[bool] = []
        find = runner.graphs.find
        runner.graphs.find = lambda *args: found.append(True) or find(*args)  # type: ignore[method-assign,func-returns-value]
        engine.add(ask("long", prompts(300, [40])[0], 3))
        engine.step()
        engine.step()
        assert not found  # two chunks
        engine.step()
        assert found == [True]
        engine.add(ask("two", prompts(300, [4])[0], 3))
        engine.step()
        assert found == [True]


def test_a_capture_that_fails_leaves_all_steps_without_graphs_and_says_why(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [ask("a", prompts(300, [9])[0], 4)]
    want = results(build(paths["llama"], "cpu")[0], asked)
    with pretend_gpu(total=1 << 30, stand_ins=True) as gpu:
        engine, runner = on_gpu(paths["llama"], False)
        assert runner.graphs.reason == NOT_CAPTURED
        stream, forward = torch.cuda.current_stream(), runner.model.forward
        monkeypatch.setattr(runner.model, "forward", lambda batch: _waits_in_a_capture(gpu, forward(batch)))
        runner.capture()
        assert runner.graphs.count == 0
        assert "not permitted when stream is capturing" in (runner.graphs.reason or "")
        assert torch.cuda.current_stream() is stream
        assert results(engine, asked) == want


def _waits_in_a_capture(gpu: Gpu, logits: torch.Tensor) -> torch.Tensor:
    if gpu.capturing is not None and logits.shape[0] == 2:
        logits.amax().item()
    return logits


def test_a_step_in_flight_waits_for_nothing_and_its_result_for_one_event(paths: dict[str, str]) -> None:
    with pretend_gpu(total=1 << 30, stand_ins=True) as gpu:
        engine, runner = on_gpu(paths["llama"], True)
        for i, prompt in enumerate(prompts(300, [40, 5, 17], seed=3)):
            engine.add(ask(f"r{i}", prompt, 6, temperature=0.7, seed=i, logprobs=2, prompt_logprobs=1))
        launch = runner.launch

        def watched(plan: Plan) -> object:
            with gpu.watch() as waits:
                flight = launch(plan)
            assert waits == []
            return flight

        runner.launch = watched  # type: ignore[assignment,method-assign]
        while engine.has_work:
            with gpu.watch() as waits:
                engine.step()
            assert [wait.what for wait in waits] == ["event"]


def test_a_lost_device_is_no_fault_of_the_requests_although_triton_reports_it_as_a_runtime_error(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_gpu(total=1 << 30, stand_ins=True) as gpu:
        engine, runner = on_gpu(paths["llama"], False)
        for i, prompt in enumerate(prompts(300, [5, 6], seed=4)):
            engine.add(ask(f"r{i}", prompt, 4))

        def wrong(batch: object) -> torch.Tensor:
            gpu.queue.add("kernel", lambda: 1 / 0)
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

        monkeypatch.setattr(runner.model, "forward", wrong)
        with pytest.raises(torch.AcceleratorError):
            engine.step()
