"""The checks at the start on a GPU, with Triton kernels and CUDA graphs: what is wrong is caught and replaced."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
import torch

from engine.build import CacheOptions, build_engine
from engine.checks import attention, operations, steps
from engine.config import EngineConfig, ModelOptions
from engine.device.graphs import Graph
from engine.device.runner import DeviceRunner
from engine.models.loading import LoadError
from engine.start import prepare
from engine.start.device_memory import DeviceMemory
from engine.start.serving import Serving
from kernels import triton
from tests.engine.test_selfcheck import fallbacks
from tests.models.tiny import Case, build_case
from tests.pretend_gpu import pretend_gpu

ONE_LAYER = Case("one-layer", "llama", {"num_hidden_layers": 1})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_case(tmp_path_factory.mktemp("llama"), ONE_LAYER))


@pytest.fixture(autouse=True)
def _all_kernels() -> Iterator[None]:
    triton.enable_all()
    yield
    triton.enable_all()


@pytest.fixture(autouse=True)
def _little_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a millisecond for what a GPU computes in one cycle."""
    monkeypatch.setattr(attention, "_PIECES", ((1, 1), (270, 1), (9, 5), (40, 20)))
    monkeypatch.setattr(operations, "_ROWS", 3)
    monkeypatch.setattr(steps, "_LONGEST", (40,))


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the steps without requests."""
    monkeypatch.setattr(prepare, "warm_up", lambda *_: None)
    monkeypatch.setattr(prepare, "check_overlap", lambda *_: None)


def start(path: str, blocks: int | None = 48, graphs: bool = True, **options: Any) -> tuple[Serving, list[Any]]:
    config = EngineConfig(block_size=0, max_num_seqs=3, max_num_batched_tokens=24)
    with pretend_gpu(total=1 << 29), structlog.testing.capture_logs() as logs:
        _, loaded = build_engine(
            ModelOptions(path, device="cuda", dtype="float32", **options),
            config,
            CacheOptions(num_blocks=blocks, cuda_graphs=graphs),
        )
    return loaded.serving, list(logs)


@pytest.mark.timeout(600)
def test_right_kernels_graphs_and_overlap_are_used_without_a_warning(path: str) -> None:
    serving, logs = start(path)
    assert not fallbacks(logs)
    facts = serving.facts()
    assert (facts["attention"], facts["overlap"], "fallbacks" in facts) == ("triton", "on", False)
    assert serving.graphs > 0
    assert not serving.graphs_reason
    assert not triton.disabled()


@pytest.mark.usefixtures("kernels_alone")
def test_the_share_of_a_gpu_holds_weights_step_graphs_and_pool(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts, measure = [], DeviceMemory.measure_graphs

    def noted(self: DeviceMemory, capture: Callable[[], tuple[int, int]]) -> None:
        accounts.append(self)
        measure(self, capture)

    monkeypatch.setattr(DeviceMemory, "measure_graphs", noted)
    monkeypatch.setattr(prepare, "check_graphs", lambda *_: None)
    _, logs = start(path, blocks=None)
    (memory,) = accounts
    assert min(memory.weights, memory.step, memory.graphs) > 0
    (ready,) = (entry for entry in logs if entry["event"] == "engine_ready")
    assert ready["pool_mib"] == memory.room >> 20
    assert not [entry for entry in logs if entry["event"] == "gpu_share_exceeded"]


def slightly_wrong(function: Callable[..., Any], **factors: float) -> Callable[..., Any]:
    """Return `function` with these of its arguments, or its result, multiplied by a factor."""

    def changed(*args: Any, **options: Any) -> Any:
        for name, factor in factors.items():
            if name in options:
                options[name] = options[name] * factor
        out = function(*args, **options)
        return out * factors["result"] if "result" in factors else out

    return changed


@pytest.mark.parametrize(
    ("part", "module", "function", "factors", "instead"),
    [
        ("attention", "attention", "attend", {"scale": 1.05}, "reference"),
        ("write", "write", "write_rotated", {"result": 1.02}, "torch"),
        ("norm", "ops", "rms_norm", {"result": 1.02}, "torch"),
        ("gate", "ops", "silu_mul", {"result": 1.02}, "torch"),
    ],
)
@pytest.mark.usefixtures("kernels_alone")
def test_a_slightly_wrong_kernel_is_replaced(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    module: str,
    function: str,
    factors: dict[str, float],
    instead: str,
) -> None:
    kernels = importlib.import_module(f"kernels.triton.{module}")
    monkeypatch.setattr(kernels, function, slightly_wrong(getattr(kernels, function), **factors))
    serving, logs = start(path, graphs=False)
    warnings = fallbacks(logs)
    assert warnings.keys() == {part}
    assert warnings[part]["instead"] == instead
    assert part in serving.fallbacks
    assert part in triton.disabled()


@pytest.mark.usefixtures("kernels_alone")
def test_a_kernel_that_does_not_compile_is_replaced(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("kernels.triton.ops")

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable")

    monkeypatch.setattr(kernels, "launch", launch)
    serving, _ = start(path, graphs=False)
    assert serving.fallbacks.keys() == {"norm", "gate"}
    assert serving.fallbacks["norm"] == (
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable"
    )


@pytest.mark.usefixtures("kernels_alone")
def test_a_graph_that_computes_something_else_is_discarded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Graph.replay

    def changed(self: Graph) -> torch.Tensor:
        logits = replay(self)
        logits[0, 0] += 2**-12
        return logits

    monkeypatch.setattr(Graph, "replay", changed)
    serving, logs = start(path)
    assert fallbacks(logs).keys() == {"graphs"}
    assert "differ from those of single launches" in serving.fallbacks["graphs"]
    assert serving.graphs == 0
    assert str(serving.facts()["cuda_graphs"]).startswith("off: ")


@pytest.mark.usefixtures("kernels_alone")
def test_a_capture_that_fails_leaves_single_launches(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = DeviceRunner._padded

    def waits(self: DeviceRunner, rows: int, longest: int) -> torch.Tensor:
        out = padded(self, rows, longest)
        out.sum().item()
        return out

    monkeypatch.setattr(DeviceRunner, "_padded", waits)
    serving, logs = start(path)
    assert fallbacks(logs).keys() == {"graphs"}
    assert serving.graphs == 0
    assert serving.overlap


@pytest.mark.usefixtures("kernels_alone")
def test_graphs_that_the_operator_turned_off_are_no_fallback(path: str) -> None:
    serving, logs = start(path, graphs=False)
    assert not fallbacks(logs)
    assert serving.facts()["cuda_graphs"] == f"off: {prepare.OFF}"


@pytest.mark.usefixtures("kernels_alone")
def test_batch_invariance_is_reported_where_it_was_shown_and_refused_where_not(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(block_size=0, max_num_seqs=3, max_num_batched_tokens=24)

    def invariant(**options: Any) -> bool:
        with pretend_gpu(total=1 << 29):
            model = ModelOptions(path, device="cuda", dtype="float32", **options)
            return build_engine(model, config, CacheOptions(num_blocks=48, cuda_graphs=False))[1].batch_invariant

    monkeypatch.setattr("engine.start.prepare.shows_invariance", lambda model: True)
    assert invariant(batch_invariant=True)
    assert not invariant(), "it was not requested"
    monkeypatch.setattr("engine.start.prepare.shows_invariance", lambda model: False)
    with pytest.raises(LoadError, match="--batch-invariant: products or norms"):
        invariant(batch_invariant=True)


@pytest.mark.usefixtures("kernels_alone")
def test_batch_invariance_without_the_triton_attention_is_refused_with_what_failed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = importlib.import_module("kernels.triton.attention")
    monkeypatch.setattr(kernels, "attend", slightly_wrong(kernels.attend, scale=1.05))
    with pytest.raises(LoadError, match=r"needs the triton attention backend, which failed: triton: attention"):
        start(path, graphs=False, batch_invariant=True)


@pytest.mark.usefixtures("kernels_alone")
def test_two_wrong_groups_are_replaced_each_for_itself(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, function in (("ops", "rms_norm"), ("write", "write_rotated")):
        kernels = importlib.import_module(f"kernels.triton.{module}")
        monkeypatch.setattr(kernels, function, slightly_wrong(getattr(kernels, function), result=torch.nan))
    serving, logs = start(path, graphs=False)
    assert fallbacks(logs).keys() == serving.fallbacks.keys() == triton.disabled().keys() == {"norm", "write"}
    assert len([entry for entry in logs if entry["event"] == "kernel_fallback"]) == 2
