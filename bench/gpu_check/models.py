"""Models for the check: random ones of known shapes, made on the device, and engines over them."""

from __future__ import annotations

import contextlib
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_check.table import Setup, Skip

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.models.loading import LoadedModel
    from engine.request import Request

MAX_MODEL_LEN = 2048
_POOL_BYTES = 2 << 30


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama model."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    tied: bool

    @property
    def step_weights(self) -> int:
        """Number of weights that a decode step reads: all but the input embedding, of which it reads a few rows."""
        attention = self.hidden * self.dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token, in 16 bits."""
        return self.layers * 2 * self.kv_heads * self.dim * 2


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 32, 64, 2, 2, 1, 16, 320, True),
        Shape("small", 512, 1024, 2, 8, 2, 64, 8192, False),
        Shape("135M", 576, 1536, 30, 9, 3, 64, 49152, True),
        Shape("1B", 2048, 8192, 16, 32, 8, 64, 128256, True),
        Shape("8B", 4096, 14336, 32, 32, 8, 128, 128256, False),
    )
}
"""Two that are quick to check, the demo model's, and those of Llama 3.2 1B and Llama 3.1 8B."""


class RandomTensors:
    """Weights drawn on the device, the same for the same name: norms 1, other tensors normal."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.num_parameters = 0
        self._dtype, self._device = dtype, device
        self._std = 0.2 if shape.name == "tiny" else 0.02

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor; see `engine.models.parameters.Tensors`."""
        made = torch.ones(shape, dtype=self._dtype, device=self._device)
        self.num_parameters += made.numel()
        if "norm" in name:
            return made
        torch.manual_seed(zlib.crc32(name.encode()))
        return made.normal_(std=self._std)

    def has(self, name: str) -> bool:
        return False


class Ids:
    """In place of a tokenizer: each id is one letter of text."""

    eos_token_id = None

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> list[int]:
        return [8 + byte % 200 for byte in text.encode()]

    def token_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
        return bytes([97 + token % 26])


@dataclass(frozen=True)
class Random:
    """A model of random weights. They are drawn while an engine is built, which measures the memory that they take."""

    name: str
    """One of `SHAPES`."""
    dtype: torch.dtype | None = None
    """None: bf16, or fp32 in the reduced form."""
    quantize: str = "none"
    """As in `ModelOptions`."""
    batch_invariant: bool = False
    """As in `ModelOptions`."""


def random_model(setup: Setup, model: Random) -> LoadedModel:
    """Draw the weights of a model on the device, real or pretended.

    Raises:
        Skip: this GPU has no such products.
    """
    from engine.config import ModelOptions
    from engine.models.config import DecoderConfig
    from engine.models.decoder import Decoder
    from engine.models.generation import GenerationDefaults
    from engine.models.loading import LoadedModel
    from engine.models.parameters import build_parameters
    from engine.models.precision import check_precision, precision_of
    from engine.models.rope import rotary_table
    from engine.models.weights import LoadError

    shape, device = SHAPES[model.name], setup.device
    options = ModelOptions(model.name, quantize=cast(Any, model.quantize), batch_invariant=model.batch_invariant)
    try:
        check_precision(options, torch.device(device))
    except LoadError as reason:
        raise Skip(str(reason)) from reason
    precision = precision_of(options)
    dtype = model.dtype or setup.pick(torch.bfloat16, torch.float32)
    longest: int = setup.pick(MAX_MODEL_LEN, 64)
    config = DecoderConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        eps=1e-5,
        windows=(None,) * shape.layers,
        rotary=(0,) * shape.layers,
        rotary_dim=shape.dim,
        attention_scale=shape.dim**-0.5,
        tied=shape.tied,
    )
    tensors = RandomTensors(shape, dtype, device)
    parameters = build_parameters(config, _Tied(tensors) if shape.tied else tensors, precision)
    frequencies = 5e5 ** (-torch.arange(0, shape.dim, 2).float() / shape.dim)
    cos, sin = rotary_table(frequencies, 1.0, longest, shape.dim // 2)
    tables = [(cos.to(device), sin.to(device))]
    return LoadedModel(
        name=f"random {shape.name}",
        dtype=dtype,
        device=torch.device(device),
        max_model_len=longest,
        vocab_size=shape.vocab,
        num_parameters=tensors.num_parameters,
        tokenizer=cast(Any, Ids(shape.vocab)),
        generation=GenerationDefaults(),
        batch_invariant=False,
        implementation="fused",
        implementation_reason="",
        cache_shape=(shape.layers, shape.kv_heads, shape.dim),
        num_heads=shape.heads,
        decoder=config,
        precision=precision,
        make=lambda backend: Decoder(config, parameters, tables, backend),
    )


class _Tied(RandomTensors):
    """The same tensors, with one for both embeddings."""

    def __init__(self, of: RandomTensors) -> None:
        self._of = of

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._of.take(name, shape)

    def has(self, name: str) -> bool:
        return name == "model.embed_tokens.weight"


_SLOW_CHECKS = (
    "engine.checks.selfcheck.SelfCheck.operations",
    "engine.checks.selfcheck.SelfCheck._check_attention",
    "engine.start.prepare.check_graphs",
    "engine.start.prepare.check_overlap",
)
"""Checks at start that take seconds, or a minute where kernels are interpreted; the row `engines:start` runs them."""


def build(
    setup: Setup,
    model: Random | str,
    dtype: str = "auto",
    attention: str = "auto",
    *,
    pool: int | None = _POOL_BYTES,
    checked: bool = False,
    **limits: Any,
) -> tuple[Engine, LoadedModel]:
    """Build an engine over a random model, or over a model in files.

    Args:
        setup: the GPU, real or pretended.
        model: a random model, or what `--model` takes.
        dtype: dtype of a model in files.
        attention: name of the attention backend.
        pool: bytes of the KV pool; None: what `--gpu-memory-utilization` leaves.
        checked: whether the checks at start run.
        limits: fields of `EngineConfig`.

    Raises:
        Skip: the model does not fit on this GPU.
    """
    from engine.build import CacheOptions, build_engine
    from engine.config import EngineConfig, ModelOptions
    from engine.start.device_memory import DoesNotFit

    drawn = Random(model) if isinstance(model, str) else model
    limits.setdefault("max_num_batched_tokens", setup.pick(2048, 16))
    device, kind = cast(Any, setup.device), cast(Any, dtype)
    options = ModelOptions(
        drawn.name,
        device=device,
        dtype=kind,
        max_model_len=setup.pick(1024, 64),
        quantize=cast(Any, drawn.quantize),
        batch_invariant=drawn.batch_invariant,
    )
    cache = CacheOptions(memory_bytes=setup.pick(pool, 4 << 20), attention=attention)
    with contextlib.ExitStack() as stack:
        if not isinstance(model, str):
            stack.enter_context(mock.patch("engine.build.load_model", side_effect=lambda _: random_model(setup, drawn)))
        for name in () if checked else _SLOW_CHECKS:
            stack.enter_context(mock.patch(name, return_value=None))
        try:
            return build_engine(options, EngineConfig(block_size=0, **limits), cache)
        except DoesNotFit as reason:
            raise Skip(str(reason)) from reason


def prompts(count: int, length: int, vocab: int = 300) -> list[list[int]]:
    """Return `count` different prompts of `length` ids."""
    return [[8 + (7 * i + 13 * j + i * j) % (vocab - 8) for j in range(length)] for i in range(count)]


def run(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[list[int]]], float]:
    """Run requests to their end.

    Returns:
        The ids of each choice of each request, and the seconds of all requests together.

    Raises:
        RuntimeError: a request failed.
    """
    begun = time.perf_counter()
    for request in requests:
        engine.add(request)
    ids: dict[str, list[list[int]]] = {}
    while engine.has_work:
        for ended in engine.step().finished:
            if ended.fault is not None:
                raise RuntimeError(f"{ended.request_id}: {ended.fault}: {ended.message}")
            ids[ended.request_id] = [list(choice.token_ids) for choice in ended.choices]
    return ids, time.perf_counter() - begun


def greedy(name: str, prompt: list[int], count: int, **params: Any) -> Request:
    """Return a request for `count` ids, whatever they are; greedy unless `params` say otherwise."""
    from engine.request import Request, SamplingParams

    values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": count, **params}
    return Request(name, prompt, SamplingParams(**values), cache_salt=name)
