"""Translates the result of a job that succeeded into the body of OpenAI's answer.

chat_completion(job_id, result, created) -> dict        # object chat.completion, id chatcmpl-<job id>
completion(job_id, result, created) -> dict             # object text_completion, id cmpl-<job id>
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.openai.request import CHAT, COMPLETIONS
from tokenmill.protocol.result import Choice, Result, Usage

Json = dict[str, Any]

PREFIXES = {CHAT: "chatcmpl", COMPLETIONS: "cmpl"}
"""URL → what comes before the job's id in the id of an answer."""
_ALTERNATIVE = ("token", "logprob", "bytes")


def chat_completion(job_id: str, result: Result, created: int) -> Json:
    """Return the body of the answer to a request to `/v1/chat/completions`.

    Args:
        created: Unix time in seconds.
    """
    choices = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            **_extras(choice),
        }
        for choice in result.choices
    ]
    return _frame(CHAT, "chat.completion", job_id, result, created, choices)


def completion(job_id: str, result: Result, created: int) -> Json:
    """Return the body of the answer to a request to `/v1/completions`.

    Args:
        created: Unix time in seconds.
    """
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": TextLogprobs().add(choice.logprobs),
            "finish_reason": choice.finish_reason,
            **_extras(choice),
        }
        for choice in result.choices
    ]
    return _frame(COMPLETIONS, "text_completion", job_id, result, created, choices)


ANSWERS: dict[str, Callable[[str, Result, int], Json]] = {CHAT: chat_completion, COMPLETIONS: completion}
"""URL → function that makes the body of the answer."""


def usage_of(usage: Usage) -> Json:
    """Return numbers of tokens as OpenAI's `usage`; unknown numbers are 0."""
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
    }


def chat_logprobs(logprobs: Any) -> Json | None:
    """Return log-probabilities of a choice, or of a part of it, in the shape of `/v1/chat/completions`."""
    if logprobs is None:
        return None
    content = [
        {**_entry(token), "top_logprobs": [_entry(alternative) for alternative in token["top_logprobs"]]}
        for token in logprobs["content"]
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """Translates the log-probabilities of a choice, part by part, into the shape of `/v1/completions`.

    `text_offset` counts characters of the text; all tokens that share a character have the offset of this character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, logprobs: Any) -> Json | None:
        """Return the next part; None for None."""
        if logprobs is None:
            return None
        content, offsets = logprobs["content"], []
        for token in content:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(token["bytes"] or ())))
        return {
            "tokens": [token["token"] for token in content],
            "token_logprobs": [token["logprob"] for token in content],
            "top_logprobs": [
                {entry["token"]: entry["logprob"] for entry in (*token["top_logprobs"], token)} for token in content
            ],
            "text_offset": offsets,
        }


def _entry(token: Mapping[str, Any]) -> Json:
    return {key: token[key] for key in _ALTERNATIVE}


def _extras(choice: Choice) -> Json:
    return {} if choice.token_ids is None else {"token_ids": choice.token_ids}


def _frame(url: str, kind: str, job_id: str, result: Result, created: int, choices: list[Json]) -> Json:
    body = {
        "id": f"{PREFIXES[url]}-{job_id}",
        "object": kind,
        "created": created,
        "model": result.model or "",
        "choices": choices,
        "usage": usage_of(result.usage),
        "system_fingerprint": None,
    }
    if result.clamped:
        body["clamped"] = dict(result.clamped)
    prompt = result.choices[0].prompt_logprobs if result.choices else None
    if prompt is not None:
        body["prompt_logprobs"] = prompt
    return body
