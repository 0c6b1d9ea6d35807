"""The runner of a GPU with Triton and CUDA graphs, on the pretended GPU: its ids are those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from engine.device_runner import DeviceRunner
from engine.engine import Engine
from tests.engine.devices import on_device
from tests.engine.test_gpu import CASES, build, results
from tests.engine.test_model import ask, prompts
from tests.models.tiny import build_case
from tests.pretend_gpu import pretend_gpu

NAMES = ("llama", "qwen3-windows", "llama-biases-forced")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(build_case(tmp_path_factory.mktemp(name), CASES[name])) for name in NAMES}


def on_gpu(path: str, graphs: bool, **config: Any) -> tuple[Engine, DeviceRunner]:
    engine, _ = build(path, "cuda", **{"max_num_seqs": 6, "max_num_batched_tokens": 32, **config})
    runner = on_device(engine)
    if graphs:
        runner.capture()
        assert (runner.graphs.reason, runner.graphs.count) == (None, len(runner.graphs.sizes))
    return engine, runner


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_prefill_decodes_and_forks_give_the_ids_of_the_cpu(paths: dict[str, str], name: str, graphs: bool) -> None:
    asked = [ask(f"r{i}", p, 5, n=1 + i % 2) for i, p in enumerate(prompts(300, [40, 5, 17], seed=3))]
    backend = "transformers" if name.endswith("forced") else "auto"
    want = results(build(paths[name], "cpu", backend=backend)[0], asked)
    with pretend_gpu(total=1 << 30):
        engine, _ = on_gpu(paths[name], graphs, backend=backend)
        assert results(engine, asked) == want
