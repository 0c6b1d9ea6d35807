"""A GPU's kernels are checked before the worker is ready: wrong ones are replaced, and a wrong GPU does not serve."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog
import torch
from torch import Tensor

from engine.build import CacheOptions, build_engine
from engine.checks import operations, selfcheck
from engine.checks.selfcheck import GpuFails
from engine.config import EngineConfig, ModelOptions
from engine.device.runner import DeviceRunner
from engine.models.loading import LoadedModel
from engine.start import compile_cache
from kernels import triton
from kernels.attention import backend_class
from kernels.attention.base import AttentionBackend, AttentionBatch
from kernels.attention.reference import ReferenceBackend
from tests.models.tiny import FUSED, build_case
from tests.pretend_gpu import pretend_gpu


@pytest.fixture(autouse=True)
def _all_kernels() -> Iterator[None]:
    triton.enable_all()
    yield
    triton.enable_all()


# ── what replaces what fails ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def _no_warming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.start.prepare.warm_up", lambda *_: None)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (case,) = (case for case in FUSED if case.name == "llama")
    return str(build_case(tmp_path / case.name, case))


def build(path: str, **options: Any) -> tuple[LoadedModel, list[Any]]:
    config = EngineConfig(block_size=0, max_num_batched_tokens=64)
    with structlog.testing.capture_logs() as logs:
        _, loaded = build_engine(
            ModelOptions(path, device="cuda", dtype="float32"), config, CacheOptions(num_blocks=64, **options)
        )
    return loaded, list(logs)


def fallbacks(logs: list[Any]) -> dict[str, Any]:
    return {entry["kernel"]: entry for entry in logs if entry["event"] == "kernel_fallback"}


class First(ReferenceBackend):
    """A backend that is preferred to the reference, and does what a test says."""

    name = "triton"
    device_types = ("cuda",)
    problem: BaseException | None = None
    factor = 1.0

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
        if self.problem is not None:
            raise self.problem
        return super().attend(layer, q, batch, **options) * self.factor


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> type[First]:
    """Takes the place of the Triton backend."""
    made = type("First", (First,), {})
    made.name = "triton"

    def find(name: str) -> type[AttentionBackend]:
        return made if name == "triton" else backend_class(name)

    monkeypatch.setattr(selfcheck, "backend_class", find)
    return made


def test_a_wrong_attention_backend_is_replaced_by_the_next_with_one_warning(path: str, first: type[First]) -> None:
    first.factor = 1.1
    with pretend_gpu():
        loaded, logs = build(path)
    warnings = fallbacks(logs)
    assert warnings.keys() == loaded.serving.fallbacks.keys() == {"attention"}
    warning = warnings["attention"]
    assert (warning["log_level"], warning["instead"]) == ("warning", "reference")
    assert "triton: attention with window None: relative error 0.1" in warning["reason"]
    assert warning["effect"]
    facts = loaded.serving.facts()
    assert (facts["attention"], facts["gpu"]) == ("reference", "Pretended GPU")
    assert str(facts["fallbacks"]).startswith("attention: triton: ")
    assert "attention" in triton.disabled()


def test_a_kernel_that_does_not_compile_is_replaced_even_if_its_backend_was_named(
    path: str, first: type[First]
) -> None:
    first.problem = RuntimeError("CompilationError: at 3:5:\n  gcc is missing")
    with pretend_gpu():
        loaded, logs = build(path, attention="triton")
    reason = fallbacks(logs)["attention"]["reason"]
    assert "RuntimeError: CompilationError: at 3:5: gcc is missing" in reason
    assert loaded.serving.attention == "reference"


def test_a_wrong_backend_that_was_named_is_replaced_by_the_fastest_other_one(
    path: str, first: type[First], monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = type("Flash", (First,), {"factor": 1.1})
    flash.name = "flash"
    others = selfcheck.backend_class
    monkeypatch.setattr(selfcheck, "backend_class", lambda name: flash if name == "flash" else others(name))
    with pretend_gpu():
        loaded, logs = build(path, attention="flash")
    assert fallbacks(logs)["attention"]["instead"] == loaded.serving.attention == "triton"


def test_a_right_backend_is_kept_without_a_warning(path: str, first: type[First]) -> None:
    with pretend_gpu():
        loaded, logs = build(path)
    assert not fallbacks(logs)
    assert loaded.serving.attention == "triton"
    assert "fallbacks" not in loaded.serving.facts()
    (checked,) = (entry for entry in logs if entry["event"] == "kernels_checked")
    assert checked["fallbacks"] == "none"


def test_a_wrong_fallback_ends_the_start_with_the_reason(
    path: str, first: type[First], monkeypatch: pytest.MonkeyPatch
) -> None:
    first.factor = 1.1
    attend = ReferenceBackend.attend

    def twice(self: ReferenceBackend, *args: Any, **options: Any) -> Tensor:
        return 2 * attend(self, *args, **options)

    monkeypatch.setattr(ReferenceBackend, "attend", twice)
    with pretend_gpu(), pytest.raises(GpuFails, match=r"no attention backend passes its check.*triton: .*reference: "):
        build(path)


def test_a_lost_device_ends_the_start_with_what_to_try(path: str, first: type[First]) -> None:
    first.problem = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pretend_gpu(), pytest.raises(GpuFails, match=r"lost the GPU.*--attention"):
        build(path)


def test_a_group_of_kernels_that_fails_is_disabled_and_torch_is_checked_in_its_place(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = operations.ops.rms_norm

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return right(x, weight, eps) * (1.02 if triton.enabled("norm") else 1)

    monkeypatch.setattr(operations.ops, "rms_norm", norm)
    monkeypatch.setattr("kernels.ops._other", lambda *args, **kwargs: operations.ops.reference)
    with pretend_gpu(), mock.patch("kernels.triton._installed", return_value=True):
        loaded, logs = build(path)
    assert fallbacks(logs)["norm"]["instead"] == "torch"
    assert "rms_norm of" in loaded.serving.fallbacks["norm"]
    assert "norm" in triton.disabled()
    monkeypatch.setattr(operations.ops, "rms_norm", lambda x, weight, eps: right(x, weight, eps) * 1.02)
    with pretend_gpu(), pytest.raises(GpuFails, match="norm in torch"):
        build(path)


def test_overlapped_steps_that_give_other_ids_are_turned_off(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = DeviceRunner.launch

    def forgets(self: DeviceRunner, plan: Any) -> Any:
        step = launch(self, plan)
        with torch.inference_mode():
            self.staging.last.zero_()
        return step

    monkeypatch.setattr(DeviceRunner, "launch", forgets)
    with pretend_gpu():
        loaded, logs = build(path)
    warnings = fallbacks(logs)
    assert "overlap" in warnings
    assert "instead of" in warnings["overlap"]["reason"]
    assert loaded.serving.facts()["overlap"] == "off"


def test_a_model_whose_steps_fail_with_overlap_and_without_does_not_start(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: DeviceRunner, plan: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(DeviceRunner, "launch", fails)
    with pretend_gpu(), pytest.raises(GpuFails, match=r"one after the other as well.*no kernel image"):
        build(path)


def test_nothing_is_checked_on_a_cpu(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "SelfCheck", None)
    _, loaded = build_engine(ModelOptions(path, device="cpu", dtype="float32"), EngineConfig(), CacheOptions(64))
    assert loaded.serving.facts() == {"attention": loaded.serving.attention, "overlap": "off"}
    assert loaded.serving.attention in ("cpu", "reference")


# ── the cache of compiled kernels ─────────────────────────────────────────────────────────────────────────────────


def test_compiled_kernels_are_kept_in_the_cache_folder_unless_the_environment_names_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.set_folder() == os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "tokenmill" / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert compile_cache.set_folder() == "/elsewhere"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compile_cache.set_folder() == str(tmp_path / ".cache" / "tokenmill" / "triton")


def test_a_kernel_that_is_compiled_after_the_start_is_logged() -> None:
    knobs = pytest.importorskip("triton").knobs
    before = knobs.runtime.jit_post_compile_hook
    try:
        compile_cache.warn_of_late_compiles()
        with structlog.testing.capture_logs() as logs:
            knobs.runtime.jit_post_compile_hook(
                key="k", repr="_attend[num_warps=4](q: i64)", fn=None, compile={}, is_manual_warmup=False,
                already_compiled=False,
            )  # fmt: skip
    finally:
        knobs.runtime.jit_post_compile_hook = before
    (entry,) = logs
    assert (entry["event"], entry["kernel"], entry["log_level"]) == ("kernel_compiled_late", "_attend", "warning")
