"""Translates the body of a request in OpenAI's format into the body of a job.

    options = streaming(body)                        # Streaming(on, include_usage)
    job_body = translate(CHAT, body, stream=True)    # raises Unsupported, which is an ApiError

Keys that the protocol has are passed on unchanged, and the worker checks them. This module handles only the
differences: keys that do not change the output are dropped, and keys that are not supported are refused by name.
A null means the same as an absent key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokenmill.openai.errors import ApiError
from tokenmill.protocol.errors import ErrorCode, clean

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
URLS = (CHAT, COMPLETIONS)
"""URLs that generate text; batch files may hold these."""

COMPLETION_TOKENS = 16
"""`max_tokens` of a request to `/v1/completions` that names none: OpenAI's default there."""

Json = dict[str, Any]


class Unsupported(ApiError):
    """A request that tokenmill does not support; `param` is the key."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(400, f"{param}: {message}", code=ErrorCode.INVALID_REQUEST.value, param=param)


class Streaming(NamedTuple):
    """How the answer of a request is sent."""

    on: bool
    include_usage: bool
    """Whether the last chunk holds the usage."""


_NO_EFFECT = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"safety_identifier", "service_tier", "store", "user"}
)
"""OpenAI's keys that steer accounts, caches and speed, never the output."""
_STREAM_KEYS = ("stream", "stream_options")
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")
"""Options of a stream, each a boolean. Padding against eavesdroppers (`include_obfuscation`) is never sent."""


def streaming(body: Mapping[str, Any]) -> Streaming:
    """Return how the answer of a request in OpenAI's format is to be sent.

    Raises:
        Unsupported: `stream` or `stream_options` has a wrong value.
    """
    on = body.get("stream")
    if not isinstance(on, bool | None):
        raise Unsupported("stream", "must be true or false")
    options = body.get("stream_options")
    if options is None:
        return Streaming(bool(on), False)
    if not on:
        raise Unsupported("stream_options", "needs stream: true")
    if not isinstance(options, dict):
        raise Unsupported("stream_options", "must be an object")
    for key, value in options.items():
        if value is not None and key not in _STREAM_OPTIONS:
            raise Unsupported("stream_options", f"unknown key {clean(key, 64)!r}")
        if not isinstance(value, bool | None):
            raise Unsupported("stream_options", f"{key} must be true or false")
    return Streaming(True, bool(options.get("include_usage")))


def translate(url: str, body: Mapping[str, Any], *, stream: bool = False) -> Json:
    """Return the body of a job for the body of a request in OpenAI's format.

    Args:
        url: one of `URLS`, or `EMBEDDINGS`.
        stream: whether the answer may be a stream. The caller then reads `stream` and `stream_options` itself, with
            `streaming`; otherwise they are refused.

    Raises:
        Unsupported: the request asks for something that tokenmill does not support.
    """
    dropped = (*_NO_EFFECT, *_STREAM_KEYS) if stream and url != EMBEDDINGS else _NO_EFFECT
    translated = {key: value for key, value in body.items() if value is not None and key not in dropped}
    for key, check in _CHECKS.items():
        if key in translated and not check(translated.pop(key), translated):
            raise Unsupported(key, _REFUSALS.get(key, "is not supported"))
    return _TRANSLATORS[url](translated)


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

OPENAI_KEYS = frozenset({*_NO_EFFECT, *_CHECKS})
"""Keys of OpenAI's requests that the protocol lacks: each is dropped, or refused because of its value."""

_NO_STREAM = "only a chat or text completion over HTTP can be streamed"
_REFUSALS = {
    "stream": _NO_STREAM,
    "stream_options": _NO_STREAM,
    "modalities": "only text is supported",
    "best_of": "must equal n: completions are not ranked",
    "tool_choice": "must be auto or none: a tool call cannot be forced",
    "parallel_tool_calls": "must be true: the number of tool calls cannot be limited",
}


def _chat(translated: Json) -> Json:
    _refuse(translated, ("prompt", "input"), CHAT)
    messages = translated.get("messages")
    if messages is None:
        raise Unsupported("messages", "is missing")
    if isinstance(messages, list):
        translated["messages"] = [_message(message) for message in messages]
    return translated


def _message(message: Any) -> Any:
    """Return a message without `parsed`, which openai's package adds to answers: the content read as JSON."""
    if not isinstance(message, dict) or "parsed" not in message or message.get("role") != "assistant":
        return message
    return {key: value for key, value in message.items() if key != "parsed"}


def _completion(translated: Json) -> Json:
    _refuse(translated, ("messages", "input"), COMPLETIONS)
    translated["prompt"] = _only_one(translated, "prompt")
    translated.setdefault("max_tokens", translated.get("max_completion_tokens", COMPLETION_TOKENS))
    return translated


def _embedding(translated: Json) -> Json:
    _refuse(translated, ("messages", "prompt"), EMBEDDINGS)
    translated["input"] = _only_one(translated, "input")
    return translated


def _refuse(translated: Json, keys: tuple[str, ...], url: str) -> None:
    for key in keys:
        if key in translated:
            raise Unsupported(key, f"does not belong to {url}")


def _only_one(translated: Json, key: str) -> Any:
    """Return the text or the token ids under `key`, which may be wrapped in a list of one."""
    value = translated.get(key)
    if value is None:
        raise Unsupported(key, "is missing")
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise Unsupported(key, f"must be a single {key}; send a request for each")
        return value[0]
    return value


_TRANSLATORS: dict[str, Callable[[Json], Json]] = {CHAT: _chat, COMPLETIONS: _completion, EMBEDDINGS: _embedding}
