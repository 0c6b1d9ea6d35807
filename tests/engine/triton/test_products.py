"""Models with experts, 8-bit products and batch invariance on the pretended GPU, with the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build import CacheOptions, build_engine
from engine.config import EngineConfig, ModelOptions
from engine.models.feed_forward import StackedExperts
from engine.models.invariance import shows_invariance
from engine.models.loading import LoadedModel, load_model
from kernels import triton as gpu
from kernels.attention import get_backend
from kernels.triton import matmul
from kernels.triton.matmul import Choice
from tests.engine.devices import device_engine
from tests.engine.test_gpu import results
from tests.engine.test_model import ask, prompts
from tests.models.driver import Driver
from tests.models.tiny import FUSED, build_case
from tests.pretend_gpu import pretend_gpu

CASES = {case.name: case for case in FUSED}
DENSE, EXPERTS = "llama-biases", "qwen3-moe-mixed"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(build_case(tmp_path_factory.mktemp(name), CASES[name])) for name in (DENSE, EXPERTS)}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gpu.enable_all()
    Choice.varies = True


def load(path: str, **options: Any) -> LoadedModel:
    return load_model(ModelOptions(path, device="cuda", dtype="float32", **options))


def test_models_with_int8_experts_in_graphs_give_the_ids_of_the_cpu(paths: dict[str, str]) -> None:
    asked = [ask(f"r{i}", p, 3) for i, p in enumerate(prompts(300, [20, 5], seed=3))]
    int8 = ModelOptions(paths[EXPERTS], device="cpu", dtype="float32", quantize="int8")
    want = results(build_engine(int8, EngineConfig(), CacheOptions(num_blocks=64))[0], asked)
    with pretend_gpu(total=1 << 30):
        engine, runner = device_engine(
            paths[EXPERTS], "cuda", attention="triton", precision={"quantize": "int8"}, max_num_seqs=2
        )
        runner.capture()
        assert (runner.graphs.reason, runner.graphs.count) == (None, len(runner.graphs.sizes))
        assert results(engine, asked) == want
        assert not gpu.disabled()


@pytest.mark.parametrize(("name", "quantize"), [(EXPERTS, "none"), (DENSE, "fp8")])
def test_logits_of_a_batch_invariant_model_have_the_same_bits_chunked_and_beside_others(
    paths: dict[str, str], name: str, quantize: str
) -> None:
    tokens, others = list(range(30, 45)), [list(range(100 + 20 * i, 109 + 20 * i)) for i in range(2)]
    with pretend_gpu(total=1 << 30):
        loaded = load(paths[name], quantize=quantize, batch_invariant=True)

        def fresh() -> Driver:
            return Driver(loaded, 16, backend="triton")

        alone = fresh()
        want: Tensor = alone.prefill(alone.add(tokens)).cpu()
        chunked = fresh()
        assert torch.equal(chunked.prefill(chunked.add(tokens), [6, 1, 8]).cpu(), want)
        crowd = fresh()
        rows = [crowd.add(x) for x in (*others, tokens)]
        got = crowd.step([(row, len(row.tokens)) for row in rows], every_row=True)[-1]
        assert torch.equal(got.cpu(), want)


def test_a_batch_invariant_model_shows_it_on_the_device(paths: dict[str, str]) -> None:
    with pretend_gpu(total=1 << 30):
        loaded = load(paths[EXPERTS], batch_invariant=True)
        assert shows_invariance(loaded.bind(get_backend("triton", loaded.cache_spec(16))))
        assert Choice.varies


def test_where_tiles_differ_in_bits_all_products_take_one_tile(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = matmul.matmul

    def differs(x: Tensor, *args: Any, **options: Any) -> Tensor:
        y = real(x, *args, **options)
        return y * 1.5 if Choice.varies and x.shape[0] > 64 else y

    with pretend_gpu(total=1 << 30):
        loaded = load(paths[DENSE], batch_invariant=True)
        monkeypatch.setattr(matmul, "matmul", differs)
        assert shows_invariance(loaded.bind(get_backend("triton", loaded.cache_spec(16))))
        assert not Choice.varies


def test_a_mixture_waits_for_nothing(paths: dict[str, str]) -> None:
    with pretend_gpu(total=1 << 30) as device:
        loaded = load(paths[EXPERTS])
        model: Any = loaded.bind(get_backend("triton", loaded.cache_spec(16)))
        mixture = next(layer.mlp for layer in model.parameters.layers if isinstance(layer.mlp, StackedExperts))
        x = torch.randn(600, mixture.router.in_features).to("cuda")
        before = device.waits
        mixture(x)
        assert device.waits == before
