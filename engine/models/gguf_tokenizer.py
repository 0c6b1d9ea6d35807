"""Builds the tokenizer of a GGUF file so that it gives the same ids as the publisher's tokenizer.

A file holds tokens, their types, merges or scores, and a name for how text is cut into words (`tokenizer.ggml.pre`).
Properties without a key are llama.cpp's defaults for that name (`llama-vocab.cpp`); an unknown name is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.models.template import ChatTemplate
from engine.models.weights import LoadError

if TYPE_CHECKING:
    from engine.models.gguf import GgufFile

log = logging.getLogger(__name__)

# `tokenizer.ggml.token_type`
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_SPACE = "▁"
"""The character that stands for a space in SentencePiece."""

_ENDS = frozenset(
    {"</s>", "<eos>", "<end_of_turn>", "<turn|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>"}
    | {"<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>"}
    | {"<EOT>", "_<EOT>", "[EOT]", "[EOS]"}
)
"""Texts of the tokens that end a text or a turn; many files have a key for only one of these tokens."""

_NAMED = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
"""Names in the keys `tokenizer.ggml.<name>_token_id`, as the format spells them."""


# ── how text is cut into words ────────────────────────────────────────────────────────────────────────────────────────

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(contraction: str, digits: str) -> str:
    """Return the pattern of words by capital and small letters, for GPT-4o and Mistral's Tekken."""
    word = r"[^\r\n\p{L}\p{N}]?"
    return rf"{word}{_UPPER}*{_LOWER}+{contraction}|{word}{_UPPER}+{_LOWER}*{contraction}|\p{{N}}{digits}|{_SLASHES}"


@dataclass(frozen=True)
class _Words:
    """How a byte-level tokenizer cuts text into words."""

    patterns: tuple[str, ...] = (_GPT2,)
    """Patterns that split the text, each within the pieces of the one before."""
    digits: bool = False
    """Whether each digit is a word."""
    nfc: bool = False
    ignore_merges: bool = False
    """Whether a word that is a token becomes this token, without merges."""
    add_bos: bool = False
    """Whether a text begins with BOS if the file does not say."""

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> Any:
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2_WORDS = _Words()
_LLAMA3_WORDS = _Words((_GPT4,), ignore_merges=True, add_bos=True)
_GPT4_WORDS = _Words((_GPT4,))
_QWEN2_WORDS = _Words((_QWEN2,), nfc=True)
_DIGIT_WORDS = _Words(digits=True)
_GPT4O_WORDS = _Words((_cased(_CONTRACTION + "?", "{1,3}"),))
_DEFAULT_WORDS = _Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""What llama.cpp assumes for old files without `tokenizer.ggml.pre`."""

_WORDS: dict[str, _Words] = {
    "default": _DEFAULT_WORDS,
    **dict.fromkeys(["gpt-2", "phi-2", "gigachat", "mellum", "a.x-4.0"], _GPT2_WORDS),
    **dict.fromkeys(["llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"], _LLAMA3_WORDS),
    **dict.fromkeys(["dbrx", "smaug-bpe"], _GPT4_WORDS),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "megrez"], _QWEN2_WORDS),
    **dict.fromkeys(["smollm", "starcoder", "refact", "codeshell", "minerva-7b", "exaone"], _DIGIT_WORDS),
    "command-r": _Words(digits=True, nfc=True),
    "tekken": _Words((_cased("", ""),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(["gpt-4o", "llama4"], _GPT4O_WORDS),
    "deepseek-coder": _Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}


# ── the tokenizer ─────────────────────────────────────────────────────────────────────────────────────────────────────


class GgufTokenizer:
    """A tokenizer with the methods of transformers' that `engine.models.chat.Tokenizer` calls.

    Raises:
        LoadError: the file has no tokenizer, or its kind is not known; the message names the kind.
    """

    def __init__(self, file: GgufFile) -> None:
        vocabulary = file.vocabulary
        self.bos_token_id = vocabulary.named("bos", 1 if vocabulary.is_sentencepiece else None)
        self.eos_token_id = vocabulary.named("eos", 2 if vocabulary.is_sentencepiece else None)
        self.backend_tokenizer: Tokenizer = vocabulary.build(self.bos_token_id, self.eos_token_id)
        self.chat_template: str | None = file.field("tokenizer.chat_template")
        names = {name: vocabulary.named(key) for name, key in (("unk", "unknown"), ("pad", "padding"))}
        ids = {"bos": self.bos_token_id, "eos": self.eos_token_id, **names}
        self._variables = {f"{name}_token": vocabulary.tokens[i] for name, i in ids.items() if i is not None}
        self._template = None if self.chat_template is None else ChatTemplate(self.chat_template)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def get_chat_template(self, tools: Any = None) -> str:
        """Return the template; a file has the same template with tools and without."""
        return self.chat_template or ""

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        tokenize: bool = False,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation to text, as the method of transformers does with `tokenize=False`.

        Raises:
            jinja2.TemplateError: the template is invalid or refuses the messages.
            ValueError: the file has no template.
        """
        if self._template is None:
            raise ValueError("the file has no chat template")
        given = {"messages": conversation, "tools": tools, "documents": None}
        return self._template.render(
            {**self._variables, **variables, **given, "add_generation_prompt": add_generation_prompt}
        )


class Vocabulary:
    """The tokens of a file and their types.

    Raises:
        LoadError: the file has no tokens, or its kind of tokenizer is not known.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._model = file.field("tokenizer.ggml.model")
        if self._model not in ("gpt2", "llama"):
            raise LoadError(
                f"{file.path}: the tokenizer is of a kind that is not supported: tokenizer.ggml.model {self._model!r}"
            )
        self.is_sentencepiece = self._model == "llama"
        tokens = file.field("tokenizer.ggml.tokens")
        if tokens is None:
            raise LoadError(f"{file.path} has no tokenizer.ggml.tokens")
        types = file.field("tokenizer.ggml.token_type")
        self._types: list[int] | None = None if types is None else [int(kind) for kind in types]
        if self._types is not None and len(self._types) != len(tokens):
            raise LoadError(
                f"{file.path}: {len(tokens)} tokens have {len(self._types)} types (tokenizer.ggml.token_type)"
            )
        self.tokens = [self._text(i, str(token)) for i, token in enumerate(tokens)]
        self._named_ids = {i for name in _NAMED if (i := self.named(name)) is not None}

    def _text(self, i: int, token: str) -> str:
        """Return the text of a token. In a user-defined token each `▁` becomes a space, since such tokens are matched
        before the spaces of a text are replaced by `▁`."""
        return token.replace(_SPACE, " ") if self.is_sentencepiece and self._type(i) == _USER_DEFINED else token

    def _type(self, i: int) -> int:
        return _NORMAL if self._types is None else self._types[i]

    def named(self, name: str, default: int | None = None) -> int | None:
        """Return the id that a key names; `default` or None if the file has no such token."""
        found = self._file.field(f"tokenizer.ggml.{name}_token_id", default)
        return int(found) if found is not None and 0 <= int(found) < len(self.tokens) else None

    def is_special(self, i: int) -> bool:
        """Return whether a token is a control token, not text."""
        if self._types is None:
            return i in self._named_ids or self.tokens[i] in _ENDS
        kind = self._types[i]
        return kind in (_CONTROL, _UNKNOWN) or (kind == _USER_DEFINED and self.tokens[i] in _ENDS)

    def end_ids(self) -> set[int]:
        """Return the ids that end a text, a turn or a message, found by keys and by the text of special tokens."""
        named = {self.named(kind) for kind in ("eos", "eot", "eom")}
        by_text = {i for i, token in enumerate(self.tokens) if token in _ENDS and self.is_special(i)}
        return by_text | {i for i in named if i is not None}

    def build(self, bos: int | None, eos: int | None) -> Tokenizer:
        """Return the tokenizer; whether it adds `bos` and `eos` to a text is set by the file, else by its kind."""
        tokenizer = self._sentencepiece() if self.is_sentencepiece else self._byte_level()
        tokenizer.add_special_tokens([self._added(i) for i in range(len(self.tokens)) if self.is_special(i)])
        users = (i for i in range(len(self.tokens)) if self._type(i) == _USER_DEFINED and not self.is_special(i))
        tokenizer.add_tokens([self._added(i) for i in users])
        tokenizer.post_processor = self._post_processor(bos, eos)
        return tokenizer

    def _added(self, i: int) -> AddedToken:
        text = self.tokens[i]
        family = self._file.family
        takes_space = self.is_sentencepiece and family is not None and family.control_takes_space
        rstrip = takes_space and self.is_special(i) and text not in ("<unk>", "<s>", "<|endoftext|>")
        return AddedToken(text, normalized=False, special=self.is_special(i), rstrip=rstrip)

    def _ids(self) -> dict[str, int]:
        """Return token → id; of equal tokens the first one counts."""
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            ids.setdefault(token, i)
        return ids

    # ── byte-level BPE ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _words(self) -> _Words:
        kind = self._file.field("tokenizer.ggml.pre", "default")
        if kind == "default":
            log.warning("%s does not say how text is cut into words (tokenizer.ggml.pre); guessed", self._file.path)
        if kind not in _WORDS:
            raise LoadError(
                f"{self._file.path}: text is cut into words in a way that is not known: tokenizer.ggml.pre {kind!r}"
            )
        return _WORDS[kind]

    def _byte_level(self) -> Tokenizer:
        words = self._words
        merges = self._file.field("tokenizer.ggml.merges")
        if merges is None:
            raise LoadError(f"{self._file.path} has no tokenizer.ggml.merges")
        pairs = [_pair(str(merge)) for merge in merges]
        try:
            model = models.BPE(self._ids(), pairs, ignore_merges=words.ignore_merges)
        except Exception as error:  # the library raises only `Exception`
            raise LoadError(f"{self._file.path}: tokenizer.ggml.merges don't fit the tokens: {error}") from error
        tokenizer = Tokenizer(model)
        if words.nfc:
            tokenizer.normalizer = words.normalizer()
        tokenizer.pre_tokenizer = words.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    # ── SentencePiece's BPE ───────────────────────────────────────────────────────────────────────────────────────

    def _sentencepiece(self) -> Tokenizer:
        ids = self._ids()
        unknown = self.named("unknown", 0)
        model = models.BPE(
            ids,
            list(self._merges(ids)),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in ids,
        )
        tokenizer = Tokenizer(model)
        tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
        if not self._file.field("tokenizer.ggml.add_space_prefix", True):
            tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        elif self._has_inst():
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        return tokenizer

    def _has_inst(self) -> bool:
        """Return whether this is a tokenizer of Mistral 0.3 or later: a space precedes the text, not each marker."""
        return any(token == "[INST]" and self.is_special(i) for i, token in enumerate(self.tokens))

    def _merges(self, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Return all pairs of tokens that join to a token, by descending score, in which SentencePiece joins them."""
        scores = self._file.field("tokenizer.ggml.scores")
        if scores is None or len(scores) < len(self.tokens):
            raise LoadError(f"{self._file.path} has no tokenizer.ggml.scores for all of its tokens")
        found: list[tuple[float, int, int, str, str]] = []
        for token, i in ids.items():
            if self._type(i) in (_NORMAL, _USER_DEFINED):
                score = -float(scores[i])
                for cut in range(1, len(token)):
                    left, right = token[:cut], token[cut:]
                    if left in ids and right in ids:
                        found.append((score, -len(left), -len(right), left, right))
        found.sort()
        return ((left, right) for *_, left, right in found)

    # ── tokens around a prompt ────────────────────────────────────────────────────────────────────────────────────

    def _post_processor(self, bos: int | None, eos: int | None) -> Any:
        add_bos = self.is_sentencepiece or self._words.add_bos
        template: list[str] = ["$A"]
        ends = []
        if self._file.field("tokenizer.ggml.add_bos_token", add_bos) and bos is not None:
            template.insert(0, self.tokens[bos])
            ends.append((self.tokens[bos], bos))
        if self._file.field("tokenizer.ggml.add_eos_token", False) and eos is not None:
            template.append(self.tokens[eos])
            ends.append((self.tokens[eos], eos))
        return processors.TemplateProcessing(single=template, special_tokens=list(dict(ends).items()))


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge `a b` into (a, b); either token may begin with a space."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]
