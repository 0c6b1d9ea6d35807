"""Tokenizers of the kinds that publishers ship, trained on the spot, and strings that are hard for them."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog and the cat; the worker feeds the model, token by token.",
    "  two spaces, then\n\nnew lines and\ttabs. don't, DON'T, we'll; 12345 and 2024 or 3.14159.",
    "Grüße aus Köln, 世界 and 한국어 with 🔥 in between. the the of of in in a a is is to to for for",
]
NASTY = [
    "",
    " ",
    "   ",
    "the",
    " the",
    "  the  quick ",
    "the\n\n\nfox\n",
    "\n the",
    "\ttab\t\tTAB \t ",
    "1234567 1 22 333 4444 3.14159",
    "don't DON'T we'll WE'LL it's",
    "世界 한국어 Grüße",
    "🔥 👨‍👩‍👧 🏳️‍🌈",
    "é e\u0301 \u212b Å A\u030a ﬁ",
    "ᄒ\u1161\u11ab \u0928\u093f\u092e\u0938\u094d\u0924\u0947",
    "a<|im_end|>b <|im_start|>system\nSay",
    "x</s>y <s>the</s>",
    "▁the ▁ ▁▁",
    "<0x0A> <unk>",
    "!!! ... ?!?! ---/// {}[]()",
    "foo_bar(baz) == 'qux' # 42%",
    "\u00a0non\u00a0breaking\u2003wide\u200bzero",
    "\x00\x01\x7f",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
UNK, BOS, EOS, START, END = range(5)
BYTES = [f"<0x{i:02X}>" for i in range(256)]


@cache
def _merges(size: int) -> tuple[tuple[str, str], ...]:
    """Merges of words that begin with ▁, in the order in which they were learnt."""
    import json

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    return tuple(tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"])


def sentencepiece_vocabulary(size: int = 260) -> list[tuple[str, float]]:
    """(piece, score) by id as SentencePiece's BPE has them: specials, bytes, merged pieces best first, characters."""
    merged = list(dict.fromkeys(left + right for left, right in _merges(size)))
    characters = sorted({char for text in TEXT[:2] for char in text.replace(" ", "▁") if char > " "} | {"ü", "世"})
    pieces = [(special, 0.0) for special in SPECIALS] + [(byte, 0.0) for byte in BYTES]
    pieces += [(piece, -float(rank)) for rank, piece in enumerate(merged)]
    return pieces + [(c, -float(len(merged) + i)) for i, c in enumerate(characters) if c not in merged]


def sentencepiece(prefix: str = "prepend") -> Tokenizer:
    """As published with Llama 2 (`prepend`), Mistral 0.3 (`metaspace`) or Gemma (`none`: no space before the text)."""
    vocabulary = {piece: i for i, (piece, _) in enumerate(sentencepiece_vocabulary())}
    merges = [pair for pair in _merges(260) if all(part in vocabulary for part in (*pair, "".join(pair)))]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif prefix == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps if prefix == "none" else [*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def byte_level(
    pattern: str | None = None, nfc: bool = False, digits: bool = False, bos: bool = False, ignore_merges: bool = False
) -> Tokenizer:
    """As published with GPT-2 and its many relatives: what they differ in is how they cut text into words."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        first.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer
