"""The interface between the engine and an attention backend.

The KV pool is one byte tensor `[num_blocks, block_bytes]`: a block holds K and V of all layers for `block_size`
tokens, so that moving a block is one copy. Only the backend knows the layout of the bytes in a block.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kernels.ops_reference import rms_norm, rotary


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The shape of the KV cache that a model needs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block; 0: the backend chooses, see the `spec` of the backend."""
    dtype: torch.dtype
    device: torch.device
    num_heads: int = 0
    """Query heads of a layer; 0: unknown before the first queries."""
    batch_invariant: bool = False
    """Whether, on a GPU, the bits of a row must depend on its sequence alone, which takes more time."""


@dataclass(frozen=True, slots=True)
class DeviceArrays:
    """Lengths and block tables of a batch of S sequences: int32, at fixed addresses on the device, as graphs need.

    In a graph the sequences after the real ones are padding: place -1 and context 0.
    """

    tables: Tensor
    """`[places, blocks]`: block ids of every sequence that has a place; entries after its context may be anything."""
    places: Tensor
    """`[S]`: row of `tables` of each sequence."""
    contexts: Tensor
    """`[S]`: number of tokens in the pool after the `write` of this step."""
    starts: Tensor
    """`[S + 1]`: sequence s has the rows `[starts[s], starts[s + 1])`."""
    short: Tensor
    """`[W, 2]`: sequence (-1: padding) and first token of each work item of a short piece, see
    `AttentionBackend.tile_tokens`."""
    long: Tensor
    """`[W, 2]`: sequence and first token of each work item of a longer piece."""
    longest_short: int
    """Upper limit of the contexts of the short pieces, in tokens."""
    longest_long: int
    """Upper limit of the contexts of the longer pieces, in tokens."""


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences and positions of the rows of a batch: T rows (padding included), S sequences.

    Rows from `cu_seqlens[-1]` on are padding: they are neither written nor attended to, and their output is zero.
    """

    slots: Tensor
    """int64 [T]: `block id * block_size + offset` of each row, -1 for padding."""
    positions: Tensor
    """int64 [T]: position of each row in its sequence, 0 for padding."""
    cu_seqlens: tuple[int, ...]
    """S + 1 offsets: rows `[cu[s], cu[s+1])` belong to sequence s. They are its last rows: positions
    `[context_lens[s] - count, context_lens[s])`."""
    context_lens: tuple[int, ...]
    """S: number of tokens of each sequence whose K and V are in the pool after the `write` of this step."""
    block_tables: tuple[tuple[int, ...], ...]
    """S block tables, each with at least the blocks of `context_lens` tokens."""
    arrays: DeviceArrays | None = None
    """Lengths and block tables on the device, if the runner keeps them there."""

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @cached_property
    def num_rows(self) -> int:
        """Number of rows without padding."""
        return self.cu_seqlens[-1]


Ints = tuple[int, ...]


class LazyBatch(AttentionBatch):
    """A batch whose tuples are built when a backend first reads them; a backend that reads `arrays` needs no tuples."""

    def __init__(
        self,
        slots: Tensor,
        positions: Tensor,
        num_rows: int,
        arrays: DeviceArrays,
        lengths: Callable[[], tuple[Ints, Ints]],
        tables: Callable[[], tuple[Ints, ...]],
    ) -> None:
        """Create a batch, see the fields of `AttentionBatch`.

        Args:
            lengths: returns `cu_seqlens` and `context_lens`; called at most once, during the step.
            tables: returns `block_tables`; called at most once, during the step.
        """
        vars(self).update(slots=slots, positions=positions, num_rows=num_rows, arrays=arrays)
        vars(self).update(_make_lengths=lengths, _make_tables=tables)

    @cached_property
    def _lengths(self) -> tuple[Ints, Ints]:
        made: tuple[Ints, Ints] = vars(self)["_make_lengths"]()
        return made

    @cached_property
    def _tables(self) -> tuple[Ints, ...]:
        made: tuple[Ints, ...] = vars(self)["_make_tables"]()
        return made

    @property
    def cu_seqlens(self) -> Ints:
        return self._lengths[0]

    @property
    def context_lens(self) -> Ints:
        return self._lengths[1]

    @property
    def block_tables(self) -> tuple[Ints, ...]:
        return self._tables


class AttentionBackend(ABC):
    """Writes K and V into the pool and attends to them in place.

    Unwritten slots of the pool may hold anything, NaN included, so a backend masks before it multiplies.
    """

    name: ClassVar[str]
    """Name of the backend: that of its module, and its key in the registry."""
    page_multiple: ClassVar[int] = 1
    """`block_size` must be a multiple of this."""
    preferred_block_size: ClassVar[int] = 16
    """The block size if the spec has 0."""
    device_types: ClassVar[tuple[str, ...] | None] = None
    """Types of devices on which the backend runs; None: all."""
    batch_invariant: ClassVar[bool] = False
    """Whether, on a CPU, the bits of a row never depend on the other rows, on chunks or on `block_size`."""
    batch_invariant_on_gpu: ClassVar[bool] = False
    """Whether the same holds on a GPU if `CacheSpec.batch_invariant` is set."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__module__.rpartition(".")[2]

    def __init__(self, spec: CacheSpec) -> None:
        if not self.runs_on(spec.device):
            raise ValueError(f"the {self.name} backend does not run on {spec.device}")
        if not spec.block_size:
            spec = dataclasses.replace(spec, block_size=self.preferred_block_size)
        if spec.block_size % self.page_multiple:
            raise ValueError(f"the {self.name} backend needs a block size that is a multiple of {self.page_multiple}")
        self.spec = spec

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether the backend runs on this type of device."""
        return cls.device_types is None or device.type in cls.device_types

    @property
    def tile_tokens(self) -> tuple[int, int] | None:
        """Tokens of a work item of a short piece, and of a longer piece: a piece is short if one item holds it.

        None: the backend needs no work items in `DeviceArrays`.
        """
        return None

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs can record the launches: all that changes between steps is in `DeviceArrays`."""
        return False

    def reserve(self, max_sequences: int, max_context: int) -> None:  # noqa: B027 - most backends need nothing
        """Allocate the working memory of decodes once, so that a graph can use it and its size is known.

        Args:
            max_sequences: maximum number of sequences of a step.
            max_context: longest context, in tokens.
        """

    def bound(self, rows: int, longest: int, max_context: int) -> int:
        """Return the longest context for which `rows` decodes have the same launches as for `longest` tokens."""
        return max_context

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    @abstractmethod
    def bind(self, pool: Tensor) -> None:
        """Use this pool, uint8 `[num_blocks, block_bytes]`, from now on."""

    @abstractmethod
    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Store `k` and `v` (`[T, kv_heads, head_dim]`) at `batch.slots`; padding rows are skipped."""

    def write_rotated(
        self,
        layer: int,
        qkv: Tensor,
        batch: AttentionBatch,
        *,
        norms: tuple[Tensor, Tensor, float] | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Normalise and rotate queries and keys, and store K and V at `batch.slots`.

        Args:
            qkv: `[T, heads + 2 * kv_heads, head_dim]`, contiguous; may be overwritten.
            norms: weights of the queries' and the keys' RMSNorm, each `[head_dim]`, and its epsilon.
            rotation: cos and sin, each fp32 `[T, head_dim / 2]`.

        Returns:
            The queries, `[T, heads, head_dim]`, for `attend`; the values of padding rows are undefined.
        """
        kv_heads = self.spec.num_kv_heads
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q_weight, k_weight, eps = norms
            q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
        if rotation is not None:
            q, k = rotary(q, *rotation), rotary(k, *rotation)
        self.write(layer, k, v, batch)
        return q.contiguous()

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Compute causal attention of queries over the K and V in the pool.

        Args:
            layer: index of the layer.
            q: `[T, heads, head_dim]`.
            batch: sequences and positions of the rows.
            scale: factor of the scores.
            window: a row at position p attends to positions > p - window; None: to all positions <= p.
            softcap: scores become `softcap * tanh(score / softcap)`.

        Returns:
            `[T, heads, head_dim]` in the dtype of `q`. Rows of padding are zero; with `batch.arrays` undefined.
        """

    @abstractmethod
    def read(self, layer: int, block_table: tuple[int, ...], length: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the first `length` tokens, each `[length, kv_heads, head_dim]`; for tests and tools."""
