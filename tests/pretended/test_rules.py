"""The rules of the pretended GPU: each is broken here, and must be noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.device import Download, upload
from tests.pretend_gpu import Gpu, GpuTensor, pretend_gpu

CUDA = torch.device("cuda")


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretend_gpu() as made:
        yield made


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def whats(gpu: Gpu) -> list[str]:
    return [wait.what for wait in gpu.waited]


# ── sides ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_operations_on_tensors_of_both_sides_fail(gpu: Gpu) -> None:
    here, there = torch.ones(3), torch.ones(3).to("cuda")
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.embedding(torch.tensor([1]), torch.ones(3, 2, device="cuda"))
    with pytest.raises(RuntimeError, match="indices should be"):
        here[torch.zeros(1, dtype=torch.int64, device="cuda")]
    with pytest.raises(RuntimeError):
        there.data_ptr()
    with pytest.raises(TypeError):
        there.numpy()
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a single number may be of the host


def test_results_and_views_have_the_values_of_the_cpu(gpu: Gpu) -> None:
    x = torch.arange(6, device="cuda").view(2, 3)
    x[:, 1] += 10
    y = torch.cat([x.T, x.T]).contiguous()
    y.index_copy_(0, upload([5], torch.int64, CUDA), upload([7, 8], torch.int64, CUDA)[None])
    assert y.tolist() == [[0, 3], [11, 14], [2, 5], [0, 3], [11, 14], [7, 8]]
    assert x.reshape(-1)[1:].tolist() == [11, 2, 3, 14, 5]


def test_uninitialised_memory_of_the_device_is_poison(gpu: Gpu) -> None:
    assert torch.empty(2, device="cuda").isnan().all()
    assert (torch.empty(2, dtype=torch.int32, device="cuda") < -1000).all()
    assert torch.empty(4, dtype=torch.uint8, device="cuda").view(torch.float32).isnan().all()


# ── waits ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_waits_are_counted_and_named(gpu: Gpu) -> None:
    x = pinned(1, 1, 1).to("cuda", non_blocking=True)
    x[torch.zeros(1, dtype=torch.int64, device="cuda")] = 2.0
    x[x > 5.0] = 0.0  # a fill
    assert gpu.waits == 0
    assert x[0].item() == 2.0
    assert bool(x.any())
    assert x.tolist() == [2, 1, 1]
    assert x.cpu().tolist() == [2, 1, 1]
    torch.ones(3).to("cuda")
    torch.ones(3).to("cuda", non_blocking=True)  # from pageable memory
    x[[0, 1]]
    x[x > 1.0]
    x.nonzero()
    torch.cuda.synchronize()
    named = ["item", "is_nonzero", "tolist", "download", "upload", "upload"]
    assert whats(gpu) == [*named, "index on the host", "index by a mask", "nonzero", "synchronize"]


def test_a_wait_names_the_line_of_the_product(gpu: Gpu) -> None:
    download = Download(torch.ones(1, device="cuda"))
    with gpu.watch() as waited:
        download.wait()
    assert [wait.what for wait in waited] == ["event"]
    assert waited[0].where.startswith("kernels/device.py:")


def test_only_an_event_that_is_not_complete_is_a_wait(gpu: Gpu) -> None:
    torch.ones(1, device="cuda")
    event = torch.cuda.Event()
    event.record()
    torch.ones(1, device="cuda")
    for _ in range(2):
        event.synchronize()
    assert whats(gpu) == ["event"]


def test_an_upload_that_converts_or_gathers_on_the_host_is_a_wait(gpu: Gpu) -> None:
    target = torch.zeros(2, device="cuda")
    target.copy_(pinned(1, 2).to(torch.float64).pin_memory(), non_blocking=True)
    target.copy_(pinned(1, 2, 3, 4)[::2], non_blocking=True)
    target[0] = 5.0  # a number that is assigned to a single element is copied, not filled in
    assert whats(gpu) == ["upload"] * 3
    target[:] = 6.0
    assert gpu.waits == 3


# ── late uploads and downloads ────────────────────────────────────────────────────────────────────────────────────────


def test_an_upload_reads_its_source_only_when_the_host_waits(gpu: Gpu) -> None:
    staging, target = pinned(1, 2), torch.zeros(2, device="cuda")
    target.copy_(staging, non_blocking=True)
    doubled = target * 2
    staging[0] = 100.0  # too early
    torch.cuda.synchronize()
    staging[1] = 100.0  # in time
    assert doubled.tolist() == [200, 4]


def test_a_staging_buffer_may_be_reused_after_its_event(gpu: Gpu) -> None:
    staging, target = pinned(1), torch.zeros(1, device="cuda")
    target.copy_(staging, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    kept = target.clone()
    event.synchronize()
    staging[0] = 2.0
    target.copy_(staging, non_blocking=True)
    assert (kept.tolist(), target.tolist()) == ([1], [2])


def test_an_upload_also_sees_what_is_written_through_numpy(gpu: Gpu) -> None:
    staging = torch.empty(2, dtype=torch.int32, pin_memory=True)
    staging.numpy()[:] = 3, 4
    there = staging.to("cuda", non_blocking=True)
    staging.numpy()[0] = 9
    assert there.tolist() == [9, 4]


def test_a_download_holds_poison_until_its_event(gpu: Gpu) -> None:
    target = torch.zeros(2, pin_memory=True)
    target.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    later = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    later.copy_(torch.ones(1, dtype=torch.int64, device="cuda"), non_blocking=True)
    assert target.isnan().all()
    event.synchronize()
    assert target.tolist() == [1, 1]
    assert later.item() < -1000, "the event is older than this copy"
    assert torch.ones(2, device="cuda").to("cpu", non_blocking=True).isnan().all()


def test_an_event_that_was_not_recorded_waits_for_nothing(gpu: Gpu) -> None:
    target = torch.ones(1, device="cuda").to("cpu", non_blocking=True)
    torch.cuda.Event().synchronize()
    assert target.isnan()


def test_a_download_into_pageable_memory_is_a_wait(gpu: Gpu) -> None:
    target = torch.zeros(1)
    target.copy_(torch.ones(1, device="cuda"), non_blocking=True)
    assert (target.item(), whats(gpu)) == (1, ["download"])


def test_a_download_does_not_poison_what_an_earlier_upload_has_yet_to_read(gpu: Gpu) -> None:
    host = pinned(5)
    there = host.to("cuda", non_blocking=True)
    host.copy_(torch.ones(1, device="cuda"), non_blocking=True)
    assert (there.tolist(), host.tolist()) == ([5], [1])


def test_an_event_that_is_queried_completes_after_a_while(gpu: Gpu) -> None:
    target = torch.ones(1, device="cuda").to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    answers = [event.query() for _ in range(4)]
    assert (answers[0], answers[-1], target.item(), gpu.waits) == (False, True, 1, 0)


def test_a_fault_of_an_operation_shows_at_the_next_wait_and_loses_the_device(gpu: Gpu) -> None:
    table = torch.ones(2, 2, device="cuda")
    table.index_select(0, upload([7], torch.int64, CUDA))
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="index_select"):
            torch.cuda.synchronize()


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_work_on_another_stream_without_an_event_is_reported(gpu: Gpu) -> None:
    x = torch.ones(2, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="two streams"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    with pytest.raises(RuntimeError, match="two streams"):
        x + 1
    event = torch.cuda.Event()
    event.record(side)
    event.wait()
    assert (x + 1).tolist() == [3, 3]


# ── graphs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def captured(x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = x * 2 + 1
    return graph, out


def test_a_replay_computes_on_the_captured_tensors(gpu: Gpu) -> None:
    x = torch.zeros(2, device="cuda")
    graph, out = captured(x)
    for value in (1.0, 5.0):
        x.copy_(pinned(value, value), non_blocking=True)
        graph.replay()
        kept = out.clone()
        assert kept.tolist() == [2 * value + 1] * 2
    x = torch.full((2,), 9.0, device="cuda")
    with pytest.raises(RuntimeError, match="freed since its capture"):
        graph.replay()


def test_a_replay_reads_a_replaced_input_from_its_old_place(gpu: Gpu) -> None:
    old = x = torch.zeros(1, device="cuda")
    graph, out = captured(x)
    x = torch.ones(1, device="cuda")
    graph.replay()
    assert (out.tolist(), (x - old).tolist()) == ([1], [1])


def test_what_a_capture_makes_has_no_values_before_the_first_replay(gpu: Gpu) -> None:
    graph, out = captured(torch.zeros(1, device="cuda"))
    with pytest.raises(RuntimeError, match="before the first replay"):
        out + 1
    assert graph.outliving == [(1,)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.bincount(x.long()),
        lambda x: x.copy_(pinned(1, 2), non_blocking=True),
        lambda x: upload([1], torch.int64, CUDA),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: Download(x),
        lambda x: torch.cuda.Event().record(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.Event().query(),
    ],
    ids=["item", "nonzero", "tolist", "cpu", "mask", "bincount", "copy_", "upload", "tensor", "download", "record",
         "synchronize", "query"],
)  # fmt: skip
def test_a_capture_refuses_waits_and_copies(gpu: Gpu, forbidden: object) -> None:
    x = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(torch.AcceleratorError, match="invalidated"),
        torch.cuda.graph(graph),
        pytest.raises(torch.AcceleratorError, match="not permitted"),
    ):
        forbidden(x)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="never captured"):
        graph.replay()
    assert not torch.cuda.is_current_stream_capturing()


def test_memory_that_a_capture_left_uninitialised_is_poison_at_each_replay(gpu: Gpu) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.empty(2, device="cuda")
        out[:1].fill_(1.0)
    for _ in range(2):
        graph.replay()
        assert out[1].isnan()
        out[1].fill_(0.0)


def test_graphs_share_the_memory_of_a_pool(gpu: Gpu) -> None:
    x, pool = torch.ones(1 << 16, device="cuda"), torch.cuda.graph_pool_handle()
    before = torch.cuda.memory_reserved()
    graphs = []
    for _ in range(3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            x.copy_(x * 2)
    assert torch.cuda.memory_reserved() - before == 1 << 18
    graphs.clear()
    assert torch.cuda.memory_reserved() == before


# ── Triton ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def with_triton() -> Iterator[Gpu]:
    with pretend_gpu(stand_ins=True) as made:
        yield made


def test_a_triton_kernel_runs_when_the_queue_gets_to_it(with_triton: Gpu) -> None:
    ops = pytest.importorskip("kernels.triton.ops")
    staging, weight = torch.ones(2, 8).pin_memory(), torch.ones(8, device="cuda")
    out = ops.rms_norm(staging.to("cuda", non_blocking=True), weight, 0.0)
    staging[:, ::2] = 0.0  # too early
    assert out[0].tolist() == pytest.approx([0, 2**0.5] * 4)


def test_a_triton_kernel_refuses_a_tensor_of_the_host(with_triton: Gpu) -> None:
    ops = pytest.importorskip("kernels.triton.ops")
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        ops.rms_norm(torch.ones(2, 8, device="cuda"), torch.ones(8), 0.0)


def test_a_capture_refuses_a_triton_kernel_that_was_not_launched_so_before(with_triton: Gpu) -> None:
    ops = pytest.importorskip("kernels.triton.ops")
    x, weight = torch.ones(2, 8, device="cuda"), torch.ones(8, device="cuda")
    with (
        pytest.raises(torch.AcceleratorError, match="not launched so before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ops.rms_norm(x, weight, 0.0)
    ops.rms_norm(x, weight, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.rms_norm(x, weight, 0.0)
    x[:, ::2].fill_(0.0)
    graph.replay()
    assert out[1].tolist() == pytest.approx([0, 2**0.5] * 4)
    with (
        pytest.raises(torch.AcceleratorError, match="not launched so before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ops.rms_norm(x.half(), weight.half(), 0.0)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_memory_is_that_of_live_tensors() -> None:
    with pretend_gpu(total=1 << 20, others=1 << 16):
        assert torch.cuda.mem_get_info() == ((1 << 20) - (1 << 16), 1 << 20)
        x = torch.empty(1 << 17, dtype=torch.uint8, device="cuda")
        y = x[: 1 << 16]
        z = x.clone()
        del x, z
        assert torch.cuda.memory_allocated() == 1 << 17, "a view keeps the whole"
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 1 << 18
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_reserved() == torch.cuda.max_memory_allocated() == 1 << 17
        del y
        assert torch.cuda.memory_allocated() == 0


def test_more_than_the_device_has_is_out_of_memory() -> None:
    with pretend_gpu(total=1 << 20):
        kept = torch.empty(1 << 19, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.cat([kept, kept])
        del kept
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0)])
def test_the_device_has_the_capability_that_was_asked_for(capability: tuple[int, int]) -> None:
    with pretend_gpu(capability=capability, name="Card"):
        properties = torch.cuda.get_device_properties()
        assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == capability
        assert torch.cuda.get_device_name() == properties.name == "Card"
        assert torch.cuda.is_bf16_supported(including_emulation=False) == (capability >= (8, 0))


def test_a_tensor_of_the_device_shows_no_values(gpu: Gpu) -> None:
    x = torch.ones(2, device="cuda")
    assert isinstance(x, GpuTensor)
    assert repr(x) == "GpuTensor([2], torch.float32)"
