"""The bytes of each id of a tokenizer: one table for text, log-probabilities and grammars.

A SentencePiece tokenizer's own decoder removes a leading space, because it expects a whole text. Output continues a
prompt, so here each id has its text behind other text: `▁the` is ` the`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of byte fallback (SentencePiece), which is one byte, not its characters."""


class Pieces:
    """The bytes of each id, computed at first use. Any thread may use it.

    Args:
        backend: a `tokenizers.Tokenizer`.
        size: number of ids; higher ids have no bytes.
    """

    def __init__(self, backend: Any, size: int) -> None:
        self._backend = backend
        self._size = size
        steps = set(_decoder_steps(backend.decoder))
        self._byte_level = "ByteLevel" in steps
        self._byte_fallback = "ByteFallback" in steps
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._anchor = next(self._plain_ids(), None)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int, skip_special: bool = False) -> bytes:
        """Return the bytes of an id, which may be a part of a character; empty for an unknown id."""
        if not 0 <= token < self._size or (skip_special and token in self._special):
            return b""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        text: str | None = self._backend.id_to_token(token)
        if text is None:  # no token has this id
            return b""
        if token in self._special or (self._byte_level and token in self._added):
            return str(self._added[token]).encode()
        if self._byte_level:
            known = [_BYTES.get(char) for char in text]
            return text.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return self._after_anchor(token).encode()

    def _after_anchor(self, token: int) -> str:
        """Return the text that `token` adds after other text, by the decoder of the tokenizer."""
        before = [] if self._anchor is None else [self._anchor]
        start = self._backend.decode(before, skip_special_tokens=False)
        text: str = self._backend.decode([*before, token], skip_special_tokens=False)
        return text.removeprefix(start)

    def _plain_ids(self) -> Iterator[int]:
        """Yield ids whose text is letters and does not depend on later ids."""
        for token in range(self._size):
            if token not in self._added and self._backend.decode([token]).isalpha():
                yield token


def _decoder_steps(decoder: Any) -> Iterator[str]:
    """Yield the types of the steps of a decoder, nested ones included."""
    todo = [json.loads(decoder.__getstate__())] if decoder is not None else []
    while todo:
        step = todo.pop()
        todo += step.get("decoders", [])
        yield step["type"]


def _byte_alphabet() -> dict[str, int]:
    """Return the characters of byte-level vocabularies → the byte of each (`bytes_to_unicode` of GPT-2).

    Printable characters of Latin-1 stand for their own byte; the other bytes have characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()
