"""From sampled ids to text that may be sent: whole characters only, nothing that a stop string may still cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int], bool], str]
"""(ids, skip special tokens) → text."""

_REPLACEMENT = "\ufffd"
_WINDOW = 8
"""Ids to wait for a character to complete. UTF-8 takes at most 4 bytes, hence ids; a longer tail is truly broken."""


class Detokenizer:
    """Ids in, text out, one id at a time.

    Decodes what is new together with the window before it, since a tokenizer's spacing depends on the previous ids. The
    text of a window that ends inside a character is withheld, but not for ever: models with broken weights emit broken
    UTF-8 without end, and decoding all of it again at each id would be quadratic.
    """

    def __init__(self, decode: Decode, skip_special_tokens: bool) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._context: list[int] = []
        """Ids whose text is out already; the previous window."""
        self._context_text = ""
        self._fresh: list[int] = []
        """Ids whose text is not out yet."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._fresh.append(token)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._fresh) < _WINDOW:
            return ""
        if text:
            self._advance()
        elif len(self._fresh) >= _WINDOW:
            self._fresh = self._fresh[-1:]  # ids without text (special ones); keep no more of them
        return text

    def flush(self) -> str:
        """What is withheld, at the end of the text. A last character that is incomplete is no text and is left out."""
        text = self._new_text().rstrip(_REPLACEMENT) if self._fresh else ""
        self._advance()
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._fresh, self._skip)[len(self._context_text) :]

    def _advance(self) -> None:
        self._context, self._fresh = self._fresh, []
        self._context_text = self._decode(self._context, self._skip) if self._context else ""


class TextStream:
    """The text of one choice: detokenised, searched for stop strings, ready to be sent piece by piece.

    A stop string is found when its last character arrives, whatever the token borders; where two end at the same
    character, the one that began first. Only a real beginning of a stop string is held back, never a fixed length.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._detokenizer = Detokenizer(decode, skip_special_tokens)
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

    def finish(self, stops_active: bool = True) -> str | None:
        """The last id is in: let go of everything withheld. Returns the stop string that this uncovers, if any."""
        stop = self._search(self._detokenizer.flush(), stops_active)
        if stop is None:
            self._emit(self._held)
            self._held = ""
            self._over = True
        return stop

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
