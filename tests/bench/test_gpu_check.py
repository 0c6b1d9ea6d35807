"""The check of a machine's GPU: what it finds, what it skips, its time boxes, and that it runs on a pretended GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu_check import kernels, models, peer, sampling
from bench.gpu_check.claims import claims
from bench.gpu_check.models import Random
from bench.gpu_check.parity import compare, tiny_model
from bench.gpu_check.rows import ROWS, TOTAL_SECONDS
from bench.gpu_check.steps import idle_share
from bench.gpu_check.table import _KILL_SECONDS, Line, Row, Setup, Skip, Table, check, machine
from bench.gpu_check.waits import count_waits
from kernels.attention.reference import ReferenceBackend
from kernels.device import Download
from tests.support import output_of

REDUCED = Setup(reduced=True)
ON_CPU = Setup(reduced=True, device="cpu")
SHAPE = ((2, 1, 16),)
SCRIPT = Path(kernels.__file__).parents[1] / "gpu_check.sh"


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
def test_a_check_with_a_missing_package_is_skipped_and_a_wrong_result_fails(error: Exception, result: str) -> None:
    assert check("what", lambda: fail(error)).result == result


# ── rows in processes of their own ────────────────────────────────────────────────────────────────────────────────────


def slow(setup: Setup) -> Iterator[Line]:
    yield Line("first", "known")
    time.sleep(60)
    yield Line("second", "never")


def long(setup: Setup) -> Iterator[Line]:
    yield Line("first", "known")
    time.sleep(3.5)
    yield Line("second", "known")
    time.sleep(60)


def dies(setup: Setup) -> Iterator[Line]:
    yield Line("first", "known")
    os._exit(3)


def raises(setup: Setup) -> Iterator[Line]:
    yield Line("first", "known")
    raise ValueError("wrong")


def wrong(setup: Setup) -> Iterator[Line]:
    yield Line("first", "off", "FAILED")


def fine(setup: Setup) -> Iterator[Line]:
    yield Line("first", "known", values={"x": setup.seconds})


def table_of(
    name: str, monkeypatch: pytest.MonkeyPatch, *, box: float = 30, total: float = 60, proves: bool = True
) -> Table:
    """A table after one row, whose function is in this file."""
    monkeypatch.setitem(sys.modules, "bench.gpu_check.made", sys.modules[__name__])
    table = Table(Setup(), total)
    table.run(Row("1", "row", box, f"made:{name}", proves=proves))
    return table


def results(table: Table) -> list[tuple[str, str]]:
    return [(line.what, line.result) for _, _, line in table.lines]


def test_a_row_that_outlasts_its_time_box_is_ended_and_keeps_the_lines_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    table = table_of("slow", monkeypatch, box=2)
    assert results(table) == [("first", "ok"), ("row", "timeout")]
    assert table.failed == ["row"]
    assert time.monotonic() - begun < 20


def test_a_row_begins_no_further_check_shortly_before_its_time_box_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of("long", monkeypatch, box=4)
    assert results(table) == [("first", "ok"), ("second", "ok"), ("row", "skipped")]
    assert table.failed == []


def test_a_row_whose_process_dies_fails_and_the_next_row_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of("dies", monkeypatch)
    assert results(table) == [("first", "ok"), ("row", "FAILED")]
    assert "status 3" in table.lines[-1][2].detail
    table.run(Row("2", "next", 30, "made:fine"))
    assert results(table)[-1] == ("first", "ok")


def test_a_row_that_raises_fails_and_a_measurement_that_fails_leaves_the_exit_status_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert table_of("raises", monkeypatch).failed == ["row"]
    assert table_of("raises", monkeypatch, proves=False).failed == []
    assert table_of("wrong", monkeypatch).failed == ["first"]


def test_no_row_begins_after_the_time_of_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert results(table_of("fine", monkeypatch, total=0)) == [("row", "timeout")]
    assert table_of("fine", monkeypatch, box=40, total=20).values("1")["x"] <= 20


def test_the_rows_fit_into_six_minutes_and_those_that_prove_something_come_first() -> None:
    limit = int(SCRIPT.read_text().partition("seconds=")[2].split()[0])
    assert TOTAL_SECONDS + 2 * _KILL_SECONDS < limit <= 6 * 60 - 5
    assert ROWS[-1].name == "compute-sanitizer"  # which takes long
    proofs = [row.proves for row in ROWS[:-1]]
    assert proofs == sorted(proofs, reverse=True)


def test_a_claim_says_yes_only_if_all_of_its_values_hold() -> None:
    table = Table(Setup(), 1)
    row = Row("10", "steps", 1, "")
    table.add(row, 0, Line("8B", "", values={"floor 8B 1": 0.9, "floor 8B 32": 0.7, "idle 8B 128": 0.03}))
    rates = {"rate 1B tokenmill": 20.0, "rate 1B generate_batch": 10.0, "rate 8B tokenmill": 9.0}
    table.add(Row("12", "rates", 1, ""), 0, Line("rates", "", values=rates))
    found = {line.what: line.result for _, line in claims(table)}
    assert list(found.values()) == ["skipped", "no", "yes", "yes"]


def test_the_table_as_json_has_every_line(tmp_path: Path) -> None:
    table = Table(Setup(), 1)
    table.add(Row("1", "row", 1, ""), 2.5, Line("what", "detail", "ok", {"x": 1.0}))
    table.write(tmp_path / "t.json", {"gpu": "none"})
    assert json.loads((tmp_path / "t.json").read_text()) == {
        "gpu": "none",
        "lines": [
            {"row": "1", "seconds": 2.5, "what": "what", "detail": "detail", "result": "ok", "values": {"x": 1.0}}
        ],
    }


# ── what the rows find ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_backend_that_is_slightly_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "largest error" in kernels.attention(ON_CPU, "reference", "bfloat16", SHAPE)
    right = ReferenceBackend.attend

    def wrong(self: ReferenceBackend, layer: int, q: Tensor, *args: object, **options: object) -> Tensor:
        return right(self, layer, q * 1.02, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceBackend, "attend", wrong)
    with pytest.raises(ValueError, match="off by"):
        kernels.attention(ON_CPU, "reference", "bfloat16", SHAPE)


def test_a_backend_that_cannot_run_is_skipped_with_its_reason() -> None:
    with pytest.raises(Skip, match="does not run on cpu"):
        kernels.attention(ON_CPU, "flash", "float16", SHAPE)


def test_an_operation_that_is_off_by_more_than_its_roundings_is_found() -> None:
    want = torch.rand(100, dtype=torch.float64) + 1
    kernels._units(want.float(), want)
    with pytest.raises(ValueError, match="units of the last place"):
        kernels._units((want * (1 + 1e-5)).float(), want)
    with pytest.raises(ValueError, match="units of the last place"):
        kernels._units(torch.full((100,), torch.nan), want)


def test_ids_are_compared_with_those_of_transformers(tmp_path: Path) -> None:
    prompts = [[8 + 7 * i % 250 for i in range(n)] for n in (40, 5)]
    assert "ids equal" in compare(REDUCED, lambda: tiny_model(tmp_path, "llama"), "float32", prompts, 3)


def test_ids_that_a_rounding_explains_pass_and_other_ids_are_found() -> None:
    with machine(REDUCED):
        assert "12 of 12 draws equal" in sampling._compare(REDUCED, torch.float32)
    logits, tokens = torch.zeros(1, 300), [1, 2, 3, 4, 5]
    logits[0, [7, 8]] = torch.tensor([5.0, 5.0 * (1 - 1e-7)])
    assert sampling._neighbours(logits[0], tokens, 0, ["greedy"]) == {7, 8}
    logits[0, 8] = 4.9
    assert sampling._neighbours(logits[0], tokens, 0, ["greedy"]) == {7}


def test_a_random_model_has_the_precision_that_is_asked_for_or_is_skipped_with_the_reason() -> None:
    plain = models.random_model(ON_CPU, Random("tiny"))
    assert (plain.num_heads, plain.precision.batch_invariant) == (2, False)
    assert models.random_model(ON_CPU, Random("tiny", batch_invariant=True)).precision.batch_invariant
    assert models.random_model(ON_CPU, Random("tiny", quantize="int8")).precision.quantize == torch.int8
    with pytest.raises(Skip, match="fp8 needs a GPU"):
        models.random_model(ON_CPU, Random("tiny", quantize="fp8"))


def test_the_peer_is_skipped_with_the_reasons_if_none_of_its_configurations_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = iter([MemoryError("no room for its cache"), TypeError("no such option")])
    monkeypatch.setattr(peer, "stock_llama", lambda *_: None)
    monkeypatch.setattr(peer, "_generated", lambda *_: fail(next(errors)))
    with pytest.raises(Skip, match=r"no room for its cache.*no such option"):
        peer._generate_batch(ON_CPU, models.SHAPES["tiny"], [[1]], 1)


def test_waits_are_counted_by_kind_and_asynchronous_copies_are_none() -> None:
    with machine(REDUCED):
        x = torch.ones(3, device="cuda")
        with count_waits(REDUCED) as found:
            torch.ones(3).pin_memory().to("cuda", non_blocking=True)
            Download(x).wait()
        assert found == {"event": 1}
        with count_waits(REDUCED) as found:
            x.sum().item()
            torch.ones(3).to("cuda")
            x.nonzero()
        assert found == {"item": 1, "copy": 1, "nonzero": 1}


def test_the_idle_share_counts_time_that_no_kernel_covers_once() -> None:
    assert idle_share([]) is None
    assert idle_share([(0, 10)]) == 0
    assert idle_share([(5, 10), (0, 6), (15, 20), (16, 18)]) == pytest.approx(0.25)


# ── the script ────────────────────────────────────────────────────────────────────────────────────────────────────────

BARE = (
    "structlog",
    "llguidance",
    "orjson",
    "gguf",
    "pydantic",
    "pydantic_settings",
    "redis",
    "typer",
    "prometheus_client",
)
"""Packages of the worker that a machine with torch, Triton and transformers may lack."""
BLOCK = f"""
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def hidden(name, *args, **kwargs):
    return None if name.partition(".")[0] in {BARE!r} else find(name, *args, **kwargs)
importlib.machinery.PathFinder.find_spec = staticmethod(hidden)
"""


@pytest.mark.timeout(2700)
@pytest.mark.parametrize("rows", ["4,12", pytest.param("", marks=pytest.mark.slow)])
def test_the_script_runs_without_the_packages_of_the_worker(rows: str, tmp_path: Path) -> None:
    """In its reduced form; without `rows` all of it, which takes minutes."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [SCRIPT, "--cpu", "--json", tmp_path / "t.json", *(["--rows", rows] if rows else [])]
    shown = output_of(command, env=environment, timeout=2700)
    assert "not needed here: structlog, llguidance, orjson, gguf" in shown
    found = json.loads((tmp_path / "t.json").read_text())
    assert (found["reduced"], found["failed"]) == (True, [])
    assert {line["row"] for line in found["lines"]} == (set(rows.split(",")) if rows else {row.number for row in ROWS})
