"""Types of the keyword arguments of `submit`, `map` and `Group.submit`, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class RequestParams(TypedDict, total=False):
    """Keys of a job's body, except `prompt`, `messages` and `stream`; docs/protocol.md explains each.

    None means absent. A test compares the names with the fields of `tokenmill.protocol.body.Body`.
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None

    max_tokens: int | None
    max_completion_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None
    seed: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None

    logprobs: bool | int | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    cache_salt: str | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    skip_special_tokens: bool | None
    return_token_ids: bool | None
    model: str | None

    stream_options: Mapping[str, Any] | None
    user: str | None
    metadata: Mapping[str, Any] | None


class JobOptions(RequestParams, total=False):
    """Arguments that `map` and `Group.submit` pass to `Client.submit` for each job; documented there."""

    priority: str
    ttl: float | None
    delay: float | None
    tenant: str | None
    stream: bool
    callback: str | None
    traceparent: str | None
    max_attempts: int | None
    wait: bool


class MapOptions(JobOptions, total=False):
    """Keyword arguments of `map` that apply to every prompt."""

    group: str | None


class GroupOptions(JobOptions, total=False):
    """Keyword arguments of `Group.submit`."""

    messages: Sequence[Mapping[str, Any]] | None
    id: str | None
    timeout: float | None
