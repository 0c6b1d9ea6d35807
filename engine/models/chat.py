"""Text to ids and back: raw prompts, chat templates, decoding.

All goes through the Rust tokenizer directly: it is cheap enough to call per token, and unlike transformers' wrapper
it changes no state, so that threads may share it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
import llguidance

from engine.models.control import ControlText, Mask, TooManyPrivateCharacters
from engine.models.pieces import Pieces
from engine.models.roles import Roles
from engine.sampling.guard import Guard
from engine.sampling.structured import GrammarCompiler


class ChatError(Exception):
    """The messages cannot be rendered with the chat template; the message is for the sender and names the key."""


@cache
def _reserved() -> frozenset[str]:
    """Return the names of arguments of `apply_chat_template`, which cannot be variables of a template."""
    from transformers import PreTrainedTokenizerBase  # late: it takes a second
    from transformers.utils.chat_template_utils import render_jinja_template

    return frozenset(
        name
        for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ) | {"messages"}


class Tokenizer:
    """A model's tokenizer.

    The text of a special token, such as `<|im_end|>`, becomes that token in a raw prompt. In a conversation this holds
    only for the template's own text; in messages, tools and variables the same characters stay text, see `ControlText`.

    Args:
        hf: a transformers tokenizer over the `tokenizers` library.
        vocab_size: number of rows of the model's embedding, which may be lower than the number of the tokenizer's ids.
    """

    def __init__(self, hf: Any, vocab_size: int | None = None) -> None:
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        known = max(ids.values(), default=-1) + 1  # not the number of tokens: ids may be missing
        self.size: int = known if vocab_size is None else min(known, vocab_size)
        """Number of ids that the model and the tokenizer both have; ids from here on are never sampled."""
        self._num_ids = known
        """Number of ids of the tokenizer, also those that the model has no row for; llguidance needs all."""
        self._pieces = Pieces(self._backend, self.size)
        self._bos: int | None = hf.bos_token_id
        self._control = ControlText(self._backend)
        self._roles: dict[str, Roles] = {}
        self.special_tokens_in_messages = False
        """Whether special tokens that messages spell out become special tokens, not text."""

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text id of the tokenizer."""
        eos: int | None = self._hf.eos_token_id
        return eos

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt, with the special tokens that the tokenizer adds; BOS at most once."""
        ids: list[int] = self._backend.encode(text).ids
        if len(ids) > 1 and ids[0] == ids[1] == self._bos:
            return ids[1:]
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, /, **template_kwargs: Any
    ) -> list[int]:
        """Return the ids of a conversation, up to the beginning of the assistant's answer.

        Raises:
            ChatError: the model has no template, or the template refuses the messages.
        """
        roles = self._check(messages, tools, template_kwargs)
        if self.special_tokens_in_messages:
            text = self._render(roles, messages, tools, template_kwargs, mask={})
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        text, mask = self._render_masked(roles, messages, tools, template_kwargs)
        if mask:
            return self._control.encode(text, mask)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return self._control.encode(text, mask) if self._control.overlooked(text, ids) else ids

    def _render_masked(
        self,
        roles: Roles,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, Mask]:
        """Render a conversation with the control text of its messages masked.

        Returns:
            The text, in which only the control text of the template is unmasked, and the masks in it.

        Raises:
            ChatError: the template refuses the messages, or no characters are left for the masks.
        """
        data = (messages, tools, variables)
        try:
            (messages, tools, variables), mask = self._control.mask(data)
            text = self._render(roles, messages, tools, variables, mask)
            (messages, tools, variables), marks = self._control.mask(data, marks=True)
        except TooManyPrivateCharacters as error:
            raise ChatError(f"messages: {error}") from error
        if marks:
            try:
                other = self._render(roles, messages, tools, variables, marks)
            except ChatError:  # a template that looks for the marks
                return text, mask
            if len(self._control.find(other)) < len(self._control.find(text)):
                return other, marks  # the template has made control text from other text of the messages
        return text, mask

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, /, **template_kwargs: Any
    ) -> str:
        """Return the text that `encode_chat` encodes, control text of the messages included."""
        return self._render(self._check(messages, tools, template_kwargs), messages, tools, template_kwargs, mask={})

    def _check(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> Roles:
        """Check the arguments of a template and the roles of the messages; return the roles of the template."""
        if not self.has_chat_template:
            raise ChatError("messages: this model has no chat template; send a prompt instead of messages")
        if variables and (reserved := sorted(_reserved() & set(variables))):
            raise ChatError(f"chat_template_kwargs: not a variable of a chat template: {', '.join(reserved)}")
        roles = self._roles_of(tools)
        if problem := roles.problem(messages):
            raise ChatError(problem)
        return roles

    def _render(
        self,
        roles: Roles,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        mask: Mask,
    ) -> str:
        try:
            return self._apply(messages, tools, variables)
        except jinja2.TemplateError as error:
            refused = roles.refused(messages)
            where = "messages" if refused is None else f"messages[{refused}].role"
            reason = str(error.message or error).translate(mask)
            raise ChatError(f"{where}: the chat template refuses the messages: {reason}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            reason = str(error).translate(mask)
            raise ChatError(f"messages: the chat template can't render the messages: {reason}") from error

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> str:
        text = self._hf.apply_chat_template(
            [dict(m) for m in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
        return str(text)

    def _roles_of(self, tools: Sequence[Any] | None) -> Roles:
        """Return the roles of the template for these tools; a model may have a template with tools and one without."""
        source: str = self._hf.get_chat_template(tools=list(tools) if tools else None)
        if source not in self._roles:
            self._roles[source] = Roles(source, lambda messages, tools: self._apply(messages, tools, {}))
        return self._roles[source]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids` as a continuation of other text. Ids unknown to the tokenizer have no text."""
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode(errors="replace")

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        """Return the bytes of an id, which may be a part of a character; empty for an unknown id.

        Text is made of these bytes, log-probabilities report them, and grammars are matched against them.
        """
        return self._pieces.bytes_of(token, skip_special)

    def grammars(self, eos_token_ids: Collection[int]) -> GrammarCompiler:
        """Return a compiler of grammars over this tokenizer's ids, whose texts end with one of `eos_token_ids`.

        Raises:
            ValueError: no id ends the text, or the tokenizer's ids are not made of bytes.
        """
        ends = sorted(i for i in eos_token_ids if 0 <= i < self.size)
        if not ends:
            raise ValueError("the model has no end-of-text id")
        return GrammarCompiler(self._guidance(ends), Guard(self._backend.to_str(), self._num_ids, ends))

    def _guidance(self, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(self._backend.to_str(), n_vocab=self._num_ids, eos_token=eos_token_ids)
