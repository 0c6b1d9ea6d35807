"""The memory of a GPU is shared by what was measured, and a model that does not fit is refused in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import structlog
import torch

from engine.config import EngineConfig, ModelOptions
from engine.models import loading
from engine.models.loading import LoadError
from engine.start.device_memory import GIB, DeviceMemory, DoesNotFit, lighter_weights, smaller_steps
from engine.start.host_memory import host_pieces, piece_sizes
from engine.start.profile import largest_step

GPU = torch.device("cuda", 0)


class Card:
    """The counters of torch.cuda: `allocated` and `cached` bytes of torch, bytes of `others`, `total`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: float, others: float = 0.5) -> None:
        self.total, self.others = int(total * GIB), int(others * GIB)
        self.allocated = self.cached = self.peak = 0
        for name, function in {
            "mem_get_info": lambda _=None: (self.total - self.others - self.allocated - self.cached, self.total),
            "memory_reserved": lambda _=None: self.allocated + self.cached,
            "memory_allocated": lambda _=None: self.allocated,
            "max_memory_allocated": lambda _=None: self.peak,
            "reset_peak_memory_stats": self._reset,
            "empty_cache": self._empty,
            "synchronize": lambda _=None: None,
            "get_device_capability": lambda _=None: (9, 0),
            "get_device_name": lambda _=None: "NVIDIA Test",
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def take(self, gib: float) -> None:
        self.allocated += int(gib * GIB)
        self.peak = max(self.peak, self.allocated)

    def give(self, gib: float) -> None:
        self.allocated -= int(gib * GIB)
        self.cached += int(gib * GIB)

    def _reset(self, _: object = None) -> None:
        self.peak = self.allocated

    def _empty(self) -> None:
        self.cached = 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Card]:
    return lambda *args: Card(monkeypatch, *args)


def test_the_pool_gets_what_weights_peak_and_libraries_leave_of_the_share(card: Any) -> None:
    gpu = card(24)
    memory = DeviceMemory(GPU, 0.9)
    gpu.take(9)
    gpu.give(1)  # needed by loading only
    memory.loaded()
    assert (memory.weights, gpu.cached) == (8 * GIB, 0)

    def step() -> None:
        gpu.take(2)
        gpu.give(2)
        gpu.others += GIB // 4  # a library's workspace

    memory.measure(step)
    memory.graphs = GIB // 2
    parts = (memory.weights, memory.step, memory.libraries)
    assert parts == (8 * GIB, 2 * GIB, GIB * 3 // 4)
    assert memory.room == int(0.9 * 24 * GIB) - sum(parts) - GIB // 2
    assert memory.fields()["kv_pool_mib"] == pytest.approx((21.6 - 11.25) * 1024, abs=0.1)


def test_graphs_take_one_pool_and_memory_of_the_driver_for_each(card: Any) -> None:
    gpu = card(24)
    memory = DeviceMemory(GPU, 0.9)

    def capture() -> tuple[int, int]:
        gpu.take(1)  # the pool, which all graphs share
        gpu.others += 4 << 20
        return 2, 50

    memory.measure_graphs(capture)
    assert memory.graphs == GIB + (100 << 20)


def test_a_worker_beyond_its_share_is_warned_of_unless_its_pool_was_given(card: Any) -> None:
    gpu = card(24)
    memory = DeviceMemory(GPU, 0.5)
    gpu.take(13)
    with structlog.testing.capture_logs() as logs:
        memory.check_end(sized=True)
        assert not logs
        memory.check_end(sized=False)
    (entry,) = logs
    assert (entry["event"], entry["budget_mib"]) == ("gpu_share_exceeded", 12 << 10)


def test_a_share_of_which_another_process_holds_a_part_is_refused_with_one_that_fits(card: Any) -> None:
    card(24, 11)
    with pytest.raises(DoesNotFit) as refused:
        DeviceMemory(GPU, 0.9).check_start()
    message = str(refused.value)
    assert "other processes hold 10.00 GiB" in message
    assert "\n" not in message
    fits = float(message.partition("utilization ")[2].split()[0])
    DeviceMemory(GPU, fits).check_start()
    card(24, 1.5)
    DeviceMemory(GPU, 0.9).check_start()  # a context and a small neighbour lie outside the share


def test_memory_of_an_earlier_engine_in_this_process_is_not_taken_for_weights(card: Any) -> None:
    gpu = card(24)
    gpu.take(3)
    memory = DeviceMemory(GPU, 0.8)
    gpu.take(8)
    memory.loaded()
    assert memory.weights == 8 * GIB
    assert memory.elsewhere == 3 * GIB


def test_running_out_of_memory_becomes_one_line_with_sizes_and_what_would_help(card: Any) -> None:
    gpu = card(24, 2)
    memory = DeviceMemory(GPU, 0.9)

    def load() -> None:
        gpu.take(21)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    guard = memory.guard("x", "all weights", lighter_weights(ModelOptions("x", dtype="float32"), GPU))
    with pytest.raises(DoesNotFit) as refused, guard:
        load()
    assert str(refused.value) == (
        "x does not fit on the GPU: 21.00 GiB weights + 1.00 GiB CUDA and libraries leave no room for all weights in "
        "24.00 GiB (other processes hold 1.00 GiB). What would help: --dtype bfloat16 (half the weights), "
        "--quantize fp8 (about half the weights of bf16), a smaller model or a larger GPU"
    )


@pytest.mark.parametrize(("others", "helps"), [(1, True), (13, False)], ids=["free memory", "held by others"])
def test_a_share_that_is_too_small_is_refused_with_the_share_that_fits_where_it_is_free(
    card: Any, others: float, helps: bool
) -> None:
    gpu = card(24, others)
    memory = DeviceMemory(GPU, 0.5)
    gpu.take(12)
    memory.loaded()
    with pytest.raises(DoesNotFit, match=r"in 12\.00 GiB.* are missing") as refused:
        memory.check_room("x", "a KV block", 1 << 20, ("more",))
    found = re.search(r"--gpu-memory-utilization ([0-9.]+) or higher", str(refused.value))
    assert bool(found) == helps
    if found:
        memory.utilization = float(found[1])
        memory.check_start()
        memory.check_room("x", "a KV block", 1 << 20, ("more",))
        memory.utilization -= 0.01
        assert memory.room < 1 << 20


def test_advice_names_only_options_that_the_gpu_and_the_model_can_use(
    card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(24)
    last = "a smaller model or a larger GPU"

    def helps(capability: tuple[int, int], fused: bool = True, **options: Any) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        *found, end = lighter_weights(ModelOptions("x", **options), GPU, fused=fused)
        assert end == last
        return " ".join(one.partition(" (")[0] for one in found)

    assert helps((8, 9), dtype="float32") == "--dtype bfloat16 --quantize fp8"
    assert helps((8, 0)) == "--quantize int8"
    assert helps((7, 5), dtype="float32") == "--dtype float16 --quantize int8"
    assert helps((7, 0), dtype="float32") == "--dtype float16"
    assert helps((9, 0), quantize="int8") == ""
    assert helps((9, 0), backend="transformers") == ""
    assert helps((9, 0), fused=False) == "", "transformers' code has no --quantize"
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=1, max_model_len=100)
    assert smaller_steps(ModelOptions("x", max_model_len=100), config) == ("--max-num-batched-tokens below 64",)
    assert smaller_steps(ModelOptions("x"), config)[1].startswith("--max-model-len below 100 ")


def test_memory_that_ran_out_elsewhere_is_not_swallowed(card: Any) -> None:
    card(24)
    with pytest.raises(RuntimeError, match="broken"), DeviceMemory(GPU, 0.9).guard("x", "y", ()):
        raise RuntimeError("broken")


# ── the largest step ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rows", "seqs", "length"), [(2048, 128, 8192), (2048, 128, 64), (8, 128, 100), (4096, 4, 512), (1, 1, 1)]
)
def test_the_largest_step_has_all_rows_and_samples_in_as_many_sequences_as_may_run(
    rows: int, seqs: int, length: int
) -> None:
    config = EngineConfig(max_num_batched_tokens=rows, max_num_seqs=seqs, max_model_len=length, block_size=16)
    plan = largest_step(config, 10_000, lambda token, skip: b"")
    assert plan.num_tokens == min(rows, seqs * length)
    assert len(plan.sampling) == min(seqs, rows)
    assert plan.slices[0].seq.num_tokens == length
    for piece in plan.slices:
        assert piece.num_tokens >= 1
        assert piece.start + piece.num_tokens == piece.seq.num_tokens <= length
        assert len(piece.seq.block_table) == math.ceil(piece.seq.num_tokens / 16)


def test_contexts_of_the_largest_step_fit_into_what_the_pool_can_hold() -> None:
    config = EngineConfig(max_model_len=131_072)
    plan = largest_step(config, 300_000, lambda token, skip: b"")
    assert sum(piece.seq.num_tokens for piece in plan.slices) <= 300_000


# ── precision ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bf16_is_refused_by_name_where_a_gpu_only_emulates_it(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card(24)
    asked = []

    def supported(including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (7, 5))
    assert loading._dtype("auto", GPU) == torch.float16
    with pytest.raises(LoadError, match=r"8\.0.*NVIDIA Test has 7\.5.*--dtype float16"):
        loading._dtype("bfloat16", GPU)
    assert loading._dtype("float32", GPU) == torch.float32
    assert asked == [False, False]


# ── the pinned host tier ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("block_bytes", [1, 3, 4096, 737_280, 5_242_880, 1 << 30])
@pytest.mark.parametrize("slots", [0, 1, 2, 7, 100, 1457])
def test_pieces_of_pinned_memory_are_powers_of_two_and_waste_less_than_a_block_each(
    slots: int, block_bytes: int
) -> None:
    sizes = piece_sizes(slots, block_bytes)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert sum(size // block_bytes for size in sizes) >= slots
    assert sum(sizes) - slots * block_bytes < max(1, len(sizes)) * block_bytes
    assert sizes == sorted(sizes, reverse=True)


def test_every_slot_of_a_pinned_tier_is_a_block_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    pieces = host_pieces(45, 96, None, GPU)
    assert len(pieces) == len(made) > 1
    assert all(made)
    slots = [slot for piece in pieces for slot in piece]
    assert [slot.shape for slot in slots] == [(96,)] * 45
    for number, slot in enumerate(slots):
        slot.fill_(number)
    assert [int(slot.sum()) for slot in slots] == [96 * number for number in range(45)]
