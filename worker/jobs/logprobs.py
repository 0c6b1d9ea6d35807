"""Log-probabilities as JSON, in the shape of OpenAI's chat API, with the id of every token added.

{"content": [{"token": " the", "token_id": 260, "logprob": -0.3, "bytes": [32, 116, 104, 101], "top_logprobs": []}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.outputs import Logprob, TokenLogprobs

LEAST = -9999.0
"""Written instead of lower values, since JSON has no infinity."""

Entry = dict[str, Any]


class LogprobsWriter:
    """Formats log-probabilities. Any thread may use it."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes`: returns the bytes that a token id stands for."""
        self._token_bytes = token_bytes

    def content(self, logprobs: Iterable[TokenLogprobs]) -> Entry:
        """Format the log-probabilities of output tokens, in order."""
        return {"content": [self._entry(token) for token in logprobs]}

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> list[Entry | None]:
        """Format the log-probabilities of a prompt's tokens; the first token has none, and is null."""
        return [None if token is None else self._entry(token) for token in logprobs]

    def _entry(self, token: TokenLogprobs) -> Entry:
        return {**self._token(token.chosen), "top_logprobs": [self._token(alternative) for alternative in token.top]}

    def _token(self, token: Logprob) -> Entry:
        raw = self._token_bytes(token.token_id)
        return {
            "token": raw.decode(errors="replace"),
            "token_id": token.token_id,
            "logprob": token.logprob if token.logprob > LEAST else LEAST,
            "bytes": list(raw),
        }
