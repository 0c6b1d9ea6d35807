"""Tokenizers in GGUF files give the publisher's ids, and what a file does not say is llama.cpp's default."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from engine.models.chat import ChatError
from engine.models.chat import Tokenizer as Ours
from engine.models.gguf import GgufFile
from engine.models.weights import LoadError
from tests.models import vocabularies
from tests.models.vocabularies import BOS, BYTES, END, EOS, NASTY, SPECIALS, UNK

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN = rf"{_WORD}|{_CAPITALS}|\p{{N}}{_TAIL}"
GPT4O = rf"{_WORD}{_SHORT}|{_CAPITALS}{_SHORT}|\p{{N}}{{1,3}}{_TAIL}"

PUBLISHED: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": vocabularies.byte_level,
    "llama-bpe": lambda: vocabularies.byte_level(LLAMA3, bos=True, ignore_merges=True),
    "dbrx": lambda: vocabularies.byte_level(LLAMA3),
    "smaug-bpe": lambda: vocabularies.byte_level(LLAMA3),
    "qwen2": lambda: vocabularies.byte_level(QWEN2, nfc=True),
    "deepseek-r1-qwen": lambda: vocabularies.byte_level(QWEN2, nfc=True),
    "smollm": lambda: vocabularies.byte_level(digits=True),
    "starcoder": lambda: vocabularies.byte_level(digits=True),
    "refact": lambda: vocabularies.byte_level(digits=True),
    "command-r": lambda: vocabularies.byte_level(digits=True, nfc=True),
    "tekken": lambda: vocabularies.byte_level(TEKKEN, bos=True, ignore_merges=True),
    "gpt-4o": lambda: vocabularies.byte_level(GPT4O),
}


def write(
    path: Path,
    tokens: list[str],
    *,
    model: str = "gpt2",
    architecture: str = "llama",
    types: list[int] | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    **keys: Any,
) -> GgufFile:
    """A file with a tokenizer and nothing else; `keys` are those of `tokenizer.ggml.`; None leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    if types is not None:
        writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    keys = {"bos_token_id": BOS, "eos_token_id": EOS, **keys}
    for key, value in keys.items():
        name = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif value is not None:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def kinds(tokens: list[str], **others: int) -> list[int]:
    """The types of tokens: control, bytes, normal, and `others` by their text."""
    special = dict.fromkeys(SPECIALS, int(gguf.TokenType.CONTROL)) | {"<unk>": int(gguf.TokenType.UNKNOWN)}
    known = {**special, **dict.fromkeys(BYTES, int(gguf.TokenType.BYTE)), **others}
    return [known.get(token, int(gguf.TokenType.NORMAL)) for token in tokens]


def byte_level_file(path: Path, made: Tokenizer, **keys: Any) -> GgufFile:
    """What a converter writes of a byte-level tokenizer."""
    vocabulary = made.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    types = kinds(tokens, **keys.pop("kinds", {}))
    return write(path, tokens, types=types, merges=merges, **keys)


def sentencepiece_file(path: Path, **keys: Any) -> GgufFile:
    """What a converter writes of a SentencePiece model."""
    pieces = vocabularies.sentencepiece_vocabulary()
    tokens = [piece for piece, _ in pieces]
    types = kinds(tokens, **keys.pop("kinds", {}))
    return write(path, tokens, model="llama", types=types, scores=[score for _, score in pieces], pre="default", **keys)


def ours(file: GgufFile) -> Ours:
    return Ours(file.tokenizer())


def theirs(made: Tokenizer) -> Ours:
    return Ours(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"))


def check_equal(found: Ours, published: Ours) -> None:
    for text in NASTY:
        ids = published.encode(text)
        assert found.encode(text) == ids, text
        assert found.decode(ids) == published.decode(ids)
        assert found.decode(ids, skip_special_tokens=False) == published.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_byte_level_kinds_equal_the_publishers_tokenizer(tmp_path: Path, kind: str) -> None:
    made = PUBLISHED[kind]()
    check_equal(ours(byte_level_file(tmp_path / "x.gguf", made, pre=kind)), theirs(made))


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [("prepend", {}), ("prepend", {"add_space_prefix": True}), ("none", {"add_space_prefix": False})],
)
def test_sentencepiece_models_equal_the_publishers_tokenizer(tmp_path: Path, prefix: str, keys: dict[str, Any]) -> None:
    check_equal(ours(sentencepiece_file(tmp_path / "x.gguf", **keys)), theirs(vocabularies.sentencepiece(prefix)))


def test_sentencepiece_joins_what_gives_the_best_score(tmp_path: Path) -> None:
    tokens = [*SPECIALS, *BYTES, "▁", "a", "b", "c", "ab", "bc", "abc", "▁a"]
    scores = [0.0] * (len(tokens) - 8) + [-10.0] * 4 + [-3.0, -2.0, -1.0, -4.0]
    file = write(tmp_path / "x.gguf", tokens, model="llama", types=kinds(tokens), scores=scores, add_bos_token=False)
    found = ours(file)
    for text, pieces in [("abc", ["▁", "abc"]), ("ab", ["▁", "ab"]), ("a", ["▁a"]), ("cab", ["▁", "c", "ab"])]:
        assert [tokens[i] for i in found.encode(text)] == pieces


def test_a_space_is_put_before_the_text_only_where_the_file_is_mistrals(tmp_path: Path) -> None:
    pieces = [
        ("[INST]", 0.0) if piece == "<|im_start|>" else (piece, s)
        for piece, s in vocabularies.sentencepiece_vocabulary()
    ]
    tokens = [piece for piece, _ in pieces]
    types = kinds(tokens, **{"[INST]": int(gguf.TokenType.CONTROL)})
    file = write(tmp_path / "x.gguf", tokens, model="llama", types=types, scores=[score for _, score in pieces])
    ids = ours(file).encode("[INST] the")
    assert [tokens[i] for i in ids] == ["<s>", "[INST]", "▁the"]


def test_a_model_of_phi3_takes_the_white_space_behind_its_markers(tmp_path: Path) -> None:
    found = ours(sentencepiece_file(tmp_path / "x.gguf", architecture="phi3"))
    assert found.encode("<|im_start|>\nthe") == found.encode("<|im_start|>the")
    assert found.encode("<s>\nthe") != found.encode("<s>the")


@pytest.mark.parametrize(
    ("kind", "keys", "ids"),
    [
        ("llama-bpe", {}, (BOS, None)),
        ("llama-bpe", {"add_bos_token": False}, (None, None)),
        ("tekken", {}, (BOS, None)),
        ("qwen2", {}, (None, None)),
        ("qwen2", {"add_bos_token": True}, (BOS, None)),
        ("gpt-2", {"add_eos_token": True}, (None, EOS)),
        ("llama", {}, (BOS, None)),
        ("llama", {"bos_token_id": None, "eos_token_id": None}, (BOS, None)),
        ("llama", {"add_bos_token": False, "add_eos_token": True}, (None, EOS)),
    ],
)
def test_the_tokens_around_a_prompt_are_those_of_the_file_or_of_its_kind(
    tmp_path: Path, kind: str, keys: dict[str, Any], ids: tuple[int | None, int | None]
) -> None:
    if kind == "llama":
        file = sentencepiece_file(tmp_path / "x.gguf", **keys)
    else:
        file = byte_level_file(tmp_path / "x.gguf", PUBLISHED[kind](), pre=kind, **keys)
    found = ours(file).encode("the")
    assert (found[0] if found[0] == BOS else None, found[-1] if found[-1] == EOS else None) == ids
    assert (ours(file).encode("<s>the").count(BOS)) == 1


def test_sentencepiece_has_llamas_ids_where_the_file_names_none(tmp_path: Path) -> None:
    file = sentencepiece_file(tmp_path / "x.gguf", bos_token_id=None, eos_token_id=None)
    made = file.tokenizer()
    assert (made.bos_token_id, made.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    "text",
    ["<|eot_id|>", "<|end|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<EOT>"],
)
def test_ends_of_turn_are_known_by_their_text(tmp_path: Path, text: str) -> None:
    made = vocabularies.byte_level()
    made.add_special_tokens([AddedToken(text, special=True)])
    number = made.token_to_id(text)
    for n, kind in enumerate([gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]):
        file = byte_level_file(tmp_path / f"{n}.gguf", made, kinds={text: int(kind)})
        assert file.eos_token_ids() == {EOS, END, number}
    assert ours(file).decode([number]) == ""


def test_text_that_merges_to_an_end_is_no_end(tmp_path: Path) -> None:
    tokens = [*SPECIALS[:2], "x", *"<EOT>", "<E", "<EO", "<EOT", "<EOT>"]
    merges = ["< E", "<E O", "<EO T", "<EOT >"]
    assert (
        write(tmp_path / "x.gguf", tokens, types=kinds(tokens), merges=merges, eos_token_id=None).eos_token_ids()
        == set()
    )


def test_ends_are_named_by_their_keys(tmp_path: Path) -> None:
    made = vocabularies.byte_level()
    file = byte_level_file(tmp_path / "x.gguf", made, eot_token_id=made.token_to_id("T"), eom_token_id=10**6)
    assert file.eos_token_ids() == {EOS, END, made.token_to_id("T")}


def test_tokens_that_a_user_defined_are_text_that_is_matched_first(tmp_path: Path) -> None:
    made = vocabularies.byte_level()
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("the quick", normalized=False)])
    user = int(gguf.TokenType.USER_DEFINED)
    file = byte_level_file(tmp_path / "x.gguf", made, pre="gpt-2", kinds={"<think>": user, "the quick": user})
    found = ours(file)
    check_equal(found, theirs(made))
    for text in ("a<think>b", "the quick fox"):
        assert found.encode(text) == theirs(made).encode(text)
        assert found.decode(found.encode(text)) == text
    gemma = sentencepiece_file(tmp_path / "gemma.gguf", add_space_prefix=False, kinds={"▁the": user})
    ids = ours(gemma).encode("of the the")
    assert ids.count(gemma.vocabulary.tokens.index(" the")) == 2
    assert ours(gemma).decode(ids) == "of the the"


def test_a_file_without_types_has_its_specials_by_keys_and_ends(tmp_path: Path) -> None:
    made = vocabularies.byte_level()
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    file = write(tmp_path / "x.gguf", tokens, merges=merges, pre="gpt-2", unknown_token_id=UNK)
    ids = ours(file).encode("<s>the<|im_end|>")
    assert (ids[0], ids[-1]) == (BOS, END)
    assert ours(file).decode(ids) == "the"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "viking"}, r"tokenizer\.ggml\.pre 'viking'"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model 't5'"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores"),
        ({"merges": ["a nowhere"]}, r"tokenizer\.ggml\.merges"),
        ({"merges": None}, r"tokenizer\.ggml\.merges"),
        ({"types": [1]}, r"tokenizer\.ggml\.token_type"),
    ],
)
def test_an_unknown_value_is_refused_with_its_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tokens = [*SPECIALS, "a", "b"]
    usual: dict[str, Any] = {"types": kinds(tokens), "merges": [], "pre": "gpt-2"}
    with pytest.raises(LoadError, match=message):
        write(tmp_path / "x.gguf", tokens, **usual | change).tokenizer()


def test_a_file_that_names_no_kind_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = ours(byte_level_file(tmp_path / "x.gguf", vocabularies.byte_level()))
    assert "tokenizer.ggml.pre" in caplog.text
    assert found.decode(found.encode("the quick 12345")) == "the quick 12345"


# ── chat templates ────────────────────────────────────────────────────────────────────────────────────────────────────

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    "{% for m in messages %}\n  {% if loop.first %}\n{% continue %}{% endif %}{{ m | tojson }}\n{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools is none }}",
    "{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ unk_token is defined }}{{ mode | default('x') }}",
    "{% if add_generation_prompt %}{{ tools | map(attribute='function.name') | join(',') }}{% endif %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_gives_what_it_gives_in_transformers(tmp_path: Path, template: str) -> None:
    made = vocabularies.byte_level()
    hf = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    keys = {"tokenizer.chat_template": template, "unknown_token_id": UNK}
    found = byte_level_file(tmp_path / "x.gguf", made, pre="gpt-2", **keys).tokenizer()
    messages = [{"role": "user", "content": " <é> & 世界 "}, {"role": "assistant", "content": "y"}]
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    for tools in (None, [tool]):
        want = _outcome(hf.apply_chat_template, messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert _outcome(found.apply_chat_template, messages, tools=tools) == want


def _outcome(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except Exception as error:  # noqa: BLE001 - which one is part of the outcome
        return type(error)


def test_a_template_in_a_file_cannot_reach_python(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__ }}"
    file = byte_level_file(
        tmp_path / "x.gguf", vocabularies.byte_level(), pre="gpt-2", **{"tokenizer.chat_template": template}
    )
    with pytest.raises(jinja2.TemplateError):
        file.tokenizer().apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(ChatError):
        ours(file).encode_chat([{"role": "user", "content": "x"}])


def test_a_file_without_a_template_has_none(tmp_path: Path) -> None:
    found = ours(byte_level_file(tmp_path / "x.gguf", vocabularies.byte_level(), pre="gpt-2"))
    assert not found.has_chat_template
