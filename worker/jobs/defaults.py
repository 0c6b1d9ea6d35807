"""Default sampling parameters of a job: the values of the model's generation config that a body could set as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import structlog

from engine.request import Bans, SamplingParams
from tokenmill.protocol.body import check_value
from tokenmill.protocol.errors import ErrorCode, JobError

log = structlog.get_logger()

_FILE = "generation_config.json"
_SAMPLING = tuple(param.name for param in fields(SamplingParams))
"""Parameters whose default the generation config may set, if `GenerationDefaults` has a field of the same name."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for jobs whose body does not set them."""

    sampling: dict[str, Any] = field(default_factory=dict)
    """Key of the body → value; keys that are missing have OpenAI's default."""
    stop: tuple[str, ...] = ()
    """Stop strings of every job, in addition to its own."""
    bans: Bans | None = None
    """Token ids that are never sampled."""

    @classmethod
    def of(cls, generation: Any) -> Defaults:
        """Check the model's values by the rules of a body. Values that no body could have are ignored with a warning.

        Args:
            generation: `engine.models.generation.GenerationDefaults`.
        """
        sampling = {key: _checked(generation, key, key) for key in _SAMPLING}
        stop = _checked(generation, "stop_strings", "stop") or ()
        words = _words(generation)
        bans = Bans(
            always=frozenset(_checked(generation, "suppress_tokens", "stop_token_ids") or ())
            | {word[0] for word in words if len(word) == 1},
            first=frozenset(_checked(generation, "begin_suppress_tokens", "stop_token_ids") or ()),
            sequences=tuple(word for word in words if len(word) > 1),
        )
        for key in getattr(generation, "not_applied", ()):
            log.warning("generation_config_ignored", file=_FILE, key=key, reason="this worker does not support the key")
        return cls(
            {key: value for key, value in sampling.items() if value is not None},
            (stop,) if isinstance(stop, str) else tuple(stop),
            bans if bans != Bans() else None,
        )


def _words(generation: Any) -> list[tuple[int, ...]]:
    """Return the token sequences that must not be generated; an end-of-text id alone is ignored, as in transformers."""

    def check(value: Any) -> list[tuple[int, ...]]:
        if not isinstance(value, list):
            raise JobError(ErrorCode.INVALID_REQUEST, "bad_words_ids: must be a list of lists of token ids")
        return [tuple(check_value("stop_token_ids", word)) for word in value]

    ends: frozenset[int] = getattr(generation, "eos_token_ids", frozenset())
    words = _tried(generation, "bad_words_ids", check) or []
    return [word for word in words if word and not (len(word) == 1 and word[0] in ends)]


def _checked(generation: Any, key: str, rule: str) -> Any:
    """Return the value of a key, checked like the key `rule` of a body; None if it is missing or wrong."""
    return _tried(generation, key, lambda value: check_value(rule, value))


def _tried(generation: Any, key: str, check: Callable[[Any], Any]) -> Any:
    value = getattr(generation, key, None)
    if value is None:
        return None
    try:
        return check(value)
    except JobError as error:
        must = error.message.partition(": ")[2]
        log.warning("generation_config_ignored", file=_FILE, key=key, value=repr(value)[:80], reason=must)
        return None
