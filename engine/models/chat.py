"""Text to ids and back: raw prompts, chat templates, decoding.

All goes through the Rust tokenizer directly: it is cheap enough to call per token, and unlike transformers' wrapper
it changes no state, so that threads may share it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import llguidance
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from engine.guard import Guard
from engine.structured import GrammarCompiler


class ChatError(Exception):
    """The messages can't be put in the model's chat template; the message is for their sender."""


_RESERVED = frozenset(
    name
    for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
) | {"messages"}
"""Names on the way to a template that are no variables of it, `self` among them."""


class Tokenizer:
    """A model's tokenizer.

    Special tokens that a text spells out are read as such, in raw prompts and in message content alike; who passes
    text of others must strip them first.

    Args:
        hf: a transformers tokenizer over the `tokenizers` library.
        vocab_size: rows of the model's embedding, where they may be fewer than the tokenizer's ids.
    """

    def __init__(self, hf: Any, vocab_size: int | None = None) -> None:
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.size: int = len(hf) if vocab_size is None else min(len(hf), vocab_size)
        """Ids from here on are never sampled, and mean nothing to the model."""
        self._bos: int | None = hf.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own idea of the end."""
        eos: int | None = self._hf.eos_token_id
        return eos

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the special tokens that the tokenizer adds by itself; never two BOS."""
        ids: list[int] = self._backend.encode(text).ids
        if len(ids) > 1 and ids[0] == ids[1] == self._bos:
            return ids[1:]
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, /, **template_kwargs: Any
    ) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins. The template says which special tokens.

        Raises:
            ChatError: the model has no template, or the template refuses the messages.
        """
        text = self.render(messages, tools, **template_kwargs)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, /, **template_kwargs: Any
    ) -> str:
        """The text that `encode_chat` encodes."""
        if not self.has_chat_template:
            raise ChatError("this model has no chat template; send a prompt instead of messages")
        if reserved := sorted(_RESERVED & set(template_kwargs)):
            raise ChatError(f"chat_template_kwargs: not a variable of a chat template: {', '.join(reserved)}")
        try:
            text = self._hf.apply_chat_template(
                [dict(m) for m in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **template_kwargs,
            )
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template refuses the messages: {error.message or error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ChatError(f"the chat template can't render the messages: {error}") from error
        return str(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, not cleaned up. Ids that the tokenizer does not know add nothing."""
        known = [i for i in ids if 0 <= i < self.size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for, which need not be whole characters; nothing for an unknown id."""
        return self._bytes[token] if 0 <= token < self.size else b""

    @cached_property
    def _bytes(self) -> list[bytes]:
        try:
            table = self._guidance([0])
        except ValueError:  # neither byte-level nor byte-fallback, so that each id is text
            return [self.decode([i], skip_special_tokens=False).encode() for i in range(self.size)]
        found = [table.decode_bytes([i]) for i in range(self.size)]
        for name in ("<0xFF>", "ÿ"):  # the table takes this one byte for its own mark of special ids
            token = self._backend.token_to_id(name)
            if token is not None and token < self.size and not found[token]:
                found[token] = b"\xff"
        return found

    def grammars(self, eos_token_ids: Collection[int]) -> GrammarCompiler:
        """A compiler of grammars over this tokenizer's ids, whose texts end with one of `eos_token_ids`.

        Raises:
            ValueError: no id ends the text, or the tokenizer's ids are not made of bytes.
        """
        ends = sorted(i for i in eos_token_ids if 0 <= i < self.size)
        if not ends:
            raise ValueError("the model has no end-of-text id")
        return GrammarCompiler(self._guidance(ends), Guard(self._backend.to_str(), self._num_ids, ends))

    def _guidance(self, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(self._backend.to_str(), n_vocab=self._num_ids, eos_token=eos_token_ids)

    @property
    def _num_ids(self) -> int:
        """As `size`, with the ids that the model has no row for: llguidance wants all of them."""
        ids: list[int] = list(self._backend.get_vocab(with_added_tokens=True).values())
        return max(self.size, max(ids, default=0) + 1)
