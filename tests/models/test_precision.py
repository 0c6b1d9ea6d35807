"""8-bit products and batch invariance: what is refused, with what message, and what a pretended GPU computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build import CacheOptions, build_engine
from engine.config import Device, EngineConfig, ModelOptions
from engine.engine import Engine
from engine.models import invariance, loading, parameters
from engine.models.feed_forward import StackedExperts
from engine.models.invariance import shows_invariance
from engine.models.loading import LoadedModel, LoadError, load_model
from kernels import quantize
from kernels.attention.reference import ReferenceBackend
from kernels.linear import PLAIN, Precision
from kernels.linear_cuda import can_quantize
from kernels.ops import silu_mul
from tests.engine.test_gpu import results
from tests.engine.test_model import ask, prompts
from tests.models.driver import Driver
from tests.models.tiny import FUSED, STOCK, build_case
from tests.pretend_gpu import pretend_gpu

CASES = {case.name: case for case in FUSED + STOCK}
DENSE, EXPERTS = "llama-biases", "qwen3-moe-mixed"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(build_case(tmp_path_factory.mktemp(name), CASES[name])) for name in (DENSE, EXPERTS)}


def load(path: str, device: str = "cpu", **options: Any) -> LoadedModel:
    return load_model(ModelOptions(path, **{"device": device, "dtype": "float32", **options}))


def logits(loaded: LoadedModel) -> Tensor:
    driver = Driver(loaded, 16, backend="reference")
    found: Tensor = driver.prefill(driver.add(list(range(30, 75)))).cpu().double()
    return found


class TestRefusals:
    @pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "fp8"}, {"batch_invariant": True}])
    def test_transformers_code_has_neither(self, paths: dict[str, str], options: dict[str, Any]) -> None:
        with pytest.raises(LoadError, match=r"needs the fused decoder: leave out --backend transformers"):
            load(paths[DENSE], backend="transformers", **options)

    def test_a_model_that_only_transformers_runs_has_neither(self, tmp_path: Path) -> None:
        path = str(build_case(tmp_path, next(case for case in STOCK if case.name == "glm4")))
        with pytest.raises(LoadError, match=r"--quantize int8 and --batch-invariant needs the fused decoder: .*glm4"):
            load(path, quantize="int8", batch_invariant=True)

    def test_fp8_on_a_cpu_names_int8(self, paths: dict[str, str]) -> None:
        with pytest.raises(
            LoadError, match=r"fp8 needs a GPU of compute capability 8\.9 or newer; the CPU has --quantize int8"
        ):
            load(paths[DENSE], quantize="fp8")

    def test_fp8_on_an_old_gpu_names_the_gpu_and_int8(self, paths: dict[str, str]) -> None:
        message = r"capability 8\.9 or newer; NVIDIA A100 has 8\.0: use --quantize int8"
        with pretend_gpu(capability=(8, 0), name="NVIDIA A100"), pytest.raises(LoadError, match=message):
            load(paths[DENSE], "cuda", quantize="fp8")

    def test_int8_on_a_gpu_without_integer_tensor_cores_names_none(self, paths: dict[str, str]) -> None:
        message = r"capability 7\.5 or newer; Tesla V100 has 7\.0: use --quantize none"
        with pretend_gpu(capability=(7, 0), name="Tesla V100"), pytest.raises(LoadError, match=message):
            load(paths[DENSE], "cuda", quantize="int8")

    def test_invariance_on_a_gpu_without_triton_says_what_to_install(self, paths: dict[str, str]) -> None:
        with pretend_gpu(), pytest.raises(LoadError, match=r"needs Triton \(pip install triton\): it is not installed"):
            load(paths[DENSE], "cuda", batch_invariant=True)

    def test_invariance_on_a_cpu_whose_attention_lacks_it_names_the_backend(
        self, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = ModelOptions(paths[DENSE], device="cpu", dtype="float32", batch_invariant=True)
        cache = CacheOptions(num_blocks=16, attention="reference")
        _, loaded = build_engine(options, EngineConfig(), cache)
        assert loaded.batch_invariant
        monkeypatch.setattr(ReferenceBackend, "batch_invariant", False)
        with pytest.raises(LoadError, match=r"attention \(reference\) of this CPU"):
            build_engine(options, EngineConfig(), cache)


@pytest.mark.parametrize("name", [DENSE, EXPERTS])
def test_int8_on_a_gpu_gives_the_ids_of_int8_on_the_cpu(paths: dict[str, str], name: str) -> None:
    asked = [ask(f"r{i}", p, 6) for i, p in enumerate(prompts(300, [30, 5, 17], seed=4))]

    def engine(device: Device) -> Engine:
        options = ModelOptions(paths[name], device=device, dtype="float32", quantize="int8")
        return build_engine(
            options, EngineConfig(block_size=0, max_num_batched_tokens=64), CacheOptions(num_blocks=64)
        )[0]

    want = results(engine("cpu"), asked)
    with pretend_gpu():
        assert results(engine("cuda"), asked) == want


class Exact:
    """A `Linear` on the CPU that multiplies quantised factors in fp64."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, precision: Precision = PLAIN
    ) -> None:
        self.weight, self.bias, self.gated, self.dtype = weight.double(), bias, gated, precision.quantize
        if self.dtype is not None and can_quantize(self.dtype, weight.shape[1]):
            values, scales = quantize.reference(weight, self.dtype)
            self.weight = values.double() * scales.double()[:, None]
        else:
            self.dtype = None
        self.invariant = True

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.double()
        if self.dtype is not None:
            values, scales = quantize.reference(x, self.dtype)
            wide = values.double() * scales.double()[:, None]
        y = (wide @ self.weight.T + (0 if self.bias is None else self.bias.double())).to(x.dtype)
        return silu_mul(y) if self.gated else y


@pytest.mark.parametrize("name", [DENSE, EXPERTS])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_logits_of_8_bits_on_a_gpu_equal_those_of_the_quantised_factors(
    paths: dict[str, str], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_gpu():
        got = logits(load(paths[name], "cuda", quantize=kind))
    monkeypatch.setattr(loading, "check_precision", lambda options, device: None)
    monkeypatch.setattr(parameters, "Linear", Exact)
    want = logits(load(paths[name], quantize=kind))
    assert torch.allclose(got, want, rtol=0, atol=1e-4)


def test_without_kernels_a_mixture_on_a_gpu_waits_for_nothing_in_a_small_step(paths: dict[str, str]) -> None:
    with pretend_gpu() as gpu:
        loaded = load(paths[EXPERTS], "cuda")
        backend = ReferenceBackend(loaded.cache_spec(16))
        decoder: Any = loaded.bind(backend)
        mixture = next(layer.mlp for layer in decoder.parameters.layers if isinstance(layer.mlp, StackedExperts))
        x = torch.randn(40, mixture.router.in_features).to("cuda")
        waits = gpu.waits
        out = mixture(x)
        assert gpu.waits == waits
        assert out.shape == x.shape


class TestShown:
    def test_a_model_on_the_cpu_shows_invariance(self, paths: dict[str, str]) -> None:
        loaded = load(paths[EXPERTS])
        assert shows_invariance(loaded.bind(ReferenceBackend(loaded.cache_spec(16))))

    def test_a_product_with_other_bits_in_other_batches_does_not(
        self, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded = load(paths[DENSE])
        model = loaded.bind(ReferenceBackend(loaded.cache_spec(16)))
        monkeypatch.setattr(invariance, "rms_norm", lambda x, weight, eps: x + x.shape[0])
        assert not shows_invariance(model)

    def test_a_model_of_transformers_does_not(self, paths: dict[str, str]) -> None:
        loaded = load(paths[DENSE], backend="transformers")
        assert not shows_invariance(loaded.bind(ReferenceBackend(loaded.cache_spec(16))))
