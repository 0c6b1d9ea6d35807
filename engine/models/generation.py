"""Reads the sampling defaults in `generation_config.json`, as they are written there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.models.weights import LoadError

FILE = "generation_config.json"

_NO_EFFECT = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"),
        *(
            "do_sample",
            "max_length",
            "max_new_tokens",
            "max_time",
            "trust_remote_code",
            "chat_format",
            "max_window_size",
        ),
        *("use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "disable_compile"),
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
        *("early_stopping", "length_penalty", "diversity_penalty", "low_memory", "constraints", "force_words_ids"),
        *(
            "renormalize_logits",
            "remove_invalid_values",
            "prefill_chunk_size",
            "compile_config",
            "num_assistant_tokens",
        ),
        *("assistant_confidence_threshold", "num_assistant_tokens_schedule", "is_assistant", "use_mtp"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens"),
    }
)
"""Keys that change no text of a request with its own `max_tokens`: ids that are read elsewhere, lengths, the cache,
return values of `generate()`, beams and drafts."""
_OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1,),
    "top_h": (1,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
}
"""Key → values with which it changes no text. For each key, 0, false and empty values change nothing either."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of a model; None: the file has no such key. Values are not checked here; the worker checks them.

    Each field without a description of its own is a key of the file. If `SamplingParams` has a field of the same name,
    the value is the default of that parameter.
    """

    eos_token_ids: frozenset[int] = frozenset()
    """All ids that end a text: those of the config, the generation config and the tokenizer."""
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    stop_strings: Any = None
    suppress_tokens: Any = None
    begin_suppress_tokens: Any = None
    bad_words_ids: Any = None
    not_applied: tuple[str, ...] = ()
    """Keys that may change the text and are not applied."""


_APPLIED = frozenset(field.name for field in fields(GenerationDefaults)) - {"eos_token_ids", "not_applied"}
"""Keys of the file that are fields of `GenerationDefaults`."""


def read_generation(directory: Path | None, ends: Iterable[object]) -> GenerationDefaults:
    """Read `generation_config.json` in the directory of a model, if it is there.

    Args:
        directory: None: there is no directory, as with GGUF.
        ends: end-of-text ids of the config and the tokenizer, each None, an id or a list of ids.

    Raises:
        LoadError: the file is not a JSON object, or an end-of-text id is not an integer.
    """
    suggested = {} if directory is None else _read(directory / FILE)
    found = [end_ids(end, "config.json") for end in ends]
    found.append(end_ids(suggested.get("eos_token_id"), f"{directory}/{FILE}"))
    return GenerationDefaults(
        eos_token_ids=frozenset().union(*found),
        **{key: suggested.get(key) for key in _APPLIED},
        not_applied=tuple(sorted(key for key, value in suggested.items() if _changes_text(key, value))),
    )


def end_ids(value: object, file: str) -> frozenset[int]:
    """Return the ids of an `eos_token_id`, which is None, an id or a list of ids. Negative ids mean "none" and are left
    out.

    Raises:
        LoadError: the value is anything else.
    """
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise LoadError(f"{file}: eos_token_id must be a token id or a list of token ids, not {value!r}")
    return frozenset(i for i in ids if i >= 0)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        suggested = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise LoadError(f"{path} can't be read: {error}") from error
    if not isinstance(suggested, dict):
        raise LoadError(f"{path} can't be read: it is not a JSON object")
    return suggested


def _changes_text(key: str, value: object) -> bool:
    if value is None or key in _APPLIED or key in _NO_EFFECT or key.startswith("_"):
        return False
    return value not in (False, [], {}, *_OFF.get(key, ()))
