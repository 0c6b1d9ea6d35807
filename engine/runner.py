"""Executes a plan: builds the arrays, runs the forward pass, samples one id for each sequence of `plan.sampling`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch, Model
from engine.sampling.device import DeviceSampler
from engine.sampling.row import Computed, PromptRows, Row, Sampled
from engine.sampling.sampler import Sampler
from engine.scheduling.plan import Plan
from engine.sequence import Sequence
from kernels.attention.base import AttentionBatch
from kernels.device import upload

__all__ = ["Computed", "InFlight", "ModelRunner", "Runner", "prompt_rows", "sampler_row"]


class InFlight(Protocol):
    """A step that was launched."""

    def result(self) -> Sampled:
        """Wait until the step is computed, and return the sampled ids. Called once for each step, in the order of the
        launches, when at most one later step was launched.

        Raises:
            torch.AcceleratorError: the device is lost.
        """
        ...


class Runner(Protocol):
    """The interface that the engine calls to execute a step."""

    def move(self, plan: Plan) -> None:
        """Copy the blocks of the plan: all of `swap_out`, then of `swap_in`, then of `copies`."""
        ...

    def launch(self, plan: Plan) -> InFlight:
        """Start to compute `plan.slices` and to sample one id for each sequence of `plan.sampling`, in order.

        On a GPU this returns before the device has computed. If it raises, the step counts as not computed. The last
        id of a sequence may be pending (`Sequence.num_pending`), if the previous launch sampled it.
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """Discard the state of a sequence that has ended."""
        ...


class _Kept:
    """A launched step whose `result` may be called several times."""

    def __init__(self, drawn: InFlight) -> None:
        self._drawn = drawn
        self._sampled: Sampled | None = None

    def result(self) -> Sampled:
        if self._sampled is None:
            self._sampled = self._drawn.result()
        return self._sampled


class ModelRunner:
    """Runs the fused decoder or a model of transformers on one device.

    It waits for the ids of the last step if the next one needs them before the engine has fetched them.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler | DeviceSampler,
        *,
        pool: Tensor,
        host: Tensor,
        block_size: int,
        eos_token_ids: frozenset[int],
        bucket: Callable[[int], int] = lambda rows: rows,
    ) -> None:
        """Create a runner.

        Args:
            model: bound to an attention backend over `pool`.
            sampler: samples ids from logits.
            pool: device blocks, uint8 `[num_blocks, block_bytes]`.
            host: host tier, uint8 `[host_slots, block_bytes]`.
            block_size: tokens in a block.
            eos_token_ids: ids that `min_tokens` and grammars treat as the end of the text.
            bucket: rounds a number of rows up to a number that the model computes fast and always with the same bits.
        """
        self.pool = pool
        self.host = host
        self.model = model
        self.sampler = sampler
        self.block_size = block_size
        self.eos_token_ids = eos_token_ids
        self.bucket = bucket
        self._last: tuple[tuple[int, ...], InFlight] = (), Computed(Sampled((), ()))
        """Uids of the sequences that the last step sampled, and its result."""

    @torch.inference_mode()
    def move(self, plan: Plan) -> None:
        for pairs, source, target in (
            (plan.swap_out, self.pool, self.host),
            (plan.swap_in, self.host, self.pool),
            (plan.copies, self.pool, self.pool),
        ):
            if pairs:
                _copy(pairs, source, target)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        sampling = plan.sampling
        pending = self._pending(plan)
        logits = self.model.forward(self.batch(plan, pending))
        if pending:
            last = torch.tensor([pending.get(seq.uid, 0) for seq in sampling], dtype=torch.int32, device=logits.device)
            rows = [sampler_row(seq, self.eos_token_ids, i, seq.uid in pending) for i, seq in enumerate(sampling)]
            drawn = self.sampler.sample(logits, rows, last, prompt_rows(plan))
        else:
            rows = [sampler_row(seq, self.eos_token_ids) for seq in sampling]
            drawn = self.sampler.sample(logits, rows, None, prompt_rows(plan))
        step = _Kept(drawn)
        self._last = tuple(seq.uid for seq in sampling), step
        return step

    def _pending(self, plan: Plan) -> dict[int, int]:
        """Return the pending ids of the sequences of a plan, by uid; an id from logits that were not finite is 0."""
        if not any(piece.seq.num_pending for piece in plan.slices):
            return {}
        uids, step = self._last
        ids = {uid: token or 0 for uid, token in zip(uids, step.result().token_ids, strict=True)}
        return {piece.seq.uid: ids[piece.seq.uid] for piece in plan.slices if piece.seq.num_pending}

    def forget(self, seq: Sequence) -> None:
        self.sampler.forget(seq.uid)

    def batch(self, plan: Plan, pending: Mapping[int, int]) -> Batch:
        """Build the arrays of a step; rows from `plan.num_tokens` on are padding.

        Args:
            plan: the step.
            pending: uid → pending id, the last id of the sequence.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens = [0]
        sample_rows: list[int] = []
        prompt_rows: list[int] = []
        size = self.block_size
        for piece in plan.slices:
            seq, end = piece.seq, piece.start + piece.num_tokens
            table = seq.block_table
            ids += seq.tokens[piece.start : end]
            if end > len(seq.tokens):
                ids.append(pending[seq.uid])
            positions += range(piece.start, end)
            slots += [table[p // size] * size + p % size for p in range(piece.start, end)]
            cu_seqlens.append(len(ids))
            sample_rows += [len(ids) - 1] * len(piece.sampling)
            prompt_rows += [cu_seqlens[-2] + position - piece.start for position in piece.prompt_rows]
        rows = self.bucket(len(ids))
        padding = rows - len(ids)
        zeros = [0] * padding
        together = ids + zeros + positions + zeros + slots + [-1] * padding + sample_rows + prompt_rows
        sizes = [rows, rows, rows, len(sample_rows) + len(prompt_rows)]
        packed = upload(together, torch.int64, self.pool.device)
        token_ids, at, places, wanted = torch.split(packed, sizes)
        attention = AttentionBatch(
            slots=places,
            positions=at,
            cu_seqlens=tuple(cu_seqlens),
            context_lens=tuple(piece.start + piece.num_tokens for piece in plan.slices),
            block_tables=tuple(tuple(piece.seq.block_table) for piece in plan.slices),
        )
        return Batch(token_ids=token_ids, attention=attention, sample_rows=wanted)


def sampler_row(seq: Sequence, eos_token_ids: frozenset[int], place: int = 0, pending: bool = False) -> Row:
    """Return the sampler's input for a sequence; for `place` and `pending` see `Row`."""
    return Row(
        uid=seq.uid,
        params=seq.request.params,
        noise_seed=seq.request.noise_seed,
        index=seq.index,
        num_prompt_tokens=seq.num_prompt_tokens,
        tokens=seq.tokens,
        eos_token_ids=eos_token_ids,
        matcher=seq.matcher,
        pending=pending,
        place=place,
    )


def prompt_rows(plan: Plan) -> list[PromptRows]:
    """Return the rows of the plan for which prompt logprobs are requested, by slice."""
    return [
        PromptRows(piece.seq.tokens[rows.start + 1 : rows.stop + 1], piece.seq.request.params.prompt_logprobs or 0)
        for piece in plan.slices
        if (rows := piece.prompt_rows)
    ]


def _copy(pairs: Iterable[tuple[int, int]], source: Tensor, target: Tensor) -> None:
    """Copy blocks, `(source, target)` each, so that all are read before any is written."""
    if source.device == target.device:
        read, write = upload([i for pair in pairs for i in pair], torch.int64, source.device).view(-1, 2).T
        target.index_copy_(0, write, source.index_select(0, read))
        return
    # Sources and targets lie in different tiers. The device executes copies in order, before later kernels.
    for read, write in pairs:
        target[write].copy_(source[read], non_blocking=True)
