"""Turns sampled ids into text that can be sent: whole characters, without text that a stop string may still cut off."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence

TokenBytes = Callable[[int, bool], bytes]
"""(id, skip special tokens) → the bytes of the id."""


class Detokenizer:
    """Decodes the bytes of ids as UTF-8, one id at a time.

    An incomplete last character (at most three bytes) is withheld, also over ids without bytes (special tokens).
    Invalid bytes become U+FFFD at once, so that a model that emits only such bytes withholds nothing.
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Add an id; return the text that it completes, which is empty while a character is incomplete."""
        return self._utf8.decode(self._token_bytes(token, self._skip))


class TextStream:
    """The text of one choice: decodes ids, finds stop strings, and releases the text that can be sent.

    A stop string is found when its last character arrives, wherever tokens begin and end; of two stop strings that end
    at the same character, the longer one counts. Text is withheld only while it may be the beginning of a stop string.
    """

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._detokenizer = Detokenizer(token_bytes, skip_special_tokens)
        self._stops = tuple(stops)
        self._decoded = 0
        """Number of characters decoded so far."""
        self._emitted = 0
        """Number of characters that can be sent."""
        self._starts: deque[int] = deque()
        """Offset, in characters, of the text of each id that `take` has not returned yet."""
        self._over = False
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._sent: list[str] = []
        self._unsent: list[str] = []

    def push(self, token: int, stops_active: bool = True) -> str | None:
        """Add an id; return the stop string that it completes, if any. The text then ends before that string.

        Args:
            token: the id.
            stops_active: False: stop strings that this id completes are text, now and later.
        """
        self._starts.append(self._decoded)
        return self._search(self._detokenizer.push(token), stops_active)

    def add_silent(self) -> None:
        """Add an id that has no text: an end-of-sequence id or a stop id."""
        self._starts.append(self._decoded)

    def finish(self) -> None:
        """Release all withheld text after the last id. An incomplete last character is dropped."""
        self._emit(self._held)
        self._held = ""
        self._over = True

    def take(self) -> tuple[str, int]:
        """Return the text that can be sent since the last call, and the number of ids that belong to it.

        An id belongs to the first character of its text; ids without text at the end are counted, too. Ids whose whole
        text a stop string cut off are never counted, so that text, ids and logprobs end at the same place.
        """
        text = "".join(self._unsent)
        self._sent.append(text)
        self._unsent.clear()
        count = 0
        while self._starts and (self._over or self._starts[0] < self._emitted):
            self._starts.popleft()
            count += 1
        return text, count

    @property
    def text(self) -> str:
        """All text that can be sent, also the text that `take` returned."""
        return "".join(self._sent) + "".join(self._unsent)

    def _emit(self, text: str) -> None:
        if text:
            self._unsent.append(text)
            self._emitted += len(text)

    def _search(self, text: str, stops_active: bool) -> str | None:
        if not text:
            return None
        self._decoded += len(text)
        if not self._stops:
            self._emit(text)
            return None
        buffer, old = self._held + text, len(self._held)
        if stops_active and (hit := self._first_stop(buffer, old)):
            start, stop = hit
            self._emit(buffer[:start])
            self._held = ""
            return stop
        keep = self._open_stop(buffer)
        self._emit(buffer[: len(buffer) - keep])
        self._held = buffer[len(buffer) - keep :]
        return None

    def _first_stop(self, buffer: str, old: int) -> tuple[int, str] | None:
        """Return (start, stop string) of the stop string that ends first.

        Args:
            buffer: withheld and new text.
            old: number of its first characters that were searched before.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _open_stop(self, buffer: str) -> int:
        """Return the length of the longest suffix of `buffer` that is the beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
