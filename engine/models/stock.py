"""Loads a model through transformers, and checks that each tensor of the checkpoint was used."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from engine.models.files import Source
from engine.models.gguf import ROPE_FACTORS, GgufFile
from engine.models.weights import SAFETENSORS_INDEX, LoadError, SafetensorsCheckpoint


def stock_model(source: Source, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """Load a model through transformers. Our own reader reads GGUF files, since that of transformers silently drops
    keys and tensors that it does not know.

    Raises:
        LoadError: a file is broken, transformers does not know the model or its quantisation, or a tensor is missing,
            unused or of another shape.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    _check_quantisation(config)
    if source.gguf is not None:
        return _from_gguf(source, source.gguf, config, dtype)
    checkpoint = SafetensorsCheckpoint(source.directory)  # its message names a broken file
    if getattr(config, "quantization_config", None) is None:
        checkpoint.check_plain()
    if not _reads_shards_alike(source.directory, checkpoint):
        return _from_tensors({name: checkpoint.load(name, dtype) for name in checkpoint.names()}, source, config, dtype)
    made = partial(AutoModelForCausalLM.from_pretrained, str(source.directory), use_safetensors=True)
    return _load(made, source.name, config, dtype)


def _reads_shards_alike(directory: Path, checkpoint: SafetensorsCheckpoint) -> bool:
    """Return whether transformers reads each tensor from the same file as `checkpoint`.

    It requires a name that it knows and an index with `metadata` beside shards; a tensor that is in two shards is read
    from the later one.
    """
    if checkpoint.files == {directory / "model.safetensors"}:
        return True
    index = directory / SAFETENSORS_INDEX
    return index.exists() and "metadata" in json.loads(index.read_bytes()) and not checkpoint.has_copies()


def _from_tensors(tensors: dict[str, Tensor], source: Source, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """Load a model from tensors instead of files; only the class of the model accepts them."""
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes:
        raise LoadError(f"{source.name}: transformers has no language model of type {config.model_type!r}")
    return _load(partial(classes[type(config)].from_pretrained, None, state_dict=tensors), source.name, config, dtype)


def _load(from_pretrained: Callable[..., Any], name: str, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    try:
        model, info = from_pretrained(
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_keys` names them
        )
    except Exception as error:
        stated = getattr(config, "quantization_config", None)
        how = f" with quantization_config {stated}" if stated else ""
        reason = repr(error) if isinstance(error, KeyError) else str(error)
        raise LoadError(f"transformers can't load {name}{how}: {reason}") from error
    _check_keys(info)
    return model


def _from_gguf(source: Source, file: GgufFile, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    names = file.names()
    divisors = file.load(ROPE_FACTORS) if ROPE_FACTORS in names else None
    tensors = {name: file.load(name, dtype) for name in names - {ROPE_FACTORS}}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = _from_tensors(tensors, source, config, dtype)
    if divisors is not None:
        _divide_frequencies(model, divisors, file)
    return model


def _divide_frequencies(model: torch.nn.Module, divisors: Tensor, file: GgufFile) -> None:
    """Divide the rotary frequencies by the tensor of the file."""
    rotary: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    if len(rotary) != 1 or rotary[0].inv_freq.shape != divisors.shape:
        raise LoadError(f"{file.path}: tensor {ROPE_FACTORS!r} does not fit the model's rotary frequencies")
    rotary[0].inv_freq = rotary[0].original_inv_freq = rotary[0].inv_freq / divisors


def _check_quantisation(config: PretrainedConfig) -> None:
    """Raise `LoadError` for a quantisation that transformers does not know: it only warns, and loads wrong weights."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    for key in ("quantization_config", "compression_config"):
        stated = getattr(config, key, None)
        if stated is None:
            continue
        values: dict[str, Any] = stated if isinstance(stated, dict) else vars(stated)
        method = values.get("quant_method")
        name = str(getattr(method, "value", method))
        if name == "bitsandbytes":  # the table lists bitsandbytes by the number of bits
            name += "_4bit" if values.get("load_in_4bit") else "_8bit" if values.get("load_in_8bit") else ""
        if key != "quantization_config" or name not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            raise LoadError(f"{key} in config.json: quant_method {method!r} is not known")


def _check_keys(info: dict[str, Any]) -> None:
    """Raise `LoadError` if a tensor is missing, unused or of another shape."""
    for kind, said in (
        ("missing_keys", "the checkpoint lacks"),
        ("unexpected_keys", "the checkpoint holds tensors that the model has no place for:"),
        ("mismatched_keys", "tensors have other shapes than the config says:"),
    ):
        if names := sorted(str(name) for name in info.get(kind) or ()):
            raise LoadError(
                f"{said} {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            )
