"""A line of the input, and OpenAI's body as ours.

What our protocol knows goes through as it is, and the worker judges it. Here is only what the two differ in: values
that mean nothing to the output are dropped, what we cannot do is refused by name.
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
"""`max_tokens` of `/v1/completions` where a request names none: OpenAI's default there."""
LEADING_CHARS = 256
LEADING_IDS = 64
"""Requests without a system prompt go together where so many characters or token ids of their beginning are equal."""

Json = dict[str, Any]


class Unsupported(ValueError):
    """A request that we cannot do; `param` is its key."""

    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(f"{param}: {message}")


_NO_EFFECT = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"safety_identifier", "service_tier", "store", "user"}
)
"""OpenAI's keys that steer accounts, caches and speed, never the output."""


def translate(url: str, body: Mapping[str, Any]) -> Json:
    """The body of a job for OpenAI's body of a request.

    Raises:
        Unsupported: it asks for what we cannot do.
    """
    ours = {key: value for key, value in body.items() if value is not None and key not in _NO_EFFECT}
    for key, check in _CHECKS.items():
        if key in ours and not check(ours.pop(key), ours):
            raise Unsupported(key, _REFUSALS.get(key, "is not supported"))
    return _chat(ours) if url == CHAT else _completion(ours)


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
"""Keys that our protocol lacks, each with whether its value can be left out without a change to the output."""

_REFUSALS = {
    "stream": "a batch has no streams",
    "stream_options": "a batch has no streams",
    "modalities": "text is all there is",
    "best_of": "must equal n: completions are not ranked",
    "tool_choice": "must be auto or none: a call of a tool cannot be forced",
    "parallel_tool_calls": "calls of tools cannot be limited",
}


def _chat(ours: Json) -> Json:
    if "prompt" in ours:
        raise Unsupported("prompt", f"does not belong to {CHAT}")
    if "messages" not in ours:
        raise Unsupported("messages", "is missing")
    return ours


def _completion(ours: Json) -> Json:
    if "messages" in ours:
        raise Unsupported("messages", f"does not belong to {COMPLETIONS}")
    prompt = ours.get("prompt")
    if prompt is None:
        raise Unsupported("prompt", "is missing")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise Unsupported("prompt", "must be a single one; give each of several a line of its own")
        ours["prompt"] = prompt[0]
    ours.setdefault("max_tokens", ours.get("max_completion_tokens", COMPLETION_TOKENS))
    return ours


def prefix_of(body: Mapping[str, Any]) -> int:
    """What requests have in common that should meet in the prefix cache, as 64 bits; 0: nothing worth it.

    It is the tools and leading system messages of a chat, else the first `LEADING_CHARS` characters or `LEADING_IDS`
    token ids.
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
    except TypeError:  # nested too deeply; the worker will refuse it
        return 0
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True) or 1
