"""From sampled ids to text that may be sent: whole characters only, nothing that a stop string may still cut."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence

TokenBytes = Callable[[int, bool], bytes]
"""(id, skip special tokens) → the bytes that the id stands for."""


class Detokenizer:
    """Ids in, text out, one id at a time: the bytes of the ids, read as UTF-8.

    Text is withheld while its last character is incomplete, at most three bytes, however many ids without bytes
    (special tokens) come in between. Bytes that are no UTF-8 become U+FFFD at once, so that text flows for models that
    emit broken bytes without end.
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        return self._utf8.decode(self._token_bytes(token, self._skip))


class TextStream:
    """The text of one choice: detokenised, searched for stop strings, ready to be sent piece by piece.

    A stop string is found when its last character arrives, whatever the token borders; where two end at the same
    character, the one that began first. Only a real beginning of a stop string is held back, never a fixed length.
    """

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._detokenizer = Detokenizer(token_bytes, skip_special_tokens)
        self._stops = tuple(stops)
        self._decoded = 0
        """Characters decoded so far."""
        self._emitted = 0
        """Characters that are safe to send."""
        self._starts: deque[int] = deque()
        """Where the text of each id begins that `take` has not given out yet."""
        self._over = False
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._sent: list[str] = []
        self._unsent: list[str] = []

    def push(self, token: int, stops_active: bool = True) -> str | None:
        """Add one id; returns the stop string that it completed, if any. The text then ends before that string.

        With `stops_active` false nothing stops, and what was complete by then does not stop later either.
        """
        self._starts.append(self._decoded)
        return self._search(self._detokenizer.push(token), stops_active)

    def add_silent(self) -> None:
        """Count one id that has no text and belongs to the end: an end-of-sequence or stop id."""
        self._starts.append(self._decoded)

    def finish(self) -> None:
        """The last id is in: let go of everything withheld. A last character that is incomplete is no text."""
        self._emit(self._held)
        self._held = ""
        self._over = True

    def take(self) -> tuple[str, int]:
        """(the text that became safe to send since the last call, how many ids it carries).

        An id goes out with the first character of its text; at the end those without text do too. Ids whose text a stop
        string has cut off entirely never go out, so that text, ids and all that comes with them end at the same place.
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
        """All text that is safe to send, taken or not."""
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
        """(start, stop string) of the one that ends first; the first `old` characters were searched before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _open_stop(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
