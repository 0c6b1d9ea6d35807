"""A GPU's kernels are checked before the worker is ready: wrong ones are replaced, and a wrong GPU does not serve."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from engine.build import CacheOptions, build_engine
from engine.checks import operations, selfcheck
from engine.checks.attention import check_attention, check_invariance, check_write
from engine.checks.operations import check_gates, check_norms
from engine.checks.products import check_experts, check_invariant_products, check_quantize
from engine.checks.sampling import check_sampler
from engine.checks.selfcheck import GpuFails, attempt
from engine.checks.usage import Usage
from engine.config import EngineConfig, ModelOptions
from engine.device.runner import DeviceRunner
from engine.models import feed_forward
from engine.models.config import ExpertsConfig
from engine.models.loading import LoadedModel
from engine.start import compile_cache
from kernels import linear_cuda, sampling, triton
from kernels.attention import backend_class
from kernels.attention.base import AttentionBackend, AttentionBatch, CacheSpec
from kernels.attention.reference import ReferenceBackend
from kernels.linear import Precision
from tests.models.tiny import FUSED, build_case
from tests.pretend_gpu import pretend_gpu

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def usage(dtype: torch.dtype = torch.float32, block_size: int = 16, **changes: Any) -> Usage:
    spec = CacheSpec(1, 2, 64, block_size, dtype, CPU, num_heads=6)
    given: dict[str, Any] = {
        "spec": spec,
        "num_heads": 6,
        "scale": 0.125,
        "windows": (None, 300),
        "softcap": 30.0,
        "head_norm": True,
        "hidden_size": 192,
        "gated": (("silu", 256), ("gelu_tanh", 96)),
        "logit_softcap": 30.0,
        "vocab_size": 500,
        "num_ids": 490,
    }
    return Usage(**{**given, **changes})


@pytest.fixture(autouse=True)
def _all_kernels() -> Iterator[None]:
    triton.enable_all()
    yield
    triton.enable_all()


# ── the checks ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_right_kernels_pass_in_every_dtype(dtype: torch.dtype, block_size: int) -> None:
    found = usage(dtype, block_size)
    backend = ReferenceBackend(found.spec)
    assert check_attention(found, backend) is None
    assert check_write(found, backend) is None
    assert check_norms(found) is None
    assert check_gates(found) is None
    wide = dataclasses.replace(found, wide_norms=True, head_norm=False, rotated=False, softcap=None)
    assert check_norms(wide) is None
    assert check_write(wide, backend) is None
    assert check_attention(wide, backend) is None


class Wrong(ReferenceBackend):
    """Attends as `change` makes it: from (q, batch, options) to what is really computed."""

    name = "wrong"
    change: Callable[..., tuple[Tensor, AttentionBatch, dict[str, Any]]]
    after: Callable[[Tensor], Tensor] = staticmethod(lambda out: out)

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
        q, batch, options = type(self).change(q, batch, options)
        return self.after(super().attend(layer, q, batch, **options))


def shorter(batch: AttentionBatch) -> AttentionBatch:
    """The last key of each decode is not seen."""
    counts = [end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    lengths = [n - (count == 1 and n > 1) for n, count in zip(batch.context_lens, counts, strict=True)]
    return dataclasses.replace(batch, context_lens=tuple(lengths))


MISTAKES: dict[str, Callable[..., tuple[Tensor, AttentionBatch, dict[str, Any]]]] = {
    "a scale that is 5 % off": lambda q, b, o: (q, b, {**o, "scale": o["scale"] * 1.05}),
    "no soft-cap": lambda q, b, o: (q, b, {**o, "softcap": None}),
    "a window that is one too long": lambda q, b, o: (q, b, {**o, "window": o["window"] and o["window"] + 1}),
    "a window that is one too short": lambda q, b, o: (q, b, {**o, "window": o["window"] and o["window"] - 1}),
    "no window": lambda q, b, o: (q, b, {**o, "window": None}),
    "the last key missing": lambda q, b, o: (q, shorter(b), o),
    "heads in another order": lambda q, b, o: (q.roll(1, 1), b, o),
    "rows in another order": lambda q, b, o: (q.roll(1, 0), b, o),
    "a wrong block": lambda q, b, o: (
        q, dataclasses.replace(b, block_tables=(*b.block_tables[1:], b.block_tables[0])), o,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_attention_is_caught(mistake: str, dtype: torch.dtype) -> None:
    found = usage(dtype, softcap=2.0 if "cap" in mistake else None)
    wrong = type("Wrong", (Wrong,), {"change": staticmethod(MISTAKES[mistake])})
    message = attempt("attention", lambda: check_attention(found, wrong(found.spec)))
    assert message is not None


def test_one_wrong_row_or_a_nan_is_caught() -> None:
    found = usage(torch.bfloat16)

    def spoil(value: float) -> Callable[[Tensor], Tensor]:
        def after(out: Tensor) -> Tensor:
            out[-1, 0, 3] = value
            return out

        return after

    for value in (torch.nan, torch.inf, 9.0):
        same = {"change": staticmethod(lambda q, b, o: (q, b, o)), "after": staticmethod(spoil(value))}
        message = check_attention(found, type("Wrong", (Wrong,), same)(found.spec))
        assert message is not None
        assert "attention with window None" in message


@pytest.mark.parametrize("mistake", ["swapped", "unrotated", "slots"])
def test_a_wrong_write_is_caught(mistake: str) -> None:
    class Backend(ReferenceBackend):
        name = "wrong"

        def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
            if mistake == "swapped":
                k, v = v, k
            if mistake == "slots":
                k, v = k.roll(1, 0), v.roll(1, 0)
            super().write(layer, k, v, batch)

        def write_rotated(self, layer: int, qkv: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
            if mistake == "unrotated":
                options["rotation"] = None
            return super().write_rotated(layer, qkv, batch, **options)

    found = usage(torch.bfloat16)
    assert check_write(found, Backend(found.spec)) is not None


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rms_norm", lambda x, weight, eps: x * weight),
        ("add_rms_norm", lambda x, residual, weight, eps: (x, x + residual)),
        ("add_rms_norm", lambda x, residual, weight, eps: (operations.ops.rms_norm(x + residual, weight, eps), x)),
    ],
)
def test_a_wrong_norm_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    monkeypatch.setattr(operations.ops, name, function)
    assert check_norms(usage(torch.bfloat16)) is not None


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu_mul", lambda x: torch.nn.functional.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0]),
        ("gelu_mul", lambda x: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
        ("softcap", lambda x, cap: x.clamp(-cap, cap)),
    ],
)
def test_a_wrong_gate_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    monkeypatch.setattr(operations.ops, name, function)
    assert check_gates(usage(torch.bfloat16)) is not None


def on_gpu(found: Usage) -> Usage:
    return dataclasses.replace(found, spec=dataclasses.replace(found.spec, device=torch.device("cuda")))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_sampler_is_caught_and_a_right_one_passes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampling.sample
    with pretend_gpu():
        assert check_sampler(on_gpu(usage(dtype))) is None
        monkeypatch.setattr(sampling, "sample", lambda logits, *rest: right(logits.roll(1, 1), *rest))
        assert "instead of" in (check_sampler(on_gpu(usage(dtype))) or "")


QUANTIZED = (torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize("quantize", [None, *QUANTIZED])
def test_wrong_products_are_caught_and_right_ones_pass(
    quantize: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = ExpertsConfig(12, 3, 128, True, frozenset())
    found = on_gpu(usage(torch.bfloat16, precision=Precision(quantize), experts=experts))
    check_products = check_invariant_products if quantize is None else check_quantize
    multiply = linear_cuda.multiply

    def wrong(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return multiply(x.roll(1, 1), *args, **options)

    with pretend_gpu():
        assert check_products(found) is None
        assert check_experts(found) is None
        monkeypatch.setattr(linear_cuda, "multiply", wrong)
        monkeypatch.setattr(feed_forward, "multiply", wrong)
        assert "product of 1 rows" in (check_products(found) or "")
        assert "mixture of 8 experts" in (check_experts(found) or "")


@pytest.mark.parametrize("quantize", QUANTIZED)
@pytest.mark.parametrize(("hidden", "inner"), [(192, 40), (40, 192), (40, 40)])
def test_sizes_that_cannot_be_quantised_are_checked_without_it(quantize: torch.dtype, hidden: int, inner: int) -> None:
    experts = ExpertsConfig(4, 2, inner, True, frozenset())
    found = on_gpu(usage(torch.bfloat16, precision=Precision(quantize), experts=experts, hidden_size=hidden))
    with pretend_gpu():
        assert check_quantize(found) is None
        assert check_experts(found) is None


def test_a_mixture_that_is_wrong_only_with_as_many_experts_as_the_model_has_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = on_gpu(usage(torch.bfloat16, experts=ExpertsConfig(128, 8, 96, True, frozenset())))
    choose = feed_forward._choose

    def wrong(scores: Tensor, *args: Any) -> Any:
        weights, chosen = choose(scores, *args)
        return weights, chosen.clamp_max(63)

    with pretend_gpu():
        assert check_experts(found) is None
        monkeypatch.setattr(feed_forward, "_choose", wrong)
        assert "mixture of 128 experts" in (check_experts(found) or "")


@pytest.mark.parametrize("quantize", QUANTIZED)
def test_batch_invariant_products_are_checked_with_and_without_8_bit_factors(
    quantize: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_gpu(usage(torch.bfloat16, precision=Precision(quantize, batch_invariant=True)))
    multiply = linear_cuda.multiply

    def wrong(x: Tensor, weight: Tensor, *args: Any, batch_invariant: bool) -> Tensor:
        y = multiply(x, weight, *args, batch_invariant=batch_invariant)
        return y * 1.1 if batch_invariant and weight.dtype == torch.bfloat16 else y

    with pretend_gpu():
        assert check_invariant_products(found) is None
        monkeypatch.setattr(linear_cuda, "multiply", wrong)
        assert check_quantize(found) is None, "quantisation is not to blame"
        assert "product of 1 rows" in (check_invariant_products(found) or "")


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
    with pretend_gpu():
        monkeypatch.setattr(triton, "_installed", lambda: True)
        monkeypatch.setattr("kernels.ops._other", lambda *args, **kwargs: operations.ops.reference)
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


def test_attention_that_depends_on_the_batch_in_one_window_is_caught() -> None:
    class Backend(ReferenceBackend):
        name = "wrong"

        def attend(self, layer: int, q: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
            out = super().attend(layer, q, batch, **options)
            return 2 * out if options["window"] and batch.num_sequences > 1 else out

    found = usage(torch.bfloat16)
    assert check_invariance(found, ReferenceBackend(found.spec)) is None
    assert "with window 300" in (check_invariance(found, Backend(found.spec)) or "")


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
