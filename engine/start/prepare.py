"""Prepares the runner of a GPU: compiles every kernel, captures and checks graphs, checks overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.checks.selfcheck import SelfCheck, attempt
from engine.checks.steps import check_graphs, check_overlap
from engine.config import EngineConfig
from engine.device.runner import DeviceRunner
from engine.engine import Engine
from engine.models.invariance import shows_invariance
from engine.models.loading import LoadedModel, LoadError
from engine.start.profile import warm_up

OFF = "--cuda-graphs off"


def prepare(
    runner: DeviceRunner,
    config: EngineConfig,
    loaded: LoadedModel,
    checks: SelfCheck,
    make: Callable[[bool], Engine],
    *,
    graphs: bool,
) -> bool:
    """Warm up, capture graphs and compare them with single launches, and compare overlapped steps with sequential ones.

    Args:
        runner: over the pool that will be used; no sequence uses it yet.
        config: limits of the engine.
        loaded: the model; the number of graphs is written to its `serving`.
        checks: records the parts that are replaced.
        make: returns an engine over the runner, with overlap or without.
        graphs: whether the operator wants CUDA graphs.

    Returns:
        Whether steps may overlap: `config.overlap`, unless the check failed.

    Raises:
        engine.models.loading.LoadError: `--batch-invariant` is set, and the bits of products depend on the batch.
        engine.checks.selfcheck.GpuFails: the device was lost.
    """
    token_bytes = loaded.tokenizer.token_bytes
    _show_invariance(runner, loaded)
    runner.pool[:1].zero_()  # the block that these steps read
    experts = loaded.decoder is not None and loaded.decoder.experts is not None
    warm_up(runner, config, config.num_blocks * config.block_size, token_bytes, experts)
    if graphs:
        _capture(runner, config, loaded, checks)
    else:
        runner.graphs.disable(OFF)
    serving = loaded.serving
    serving.graphs, serving.graphs_reason = runner.graphs.count, runner.graphs.reason or ""
    overlap = bool(config.overlap)
    if overlap:
        wrong = attempt("overlap", partial(check_overlap, make, loaded.tokenizer.size))
        if wrong is not None:
            overlap = False
            checks.replace("overlap", wrong, "one step after the other")
    checks.finish()
    return overlap


def _show_invariance(runner: DeviceRunner, loaded: LoadedModel) -> None:
    """Set `LoadedModel.batch_invariant`: True if it was requested, and test runs of products and norms show it.

    The check of the attention has shown it for the attention.
    """
    loaded.batch_invariant = False
    if not loaded.precision.batch_invariant:
        return
    if not shows_invariance(runner.model):
        raise LoadError(
            "--batch-invariant: products or norms give a row other bits in other batches on this GPU: "
            "leave the option out, or try another version of Triton"
        )
    loaded.batch_invariant = True


def _capture(runner: DeviceRunner, config: EngineConfig, loaded: LoadedModel, checks: SelfCheck) -> None:
    """Capture graphs; discard them if their logits are not those of single launches."""
    can = runner.backend.captures
    runner.capture()
    graphs = runner.graphs
    if graphs.reason is None:
        wrong = attempt("graphs", partial(check_graphs, runner, config, loaded.tokenizer.token_bytes))
        if wrong is not None:
            graphs.disable(wrong)
    if graphs.reason is not None and can:
        checks.replace("graphs", graphs.reason, "single launches")


def capture_largest(runner: DeviceRunner) -> tuple[int, int]:
    """Capture only the graphs with the most rows, to measure their memory.

    Returns:
        The number of graphs that were captured, and the number of graphs that `DeviceRunner.capture` captures.
    """
    planned = runner.graphs.planned
    runner.graphs.sizes = runner.graphs.sizes[-1:]
    runner.capture()
    return runner.graphs.count, planned
