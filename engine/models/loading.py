"""Loads a model by its name: files, decoder, weights, tokenizer and generation defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from engine.batch import Model
from engine.config import Backend, Device, Dtype, ModelOptions, Quantize
from engine.models.chat import Tokenizer
from engine.models.config import DecoderConfig, Unsupported
from engine.models.decoder import Decoder
from engine.models.families import decoder_config, fused_config
from engine.models.files import Source, find_model
from engine.models.generation import GenerationDefaults, read_generation
from engine.models.gguf import ROPE_FACTORS
from engine.models.gguf_config import GgufConfig
from engine.models.parameters import build_parameters
from engine.models.precision import check_precision, fused_only, precision_of
from engine.models.rope import inverse_frequencies, position_limit, rotary_table
from engine.models.weights import LoadError, ParameterStore, SafetensorsCheckpoint, check_not_pointer
from engine.sampling.structured import GrammarCompiler
from engine.start.serving import Serving
from kernels.attention.base import AttentionBackend, CacheSpec
from kernels.attention.reference import rows_are_invariant
from kernels.linear import PLAIN, Precision, bucket, row_bucket

if TYPE_CHECKING:  # transformers takes a second to import, and a GGUF file in the fused decoder needs nothing of it
    from transformers import PretrainedConfig

__all__ = ["GenerationDefaults", "LoadError", "LoadedModel", "choose_device", "load_model"]

ASKED_FOR = "--backend transformers"
"""`LoadedModel.implementation_reason` if the operator chose transformers for a model that the fused decoder runs."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class LoadedModel:
    """A model in memory, not yet bound to an attention backend."""

    name: str
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    """Longest sequence, prompt and output, in tokens."""
    vocab_size: int
    num_parameters: int
    tokenizer: Tokenizer
    generation: GenerationDefaults
    batch_invariant: bool
    """Whether the bits of a request do not depend on its batch, as a probe on this machine shows.
    `build_engine` sets it to False if the attention backend does not promise the same."""
    implementation: str
    """`fused` or `transformers`."""
    implementation_reason: str
    """Why the implementation is not `fused`; empty if it is."""
    cache_shape: tuple[int, int, int]
    """Numbers of layers and KV heads, and head size."""
    num_heads: int
    """Query heads of a layer."""
    make: Callable[[AttentionBackend], Model]
    decoder: DecoderConfig | None = None
    """Description of the model in the fused decoder; None in the code of transformers."""
    serving: Serving = field(default_factory=Serving)
    """How the model runs on its device; `build_engine` fills it."""
    bucket: Callable[[int], int] = bucket
    """Rounds a number of rows up to a number that the model computes fast."""
    precision: Precision = PLAIN
    """How the products are computed."""

    def cache_spec(self, block_size: int) -> CacheSpec:
        """Return the spec of the model's KV cache, with blocks of `block_size` tokens."""
        layers, kv_heads, head_dim = self.cache_shape
        shape = layers, kv_heads, head_dim, block_size
        return CacheSpec(*shape, self.dtype, self.device, self.num_heads, self.precision.batch_invariant)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars for this model, created at first use.

        Raises:
            ValueError: the tokenizer cannot be used with grammars, or the model has no end-of-text id.
        """
        return self.tokenizer.grammars(self.generation.eos_token_ids)

    def bind(self, backend: AttentionBackend) -> Model:
        """Return the model, bound to an attention backend."""
        return self.make(backend)


def load_model(options: ModelOptions) -> LoadedModel:
    """Load a model.

    Raises:
        LoadError: the model does not exist or cannot run here; the message says why.
    """
    _check_choices(options)
    device = choose_device(options.device)
    check_precision(options, device)
    dtype = _dtype(options.dtype, device)
    source = find_model(options.model)
    config: PretrainedConfig | GgufConfig
    try:
        if source.gguf is not None:
            config = source.gguf.config()
            decoder = decoder_config(config)
        else:
            config = _read_config(source.directory)
            decoder = fused_config(config)
    except Unsupported as reason:
        if source.gguf is not None:  # transformers could not run a half understood config either
            raise LoadError(f"{source.gguf.path} can't be run: {reason}") from reason
        if options.backend == "fused" or fused_only(options):
            needs = f"{fused_only(options)} needs the fused decoder: " if fused_only(options) else ""
            raise LoadError(f"{needs}the fused decoder can't run {source.name}: {reason}") from reason
        return _load_transformers(source, config, options, dtype, device, str(reason))
    if options.backend == "transformers":
        return _load_transformers(source, config, options, dtype, device, ASKED_FOR)
    return _load_fused(source, config, decoder, options, dtype, device)


def _check_choices(options: ModelOptions) -> None:
    """Raise `LoadError` for a value that no type checker has seen."""
    for name, choices in (("device", Device), ("dtype", Dtype), ("backend", Backend), ("quantize", Quantize)):
        value = getattr(options, name)
        if value not in get_args(choices):
            raise LoadError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")


def _load_fused(
    source: Source,
    config: PretrainedConfig | GgufConfig,
    decoder: DecoderConfig,
    options: ModelOptions,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    max_model_len = _max_model_len(config, options.max_model_len)
    store = ParameterStore(source.gguf or SafetensorsCheckpoint(source.directory), dtype, device)
    precision = precision_of(options)
    parameters = build_parameters(decoder, store, precision)
    tables = _rotary_tables(store, config, decoder, max_model_len, device)
    store.finish()
    tokenizer = _tokenizer(source, decoder.vocab_size)
    return LoadedModel(
        name=source.name,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        vocab_size=decoder.vocab_size,
        num_parameters=store.num_parameters,
        tokenizer=tokenizer,
        generation=_generation(source, config, tokenizer),
        batch_invariant=device.type == "cpu"
        and rows_are_invariant(decoder.head_dim)
        and all(product.invariant for product in parameters.products()),
        implementation="fused",
        implementation_reason="",
        cache_shape=(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim),
        num_heads=decoder.num_heads,
        make=lambda backend: Decoder(decoder, parameters, tables, backend),
        decoder=decoder,
        bucket=row_bucket(dtype) if device.type == "cpu" else bucket,
        precision=precision,
    )


def _rotary_tables(
    store: ParameterStore,
    config: PretrainedConfig | GgufConfig,
    decoder: DecoderConfig,
    max_model_len: int,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Return (cosine, sine) for each of the decoder's `ropes`, on the device."""
    divisors = None
    if len(decoder.ropes) == 1 and store.has(ROPE_FACTORS):
        divisors = store.take(ROPE_FACTORS, (decoder.rotary_dim // 2,), torch.float32).cpu()
    tables = []
    for kind in decoder.ropes:
        try:
            frequencies, factor = inverse_frequencies(config, max_model_len, kind)
        except (ArithmeticError, TypeError, ValueError, LookupError) as error:
            raise LoadError(f"rope settings {config.rope_parameters} can't be used: {error!r}") from error
        if not (frequencies.isfinite() & (frequencies > 0)).all() or not math.isfinite(factor):
            raise LoadError(f"rope settings {config.rope_parameters} give no frequencies")
        if divisors is not None:
            frequencies = frequencies / divisors
        cos, sin = rotary_table(frequencies, factor, max_model_len, decoder.head_dim // 2)
        tables.append((cos.to(device), sin.to(device)))
    return tables


def _load_transformers(
    source: Source,
    config: PretrainedConfig | GgufConfig,
    options: ModelOptions,
    dtype: torch.dtype,
    device: torch.device,
    reason: str,
) -> LoadedModel:
    from engine.models import transformers_backend
    from engine.models.stock import stock_model

    transformers_backend.register()
    theirs = config.pretrained() if isinstance(config, GgufConfig) else config
    try:
        model = stock_model(source, theirs, dtype).to(device).eval()
    except LoadError as error:
        raise LoadError(f"{error}{_neither(reason)}") from error
    theirs = model.config
    max_model_len = _max_model_len(theirs.get_text_config(), options.max_model_len)
    try:
        shape = transformers_backend.cache_shape(theirs)
        transformers_backend.check(model, CacheSpec(*shape, block_size=16, dtype=dtype, device=device))
        transformers_backend.freeze_rope(model, max_model_len)
    except (Unsupported, TypeError, AttributeError, RuntimeError) as error:
        raise LoadError(
            f"{source.name} ({theirs.model_type}) can't run on paged attention: {error}{_neither(reason)}"
        ) from error
    vocab_size = theirs.get_text_config().vocab_size
    tokenizer = _tokenizer(source, vocab_size)
    return LoadedModel(
        name=source.name,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokenizer=tokenizer,
        generation=_generation(source, theirs, tokenizer),
        batch_invariant=False,
        implementation="transformers",
        implementation_reason=reason,
        cache_shape=shape,
        num_heads=theirs.get_text_config().num_attention_heads,
        make=lambda backend: transformers_backend.TransformersModel(model, backend),
    )


def _neither(reason: str) -> str:
    """Return the end of a message: why the fused decoder was not used; empty if the operator chose transformers."""
    return "" if reason == ASKED_FOR else f" (the fused decoder can't run it either: {reason})"


def _read_config(directory: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    check_not_pointer(directory / "config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:
        raise LoadError(f"the config in {directory} can't be read: {error}") from error
    _nest_rope(config.get_text_config())
    return config


def _nest_rope(config: PretrainedConfig) -> None:
    """Move flat rope parameters beside those of layer types to the type `full_attention`, where they belong.

    transformers leaves them flat, where no layer reads them.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = {key: value for key, value in rope.items() if isinstance(value, dict)}
    flat = {key: value for key, value in rope.items() if key not in kinds}
    if not flat or not kinds:
        return
    if set(kinds) != {"full_attention", "sliding_attention"}:
        raise LoadError(f"rope_parameters in the config mix kinds of layers with {', '.join(sorted(flat))}")
    config.rope_parameters = kinds | {"full_attention": kinds["full_attention"] | flat}


def _tokenizer(source: Source, vocab_size: int) -> Tokenizer:
    if source.gguf:
        return Tokenizer(source.gguf.tokenizer(), vocab_size)
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        check_not_pointer(source.directory / name)
    try:
        hf = AutoTokenizer.from_pretrained(str(source.directory), trust_remote_code=False)
    except Exception as error:
        if not (source.directory / "tokenizer.json").exists():
            raise LoadError(
                f"{source.directory} has no tokenizer.json, and no other tokenizer that can be used"
            ) from error
        raise LoadError(f"the tokenizer of {source.name} can't be loaded: {error}") from error
    if not hasattr(hf, "backend_tokenizer"):
        raise LoadError(f"{source.name} has no fast tokenizer (tokenizer.json)")
    return Tokenizer(hf, vocab_size)


def _generation(source: Source, config: PretrainedConfig | GgufConfig, tokenizer: Tokenizer) -> GenerationDefaults:
    """Return all end-of-text ids and the defaults of `generation_config.json`."""
    ends = (config.eos_token_id, config.get_text_config().eos_token_id, tokenizer.eos_token_id)
    return read_generation(None if source.gguf else source.directory, ends)


def _max_model_len(config: PretrainedConfig | GgufConfig, asked: int | None) -> int:
    if getattr(config, "max_position_embeddings", None) is None:
        if asked is None:
            raise LoadError("the model's config has no length limit; set max_model_len")
        return asked
    if config.max_position_embeddings < 1:
        raise LoadError(f"max_position_embeddings in the model's config is {config.max_position_embeddings}")
    if asked is None:
        return int(config.max_position_embeddings)
    limit = position_limit(config)
    if not 1 <= asked <= limit:
        raise LoadError(f"max_model_len = {asked} is out of range: the model is made for 1 to {limit} tokens")
    return asked


def choose_device(name: str) -> torch.device:
    """Return the device that runs the model; `auto` is a GPU where torch finds one.

    Raises:
        LoadError: the device is unknown, or torch finds no GPU.
    """
    if name not in get_args(Device):
        raise LoadError(f"device must be one of {', '.join(get_args(Device))}, not {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError("device cuda is not available: torch finds no GPU")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights; `auto` is bf16 where the device computes in it.

    Raises:
        LoadError: bf16 was requested, and the GPU only emulates it.
    """
    # Below compute capability 8.0 torch emulates bf16 in fp32, more slowly than fp16.
    if device.type == "cuda" and name in ("auto", "bfloat16"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        if name == "bfloat16":
            major, minor = torch.cuda.get_device_capability(device)
            raise LoadError(
                f"dtype bfloat16 needs a GPU of compute capability 8.0 (Ampere) or newer, "
                f"{torch.cuda.get_device_name(device)} has {major}.{minor}: set --dtype float16"
            )
        return torch.float16
    if name in _DTYPES:
        return _DTYPES[name]
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    """Return whether the CPU has bf16 products (AVX512-BF16 or AMX); emulating them is slower than fp32."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16"))
