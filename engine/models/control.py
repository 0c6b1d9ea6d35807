"""Encodes special tokens that messages spell out as text.

A tokenizer turns the text of a special token into this token wherever it is, so a message that spells out `<|im_end|>`
could end its turn and begin a turn of the system. Here such text is masked before the chat template is rendered, and
unmasked after the markers of the template were found, so that only these become special tokens.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

_PRIVATE = range(0xF0000, 0x10FFFE)
"""Private-use code points, which serve as masks."""

Mask = Mapping[int, str]
"""For `str.translate`: mask → masked character. Empty: nothing was masked."""


class TooManyPrivateCharacters(ValueError):
    """A text contains so many private-use characters that not enough are left for the masks."""


class ControlText:
    """Finds and masks the text of special tokens, and encodes masked text. Any thread may use it.

    Added tokens that are not special, such as Gemma's runs of spaces or Qwen's `<think>`, are text that has an id of
    its own: they are matched in messages as everywhere.

    Args:
        backend: a `tokenizers.Tokenizer`.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added: dict[int, AddedToken] = {
            i: token for i, token in backend.get_added_tokens_decoder().items() if token.content
        }
        self._special = {i: token for i, token in self._added.items() if token.special}
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_special_tokens(
            [
                AddedToken(token.content, special=True, normalized=False, single_word=token.single_word)
                for token in self._special.values()
            ]
        )
        self._folds = backend.normalizer is not None and any(token.normalized for token in self._special.values())
        """Whether the normaliser may make a special token of other text, such as a wide `＜`, which `find` misses."""

    def find(self, text: str) -> list[tuple[int, int]]:
        """Return the (start, end) of each text of a special token in `text`, in order."""
        found = self._finder.encode(text, add_special_tokens=False)
        return [span for token, span in zip(found.ids, found.offsets, strict=True) if token != 0]

    def mask(self, data: Any, marks: bool = False) -> tuple[Any, Mask]:
        """Return a copy of `data`, made of JSON's types, with each character of control text masked, and the mask.

        Args:
            data: any value.
            marks: mask each punctuation character of special tokens (`<`, `|`, …) instead, wherever it is: a template
                may join control text of parts in different strings, or of parts around text that it removes.

        Raises:
            TooManyPrivateCharacters: not enough characters are left for the masks.
        """
        find = self._find_marks if marks else self.find
        spans = {text: found for text in _strings(data) if (found := find(text))}
        if not spans:
            return data, {}
        hidden = {char for text, found in spans.items() for start, end in found for char in text[start:end]}
        taken = {char for text in _strings(data) for char in text}
        free = (code for code in _PRIVATE if chr(code) not in taken)
        masks = dict(zip(sorted(hidden), map(chr, free), strict=False))
        if len(masks) < len(hidden):
            raise TooManyPrivateCharacters("too many private-use characters next to the text of special tokens")
        table = str.maketrans(masks)
        masked = {text: _translate_spans(text, found, table) for text, found in spans.items()}
        return _replace(data, masked), {ord(mask): char for char, mask in masks.items()}

    def _find_marks(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in self._marks.finditer(text)] if self._marks else []

    @cached_property
    def _marks(self) -> re.Pattern[str] | None:
        chars = {c for token in self._special.values() for c in token.content if not (c.isalnum() or c in " _-")}
        return re.compile(f"[{re.escape(''.join(sorted(chars)))}]+") if chars else None

    def encode(self, text: str, mask: Mask) -> list[int]:
        """Return the ids of a rendered text after unmasking it; only unmasked text becomes special tokens."""
        parts, last = [], 0
        for start, end in self.find(text):
            parts += [text[last:start], self._markers[text[start:end]]]
            last = end
        plain = "".join([*parts, text[last:]]).translate(mask)
        found = self._plain.encode(plain, add_special_tokens=False).ids
        return list(itertools.chain.from_iterable(self._ids(i) for i in found))

    def overlooked(self, text: str, ids: list[int]) -> bool:
        """Return whether `ids`, those of `text`, contain special tokens that `find` does not see in the text."""
        return self._folds and sum(i in self._special for i in ids) > len(self.find(text))

    @cached_property
    def _markers(self) -> dict[str, str]:
        """Text of each special token → a random marker, which no message can contain."""
        nonce = secrets.token_hex(16)
        return {token.content: f"\U0010ffff{nonce}:{i}\U0010ffff" for i, token in self._special.items()}

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer, sharing the model in memory, except that only markers become special tokens."""
        plain = Tokenizer(self._backend.model)
        plain.normalizer, plain.pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        holes = max(self._vocabulary.values(), default=-1) + 1 - len(self._vocabulary)
        nonce = secrets.token_hex(16)
        plain.add_tokens([f"\U0010ffff{nonce}-{i}" for i in range(holes)])  # new ids must not be those of the model
        plain.add_tokens([self._renamed(token) for token in self._added.values()])
        return plain

    def _renamed(self, token: AddedToken) -> AddedToken:
        flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
        if token.special:
            return AddedToken(self._markers[token.content], normalized=False, **flags)
        return AddedToken(token.content, normalized=token.normalized, **flags)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=False))

    @cached_property
    def _real_ids(self) -> dict[int, int]:
        """Id of an added token in `_plain` → id in the model."""
        ids = {i: self._plain.token_to_id(self._renamed(token).content) for i, token in self._added.items()}
        return {plain: i for i, plain in ids.items() if plain is not None}

    def _ids(self, found: int) -> list[int]:
        if found in self._real_ids:
            return [self._real_ids[found]]
        # The merges of the model can make a special token, too: `</s>` of `</` and `s>`.
        if found in self._special and self._special[found].content not in self._unknown:
            return self._spelled(self._special[found].content)
        return [found]

    @cached_property
    def _unknown(self) -> set[str]:
        return {getattr(self._backend.model, "unk_token", None) or "<unk>", "<unk>"}

    def _spelled(self, content: str) -> list[int]:
        """Return the ids of this text, cut into two parts that the model does not merge."""
        for cut in range(1, len(content)):
            halves = (self._backend.model.tokenize(part) for part in (content[:cut], content[cut:]))
            ids = [token.id for half in halves for token in half]
            if not self._special.keys() & set(ids):
                return ids
        return []


def _strings(data: Any) -> Iterator[str]:
    """Yield all strings in `data`, keys included."""
    todo = [data]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            todo += item


def _replace(data: Any, by: Mapping[str, str]) -> Any:
    if isinstance(data, str):
        return by.get(data, data)
    if isinstance(data, Mapping):
        return {_replace(key, by): _replace(value, by) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_replace(item, by) for item in data]
    return data


def _translate_spans(text: str, spans: list[tuple[int, int]], table: Mapping[int, str]) -> str:
    parts, last = [], 0
    for start, end in spans:
        parts += [text[last:start], text[start:end].translate(table)]
        last = end
    return "".join([*parts, text[last:]])
