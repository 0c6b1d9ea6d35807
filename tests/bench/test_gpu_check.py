"""The check of a machine's GPU: what it finds, what it skips, and that its GPU part runs on a pretended one."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import gpu_check
from bench.gpu_check import Skip, Table, attention, parity, throughput, tiny_model
from kernels.attention.reference import ReferenceBackend
from tests.kernels.flash_stand_in import FlashStandIn
from tests.pretend_gpu import pretend_gpu
from tests.support import output_of

CPU = torch.device("cpu")
SHAPE = ((2, 1, 16),)


def fail(error: Exception) -> str:
    raise error


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (Skip("no GPU"), "skipped"),
        (ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"), "skipped"),
        (ModuleNotFoundError("No module named 'engine.gone'", name="engine.gone"), "FAILED"),
        (ImportError("cannot import name 'x'"), "FAILED"),
        (ValueError("wrong"), "FAILED"),
        (AssertionError("wrong"), "FAILED"),
    ],
)
def test_a_check_with_a_missing_package_is_skipped_and_a_wrong_result_fails(
    error: Exception, result: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table()
    table.run("part", "what", partial(fail, error))
    assert result in capsys.readouterr().out
    assert (table.failed, table.done) == (int(result == "FAILED"), 0)


def test_no_check_begins_after_the_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.start -= 1000
    table.run("part", "what", lambda: pytest.fail("it ran"))
    assert "no time is left" in capsys.readouterr().out


def test_a_backend_that_is_slightly_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "largest error" in attention("reference", "bfloat16", CPU, SHAPE)
    right = ReferenceBackend.attend

    def wrong(self: ReferenceBackend, layer: int, q: Tensor, *args: object, **options: object) -> Tensor:
        return right(self, layer, q * 1.02, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceBackend, "attend", wrong)
    with pytest.raises(ValueError, match="off by"):
        attention("reference", "bfloat16", CPU, SHAPE)


def test_a_backend_that_cannot_run_is_skipped_with_its_reason() -> None:
    with pytest.raises(Skip, match="does not run on cpu"):
        attention("flash", "float16", CPU, SHAPE)


def test_the_gpu_part_runs_on_a_pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_POOL_BYTES", 4 << 20)
    make = partial(tiny_model, tmp_path, "llama")
    make()  # transformers must not find a library that is not installed
    monkeypatch.setitem(sys.modules, "flash_attn", FlashStandIn("cuda"))  # type: ignore[arg-type]
    prompts = gpu_check._random_prompts([257, 5])
    with pretend_gpu():
        for name in ("flash", "reference"):
            assert "largest error" in attention(name, "float16", torch.device("cuda"), SHAPE)
        with pytest.raises(Skip, match="float32"):
            attention("flash", "float32", torch.device("cuda"), SHAPE)
        assert parity(make, "cuda", "float16", prompts, 3).startswith("flash: ")
        assert "flash bfloat16" in throughput(lambda: make()[0], "cuda", "flash", 2, 2)


@pytest.mark.slow
@pytest.mark.model
def test_the_script_runs_in_its_reduced_form() -> None:
    script = Path(gpu_check.__file__).with_suffix(".sh")
    environment = {**os.environ, "PYTHON": sys.executable}
    shown = output_of([script, "--cpu"], env=environment, timeout=170)
    assert "flash float16" in shown
    assert "0 failed" in shown
