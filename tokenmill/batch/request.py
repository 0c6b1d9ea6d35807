"""Translates the body of a request in OpenAI's format into the body of a job.

Keys that the protocol has are passed on unchanged, and the worker checks them. This module handles only the
differences: keys that do not change the output are dropped, and keys that are not supported are refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import orjson

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
URLS = (CHAT, COMPLETIONS)

COMPLETION_TOKENS = 16
"""`max_tokens` of a request to `/v1/completions` that names none: OpenAI's default there."""
LEADING_CHARS = 256
LEADING_IDS = 64
"""Requests without a system prompt share a prefix if this many characters or token ids of their beginning are equal."""

Json = dict[str, Any]


class Unsupported(ValueError):
    """A request that tokenmill does not support; `param` is the key."""

    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(f"{param}: {message}")


_NO_EFFECT = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"safety_identifier", "service_tier", "store", "user"}
)
"""OpenAI's keys that steer accounts, caches and speed, never the output."""


def translate(url: str, body: Mapping[str, Any]) -> Json:
    """Return the body of a job for the body of a request in OpenAI's format.

    Args:
        url: one of `URLS`.

    Raises:
        Unsupported: the request asks for something that tokenmill does not support.
    """
    translated = {key: value for key, value in body.items() if value is not None and key not in _NO_EFFECT}
    for key, check in _CHECKS.items():
        if key in translated and not check(translated.pop(key), translated):
            raise Unsupported(key, _REFUSALS.get(key, "is not supported"))
    return _chat(translated) if url == CHAT else _completion(translated)


def _single(best_of: Any, body: Json) -> bool:
    return bool(best_of == body.get("n", 1))


def _tool_choice(choice: Any, body: Json) -> bool:
    if choice == "none":
        body.pop("tools", None)
        return True
    return bool(choice == "auto")


_CHECKS: dict[str, Callable[[Any, Json], bool]] = {
    "stream": lambda value, _: value is False,
    "stream_options": lambda value, _: False,
    "modalities": lambda value, _: value == ["text"],
    "best_of": _single,
    "echo": lambda value, _: value is False,
    "suffix": lambda value, _: value == "",
    "tool_choice": _tool_choice,
    "parallel_tool_calls": lambda value, body: value is True or not body.get("tools"),
}
"""Keys that the protocol lacks, each with a check whether dropping its value leaves the output unchanged."""

_REFUSALS = {
    "stream": "a batch has no streams",
    "stream_options": "a batch has no streams",
    "modalities": "only text is supported",
    "best_of": "must equal n: completions are not ranked",
    "tool_choice": "must be auto or none: a tool call cannot be forced",
    "parallel_tool_calls": "must be true: the number of tool calls cannot be limited",
}


def _chat(translated: Json) -> Json:
    if "prompt" in translated:
        raise Unsupported("prompt", f"does not belong to {CHAT}")
    if "messages" not in translated:
        raise Unsupported("messages", "is missing")
    return translated


def _completion(translated: Json) -> Json:
    if "messages" in translated:
        raise Unsupported("messages", f"does not belong to {COMPLETIONS}")
    prompt = translated.get("prompt")
    if prompt is None:
        raise Unsupported("prompt", "is missing")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise Unsupported("prompt", "must be a single prompt; give each prompt a line of its own")
        translated["prompt"] = prompt[0]
    translated.setdefault("max_tokens", translated.get("max_completion_tokens", COMPLETION_TOKENS))
    return translated


def prefix_of(body: Mapping[str, Any]) -> int:
    """Return a 64-bit hash of the prefix that requests may share in the prefix cache; 0 if it is too short.

    The prefix is the tools and leading system messages of a chat, otherwise the first `LEADING_CHARS` characters or
    `LEADING_IDS` token ids.
    """
    messages, tools = body.get("messages"), body.get("tools")
    first = body.get("prompt")
    if isinstance(messages, list) and messages:
        head = []
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
                break
            head.append(message.get("content"))
        if head or tools:
            return _hash([head, tools])
        first = messages[0].get("content") if isinstance(messages[0], dict) else None
    if isinstance(first, str):
        return _hash(first[:LEADING_CHARS]) if len(first) >= LEADING_CHARS else 0
    if isinstance(first, list):
        return _hash(first[:LEADING_IDS]) if len(first) >= LEADING_IDS else 0
    return 0


def _hash(what: Any) -> int:
    try:
        data = orjson.dumps(what)
    except TypeError:  # nested too deeply; the request is refused later
        return 0
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True) or 1
