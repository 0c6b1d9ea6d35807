"""Executes plans on a GPU without waiting for it: one upload, the forward pass, sampling.

A launch returns when all work is queued on the device. The ids that a step samples stay on the device, in
`Staging.last`, so that the next step can be launched before the host knows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, Model
from engine.device.graphs import Graphs
from engine.device.host_tier import HostTier, copy_blocks
from engine.device.places import BlockTables, Ints, Places, ramps
from engine.device.staging import ID, POSITION, SLOT, SOURCE, Layout, Pinned, Staging
from engine.runner import InFlight, prompt_rows, sampler_row
from engine.sampling.device import DeviceSampler
from engine.sampling.row import Row
from engine.sampling.sampler import Sampler
from engine.scheduling.plan import Plan, Slice
from engine.sequence import Sequence
from kernels.attention.base import AttentionBackend, DeviceArrays, LazyBatch
from kernels.device import send

_LEAST_TOKENS = 64
"""Minimum number of rows for which buffers have room; the canary's prompt may exceed a small token budget."""
_CHANGES = 4096
"""Maximum number of changed block table entries in the upload of a step; if there are more, they are uploaded apart."""
_EXTRAS = 5
"""Number of arrays in the section `extra` of the staging buffer."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan as arrays on the host: S sequences, T rows, R sampled rows, P rows with logprobs of prompt ids."""

    slices: Seq[Slice]
    seqs: Seq[Sequence]
    places: Ints
    """`[S]`."""
    starts: Ints
    """`[S]`: first token to compute."""
    counts: Ints
    """`[S]`: number of tokens to compute."""
    offsets: Ints
    """`[S + 1]`: first row of each sequence, and T."""
    pending: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """`[S]`: whether the last of these tokens is a pending id, which the host does not know."""
    sampling: Seq[Sequence]
    """R sequences."""
    wanted: Ints
    """`[R + P]`: rows whose logits are needed."""
    sampling_places: Ints
    """`[R]`."""
    sampling_pending: Seq[bool]
    """R flags: whether the last token of the sequence is a pending id."""

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one row, and no logprobs of prompt ids are requested."""
        return self.num_rows == len(self.seqs) and len(self.wanted) == len(self.sampling)


class DeviceRunner:
    """Runs a model on one GPU (in tests also on the CPU); implements `engine.runner.Runner`."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler | DeviceSampler,
        *,
        backend: AttentionBackend,
        pool: Tensor,
        host: HostTier,
        eos_token_ids: frozenset[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        """Create a runner; `capture` records its graphs.

        Args:
            model: bound to `backend`.
            sampler: samples ids from logits.
            backend: bound to `pool`.
            pool: device blocks, uint8 `[num_blocks, block_bytes]`.
            host: host tier.
            eos_token_ids: ids that `min_tokens` and grammars treat as the end of the text.
            max_num_seqs: maximum number of running sequences.
            max_num_batched_tokens: maximum number of tokens of a step.
            max_model_len: longest sequence, in tokens.
        """
        self.model, self.sampler, self.backend = model, sampler, backend
        self.pool, self.host = pool, host
        self.block_size = backend.spec.block_size
        self.eos_token_ids = eos_token_ids
        self._max_context = -(-max_model_len // self.block_size) * self.block_size
        tokens = max(max_num_batched_tokens, max_num_seqs, _LEAST_TOKENS)
        tiles = backend.tile_tokens
        items = 0 if tiles is None else tokens // tiles[1] + max_num_seqs
        extra = tokens + 2 * max_num_seqs + 2 * items + 2 * _CHANGES + 4 * _EXTRAS
        # One place more than sequences can run, for the canary, so that no running sequence loses its place.
        self.places = Places(max_num_seqs + 1, self._lost_place)
        layout = Layout(max_num_seqs + 1, max_num_seqs, tokens, extra)
        self.staging = Staging(layout, pool.device)
        self._own_ids = layout.own_ids()
        self._first_items = np.zeros((max_num_seqs, 2), np.int32)
        self._first_items[:, 0] = np.arange(max_num_seqs)
        self.block_tables = BlockTables(layout.places, self._max_context // self.block_size, self.block_size)
        self._tables = torch.zeros(self.block_tables.entries.shape, dtype=torch.int32, device=pool.device)
        self._all_rows = torch.arange(max_num_seqs, device=pool.device)
        self._rows: dict[int, tuple[Row, Row]] = {}
        """`Sequence.uid` → the sampler's input for the sequence without a pending id, and with one."""
        backend.reserve(max_num_seqs, self._max_context)
        self.graphs = Graphs(self._padded, backend, max_num_seqs, self._max_context)

    # ── the interface of the engine ───────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def move(self, plan: Plan) -> None:
        if plan.swap_out:
            self.host.copy_out(self.pool, plan.swap_out)
        if plan.swap_in:
            self.host.copy_in(self.pool, plan.swap_in)
        if plan.copies:
            copy_blocks(self.pool, plan.copies)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        try:
            step = self._read(plan)
            logits, sampling_places = self._forward(step)
            rows = self._sampler_rows(step)
            last = self.staging.last
            prompts = prompt_rows(plan) if len(step.wanted) > len(rows) else ()
            drawn = self.sampler.sample(logits, rows, last, prompts)
            if rows:
                last.index_copy_(0, sampling_places, drawn.ids.to(last.device).clamp_min(0))
            return drawn
        except BaseException:
            self.block_tables.forget()
            # Triton and cuBLAS report that the device is lost as a RuntimeError; this wait, as an AcceleratorError.
            if self.pool.device.type == "cuda":
                torch.cuda.synchronize(self.pool.device)
            raise

    def forget(self, seq: Sequence) -> None:
        self.places.forget(seq.uid)
        self.sampler.forget(seq.uid)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record CUDA graphs of decode steps. No step may be in flight.

        If a capture fails, all steps run without graphs; `graphs.reason` says why.
        """
        if self.backend.tile_tokens is None or not self.backend.captures:
            self.graphs.disable(f"the {self.backend.name} attention backend cannot be captured")
            return
        pinned = self.staging.next()
        _pad(pinned, 0, self.graphs.largest, 0, self._own_ids)
        self.staging.send(pinned, self.graphs.largest, [np.zeros(0, np.int32)])
        self.graphs.capture(self.pool.device)

    @torch.inference_mode()
    def compare_graph(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute a decode step by its graph, by single launches with the same padding, and without padding.

        Returns:
            The three logits, `[R, vocab]` each; None if there is no graph for the step.
        """
        step = self._read(plan)
        graph = self.graphs.find(step.num_rows, int((step.starts + step.counts).max()))
        if graph is None:
            return None
        by_graph = self._forward(step)[0].clone()
        by_launches = self._padded(graph.rows, graph.longest)[: step.num_rows]
        self.graphs.active = False
        try:
            return by_graph, by_launches, self._forward(step)[0]
        finally:
            self.graphs.active = True

    def _lost_place(self, uid: int) -> None:
        self._rows.pop(uid, None)

    # ── from a plan to arrays ─────────────────────────────────────────────────────────────────────────────────────

    def _read(self, plan: Plan) -> _Step:
        slices = plan.slices
        seqs, first, numbers, samples, forks, *_ = zip(*slices, strict=True)
        plain = all(samples) and not any(forks)
        sampling = seqs if plain else plan.sampling
        starts, counts = np.array(first, np.int32), np.array(numbers, np.int32)
        offsets = np.zeros(len(slices) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        places = np.array(self.places.of(seqs if plain else [*seqs, *sampling]), np.int32)
        pending = starts + counts > np.array([len(seq.tokens) for seq in seqs], np.int32)
        wanted, flags = offsets[1:] - 1, pending
        if not plain:
            repeats = [len(piece.sampling) for piece in slices]
            wanted, flags = np.repeat(wanted, repeats), np.repeat(flags, repeats)
        if not plain or offsets[-1] > len(seqs):  # a sampling row is the last of the prompt or after it
            wanted = np.concatenate([wanted, *_prompt_rows(slices, offsets)])
        return _Step(
            slices,
            seqs,
            places[: len(seqs)],
            starts,
            counts,
            offsets,
            pending,
            sampling,
            wanted,
            places if plain else places[len(seqs) :],
            flags.tolist(),
        )

    def _forward(self, step: _Step) -> tuple[Tensor, Tensor]:
        """Upload a step and run the model; return the logits of the wanted rows and the places of the sampled ones."""
        if step.num_rows > self.staging.layout.tokens or len(step.seqs) > self.staging.layout.sequences:
            raise ValueError(f"a step of {step.num_rows} tokens is larger than the runner's buffers")
        longest = int((step.starts + step.counts).max())
        graph = self.graphs.find(step.num_rows, longest) if step.decodes else None
        rows = step.num_rows if graph is None else graph.rows
        at, values = self.block_tables.update(step.seqs, step.places, step.starts, step.counts)
        pinned = self.staging.next()
        self._fill(pinned, step)
        short, long = self._work(step)
        pinned.sections.short[: len(short)] = short
        _pad(pinned, step.num_rows, rows, len(short), self._own_ids)
        fits = len(at) <= _CHANGES
        extra = [step.wanted, step.sampling_places, *((at, values) if fits else (at[:0], values[:0])), long]
        wanted, places, *changes, items = self.staging.send(pinned, rows, extra)
        if not fits:
            changes = [send(array, self.pool.device) for array in (at, values)]
        if len(at):
            self._tables.view(-1).index_copy_(0, changes[0].to(torch.int64), changes[1])
        if graph is not None:
            logits = graph.replay()
            if len(step.wanted) != step.num_rows:
                return logits.index_select(0, wanted), places.to(torch.int64)
            return logits[: step.num_rows], places.to(torch.int64)
        batch = self._batch(step, len(short), items.view(-1, 2), wanted.to(torch.int64))
        return self.model.forward(batch), places.to(torch.int64)

    def _fill(self, pinned: Pinned, step: _Step) -> None:
        """Write lengths, places and rows of a step into a pinned buffer."""
        host, used, sequences = pinned.sections, step.num_rows, len(step.seqs)
        host.contexts[:sequences] = step.starts + step.counts
        host.starts[: sequences + 1] = step.offsets
        host.places[:sequences] = step.places
        sources = self._own_ids[:used]
        positions, places = step.starts, step.places
        if used != sequences:
            positions, places = ramps(step.starts, step.counts), np.repeat(step.places, step.counts)
        if step.pending.any():
            sources = sources.copy()
            sources[step.offsets[1:][step.pending] - 1] = step.places[step.pending]
        target, size = host.rows[:used], self.block_size
        target[:, ID], target[:, POSITION], target[:, SOURCE] = _ids(step), positions, sources
        target[:, SLOT] = self.block_tables.entries[places, positions // size] * size + positions % size

    def _work(self, step: _Step) -> tuple[Ints, Ints]:
        """Return the work items (sequence, first token) of short and of longer pieces, `[W, 2]` each."""
        tiles = self.backend.tile_tokens
        if tiles is None:
            return _NO_WORK, _NO_WORK
        first = self._first_items[: len(step.seqs)]
        if step.num_rows == len(step.seqs):
            return first, _NO_WORK
        is_long = step.counts > tiles[0]
        items = -(-step.counts[is_long] // tiles[1])
        long = np.stack([np.repeat(first[is_long, 0], items), ramps(np.zeros_like(items), items) * tiles[1]], 1)
        return first[~is_long], long

    # ── from arrays on the device to a batch ──────────────────────────────────────────────────────────────────────

    def _batch(self, step: _Step, num_short: int, long: Tensor, wanted: Tensor) -> Batch:
        """Return the batch of a step without padding."""
        sequences, contexts = len(step.seqs), step.starts + step.counts
        is_long = step.counts > (self.backend.tile_tokens or (0, 0))[0]
        device = self.staging.device
        arrays = DeviceArrays(
            self._tables,
            device.places[:sequences],
            device.contexts[:sequences],
            device.starts[: sequences + 1],
            device.short[:num_short],
            long,
            int(contexts.max(where=~is_long, initial=0)),
            int(contexts.max(where=is_long, initial=0)),
        )
        return self._joined(step, step.num_rows, arrays, wanted, bool(step.pending.any()))

    def _padded(self, rows: int, longest: int) -> Tensor:
        """Compute a decode step from the arrays in the device's buffers; graphs record this function.

        Args:
            rows: number of rows and sequences, padding included.
            longest: at least the longest context.

        Returns:
            The logits of all rows.
        """
        device = self.staging.device
        arrays = DeviceArrays(
            self._tables,
            device.places[:rows],
            device.contexts[:rows],
            device.starts[: rows + 1],
            device.short[:rows],
            device.short[:0],
            longest,
            0,
        )
        return self.model.forward(self._joined(None, rows, arrays, self._all_rows[:rows], True))

    def _joined(self, step: _Step | None, rows: int, arrays: DeviceArrays, wanted: Tensor, pending: bool) -> Batch:
        columns = self.staging.device.rows[:rows].T.to(torch.int64, memory_format=torch.contiguous_format)
        ids = columns[ID]
        if pending:
            ids = self.staging.buffer.index_select(0, columns[SOURCE]).to(torch.int64)
        lengths, tables = partial(_lengths, step), partial(_block_tables, step)
        return Batch(ids, LazyBatch(columns[SLOT], columns[POSITION], rows, arrays, lengths, tables), wanted)

    def _sampler_rows(self, step: _Step) -> list[Row]:
        made = self._rows
        for seq, place in zip(step.sampling, step.sampling_places.tolist(), strict=True):
            if seq.uid not in made:
                plain, pending = (sampler_row(seq, self.eos_token_ids, place, flag) for flag in (False, True))
                made[seq.uid] = plain, pending
        return [made[seq.uid][flag] for seq, flag in zip(step.sampling, step.sampling_pending, strict=True)]


_NO_WORK = np.zeros((0, 2), np.int32)
_PADDING_ITEM = np.array([-1, 0], np.int32)
_PADDING_ROW = np.array([0, 0, -1, 0], np.int32)


def _ids(step: _Step) -> Ints | list[int]:
    """Return the input ids of a step, `[T]`; 0 for a pending id."""
    if step.num_rows == len(step.seqs):
        tokens = [seq.tokens for seq in step.seqs]
        return [ids[at] if at < len(ids) else 0 for ids, at in zip(tokens, step.starts.tolist(), strict=True)]
    ids = np.zeros(step.num_rows, np.int32)
    for piece, row in zip(step.slices, step.offsets.tolist(), strict=False):
        known = piece.seq.tokens[piece.start : piece.start + piece.num_tokens]
        ids[row : row + len(known)] = known
    return ids


def _prompt_rows(slices: Seq[Slice], offsets: Ints) -> Iterator[Ints]:
    """Yield the rows of each slice whose logits give logprobs of prompt ids."""
    for piece, row in zip(slices, offsets.tolist(), strict=False):
        positions = piece.prompt_rows
        if positions:
            first = row + positions.start - piece.start
            yield np.arange(first, first + len(positions), dtype=np.int32)


def _pad(pinned: Pinned, used: int, rows: int, items: int, own_ids: Ints) -> None:
    """Write padding after the `used` rows and `items` work items of a decode step, up to the `rows` rows of a graph."""
    host = pinned.sections
    if rows > used:
        host.contexts[used:rows] = 0
        host.starts[used + 1 : rows + 1] = used
        host.places[used:rows] = -1
        host.short[items:rows] = _PADDING_ITEM
        host.rows[used:rows] = _PADDING_ROW
        host.rows[used:rows, SOURCE] = own_ids[used:rows]


def _lengths(step: _Step | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `cu_seqlens` and `context_lens` of a step; a captured step (None) has none on the host."""
    if step is None:
        raise AttributeError("a captured step has no lengths on the host")
    return tuple(step.offsets.tolist()), tuple((step.starts + step.counts).tolist())


def _block_tables(step: _Step | None) -> tuple[tuple[int, ...], ...]:
    if step is None:
        raise AttributeError("a captured step has no block tables on the host")
    return tuple(tuple(seq.block_table) for seq in step.seqs)
