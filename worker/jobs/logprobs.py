"""Log-probabilities as JSON: the shape of OpenAI's chat API, with the id of every token beside its text.

{"content": [{"token": " the", "token_id": 260, "logprob": -0.3, "bytes": [32, 116, 104, 101], "top_logprobs": []}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.outputs import Logprob, TokenLogprobs

LEAST = -9999.0
"""Written for anything lower: JSON knows no infinity."""

Entry = dict[str, Any]


class LogprobsWriter:
    """Knows what bytes an id stands for. Any thread may use it."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def content(self, logprobs: Iterable[TokenLogprobs]) -> Entry:
        """Of output tokens, in order."""
        return {"content": [self._entry(one) for one in logprobs]}

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> list[Entry | None]:
        """Of the tokens of a prompt; the first has no probability and is null."""
        return [None if one is None else self._entry(one) for one in logprobs]

    def _entry(self, one: TokenLogprobs) -> Entry:
        return {**self._token(one.chosen), "top_logprobs": [self._token(other) for other in one.top]}

    def _token(self, one: Logprob) -> Entry:
        raw = self._token_bytes(one.token_id)
        return {
            "token": raw.decode(errors="replace"),
            "token_id": one.token_id,
            "logprob": one.logprob if one.logprob > LEAST else LEAST,
            "bytes": list(raw),
        }
