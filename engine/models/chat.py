"""Text to ids and back: raw prompts, chat templates, decoding.

All goes through the Rust tokenizer directly: it is cheap enough to call per token, and unlike transformers' wrapper
it changes no state, so that threads may share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2


class ChatError(Exception):
    """The messages can't be put in the model's chat template; the message is for their sender."""


_RESERVED = frozenset(
    {
        "conversation",
        "tools",
        "documents",
        "sanitize_control_tokens",
        "tokenize",
        "add_generation_prompt",
        "return_dict",
        "return_tensors",
        "padding",
    }
    | {
        "truncation",
        "max_length",
        "chat_template",
        "continue_final_message",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
    }
)
"""Parameters of `apply_chat_template` that are no variables of a template."""


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
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins. The template says which special tokens.

        Raises:
            ChatError: the model has no template, or the template refuses the messages.
        """
        text = self.render(messages, tools, **template_kwargs)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> str:
        """The text that `encode_chat` encodes."""
        if not self.has_chat_template:
            raise ChatError("this model has no chat template; send a prompt instead of messages")
        if reserved := sorted(_RESERVED & set(template_kwargs)):
            raise ChatError(f"not a variable of a chat template: {', '.join(reserved)}")
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
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatError(f"the chat template can't render the messages: {error}") from error
        return str(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, not cleaned up. Ids that the tokenizer does not know add nothing."""
        known = [i for i in ids if 0 <= i < self.size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text
