"""Checks whole steps on a GPU: CUDA graphs against single launches, and overlapped steps against sequential ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.checks.compare import limit, worst_error
from engine.checks.selfcheck import GpuFails
from engine.config import EngineConfig
from engine.device.runner import DeviceRunner
from engine.engine import Engine
from engine.outputs import EngineBroken
from engine.request import Request, SamplingParams
from engine.sampling.text import TokenBytes
from engine.scheduling.plan import Plan, Slice
from engine.start.profile import piece
from kernels.attention.base import AttentionBatch

_SIZES = (1, 2, 3, 17)
"""Numbers of sequences of the compared steps, some of which need padding; the largest step is compared, too."""
_LONGEST = (900, 3000, 17_000)
"""Longest contexts of the compared steps, in tokens: graphs of every bound are replayed."""
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
_ROUNDINGS = 16
"""Number of roundings by which the logits of a step with padding may differ, since products of more rows may add in
another order."""
_ROWS = 4
"""Rows whose logits are compared with those of a step without padding."""
_TOKENS = 3
"""Minimum number of output ids of a request that is run with overlap and without."""


def check_graphs(runner: DeviceRunner, config: EngineConfig, token_bytes: TokenBytes) -> str | None:
    """Compare the logits of graphs with those of single launches bit by bit; return what differs, or None.

    All slots of the pool outside the contexts hold NaN, so the check finds a graph that reads them.

    Args:
        runner: with graphs; no sequence uses its pool.
        config: limits of the engine.
        token_bytes: maps an id to its bytes.
    """
    room = max(1, runner.pool.shape[0] // 2)
    sizes = [size for size in dict.fromkeys((*_SIZES, config.max_num_seqs)) if size <= min(config.max_num_seqs, room)]
    shared = runner.pool.shape[0] - max(sizes, default=0)
    runner.pool.fill_(0xFF)
    lengths = dict.fromkeys(
        min(length, config.max_model_len, max(1, shared) * config.block_size) for length in _LONGEST
    )
    if shared:
        _write(runner, range(max(lengths)), list(range(shared)))
    for size in sizes:
        for longest in lengths:
            wrong = _compare(runner, _decodes(runner, size, longest, shared, config.block_size, token_bytes))
            if wrong is not None:
                return f"{size} sequences, longest context {longest}: {wrong}"
    return None


def _compare(runner: DeviceRunner, plan: Plan) -> str | None:
    try:
        found = runner.compare_graph(plan)
    finally:
        for seq in plan.sampling:
            runner.forget(seq)
    if found is None:
        return "no graph was captured"
    by_graph, by_launches, without_padding = found
    if not torch.equal(by_graph, by_launches):
        rows = (by_graph != by_launches).any(1)
        return f"the logits of {int(rows.sum())} of {len(rows)} rows differ from those of single launches"
    error = worst_error(by_graph[:_ROWS], without_padding[:_ROWS].cpu())
    allowed = limit(runner.backend.spec.dtype, _ROUNDINGS)
    return None if error <= allowed else f"padding changes the logits by {error:.2g}"


def _decodes(
    runner: DeviceRunner, count: int, longest: int, shared: int, block_size: int, token_bytes: TokenBytes
) -> Plan:
    """Return a step of decodes. The sequences share all blocks except the last block of each, which is its own."""
    runner.pool[shared : shared + count].fill_(0xFF)
    pieces: list[Slice] = []
    for index in range(count):
        length = longest if index == 0 else 1 + index * 37 % min(longest, _LONGEST[0])
        decode = piece(length, 1, block_size, token_bytes, _GREEDY)
        full = (length - 1) // block_size
        decode.seq.tokens[-1] = index % runner.sampler.num_ids
        decode.seq.block_table = [*range(full), shared + index]
        _write(runner, range(full * block_size, length - 1), decode.seq.block_table)
        pieces.append(decode)
    return Plan(tuple(pieces))


@torch.inference_mode()
def _write(runner: DeviceRunner, positions: range, table: list[int]) -> None:
    """Store random K and V at these positions of a block table, in all layers.

    A part has as many tokens as the largest step, whose memory was measured.
    """
    spec, device, most = runner.backend.spec, runner.pool.device, runner.staging.layout.tokens
    for start in range(positions.start, positions.stop, most):
        at = range(start, min(start + most, positions.stop))
        slots = [table[p // spec.block_size] * spec.block_size + p % spec.block_size for p in at]
        batch = AttentionBatch(
            slots=torch.tensor(slots, device=device),
            positions=torch.tensor(at, device=device),
            cu_seqlens=(0, len(at)),
            context_lens=(at.stop,),
            block_tables=(tuple(table),),
        )
        for layer in range(spec.num_layers):
            k, v = torch.randn((2, len(at), spec.num_kv_heads, spec.head_dim), dtype=spec.dtype, device=device)
            runner.backend.write(layer, k, v, batch)


def check_overlap(make: Callable[[bool], Engine], num_ids: int) -> str | None:
    """Run a few requests with overlapped steps and with sequential ones; return how their ids differ, or None.

    Args:
        make: returns an engine, with overlap or without; both may use the same pool.
        num_ids: number of valid ids.

    Raises:
        GpuFails: the sequential steps fail.
    """
    try:
        sequential = _ids(make(False), num_ids)
    except EngineBroken as error:
        raise GpuFails(f"steps fail one after the other as well: {error}") from error
    overlapped = _ids(make(True), num_ids)
    for name, ids in sequential.items():
        if overlapped.get(name) != ids:
            return f"request {name} gave the ids {overlapped.get(name)} instead of {ids}"
    return None


def _ids(engine: Engine, num_ids: int) -> dict[str, list[tuple[int, ...]]]:
    """Run the requests of the check; return their ids. Lengths are fixed, so that the steps are always the same."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "seed": 1}
    kinds = (
        greedy,
        {**greedy, "repetition_penalty": 1.3},
        {**greedy, "temperature": 1.0, "top_p": 0.9, "n": 2},
        {**greedy, "temperature": 0.8, "frequency_penalty": 0.5, "logprobs": 2},
        {**greedy, "min_tokens": 3, "logit_bias": ((1, 2.0),)},
    )
    for index, options in enumerate(kinds):
        prompt = [(31 * index + 7 * i) % num_ids for i in range(3 + 9 * index)]
        tokens = min(_TOKENS + index % 3, engine.config.capacity - len(prompt))
        if tokens > 0:
            engine.add(Request(f"check-{index}", prompt, SamplingParams(max_tokens=tokens, **options)))  # type: ignore[arg-type]
    found: dict[str, list[tuple[int, ...]]] = {}
    while engine.has_work:
        for last in engine.step().finished:
            found[last.request_id] = [choice.token_ids for choice in last.choices]
    return found
