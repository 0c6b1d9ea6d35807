"""Gets the runner of a GPU ready: every kernel is compiled, graphs are captured and checked, overlap is checked."""

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
    """Run steps without requests, capture graphs, and compare them and overlapped steps with what they replace.

    Args:
        runner: over the pool that will be used; no sequence uses it yet.
        config: the engine's.
        loaded: the model; its `serving` gets what is found.
        checks: notes what falls back.
        make: returns an engine over the runner, with overlap or without.
        graphs: whether the operator wants CUDA graphs.

    Returns:
        Whether steps may overlap: `config.overlap`, unless the check failed.

    Raises:
        engine.models.loading.LoadError: the operator wants batch invariance, and the products don't show it.
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
    """Set `LoadedModel.batch_invariant`: only where it was requested, and test runs of products and norms show it.

    The attention has shown it in its own check.
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
    """Capture graphs; discard them if they compute anything else than single launches."""
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
    """Capture the graphs with most rows alone, to measure them.

    Returns:
        The number of graphs that were captured, and the number of graphs that `DeviceRunner.capture` captures.
    """
    planned = runner.graphs.planned
    runner.graphs.sizes = runner.graphs.sizes[-1:]
    runner.capture()
    return runner.graphs.count, planned
