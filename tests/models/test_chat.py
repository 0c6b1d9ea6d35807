"""Prompts and chats become the right ids, ids become the right text, and templates fail with a message."""

from __future__ import annotations

import pytest

from engine.models.chat import ChatError, Tokenizer
from tests.models.tiny import BOS, tokenizer

HELLO = [{"role": "user", "content": "Hi"}]


def test_a_raw_prompt_has_exactly_one_bos() -> None:
    ours = Tokenizer(tokenizer())
    assert ours.encode("fox").count(BOS) == 1
    assert ours.encode("<s>fox") == ours.encode("fox")
    assert ours.encode("") == [BOS]


def test_a_tokenizer_without_bos_adds_none() -> None:
    ours = Tokenizer(tokenizer(bos=False))
    assert BOS not in ours.encode("fox")
    assert ours.encode("<s>fox").count(BOS) == 1


def test_a_chat_has_only_the_special_tokens_of_its_template() -> None:
    plain = Tokenizer(tokenizer())
    assert BOS not in plain.encode_chat(HELLO)
    with_bos = Tokenizer(tokenizer(template="{{ bos_token }}{{ messages[0]['content'] }}"))
    assert with_bos.encode_chat(HELLO)[0] == BOS
    assert with_bos.encode_chat(HELLO).count(BOS) == 1


def test_a_chat_ends_where_the_assistant_begins() -> None:
    ours = Tokenizer(tokenizer())
    assert ours.render(HELLO) == "<|user|>Hi<|end|><|assistant|>"
    assert ours.decode(ours.encode_chat(HELLO), skip_special_tokens=False) == ours.render(HELLO)


def test_tools_and_template_variables_reach_the_template() -> None:
    ours = Tokenizer(tokenizer(template="{{ tools | length }} {{ mode }}"))
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    assert ours.render(HELLO, [tool], mode="deep") == "1 deep"


@pytest.mark.parametrize(
    "name",
    [
        *("self", "messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors", "padding"),
        *("truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"),
    ],
)
def test_a_variable_cannot_have_a_name_of_the_machinery(name: str) -> None:
    with pytest.raises(ChatError, match=name):
        Tokenizer(tokenizer()).encode_chat(HELLO, **{name: 1})


@pytest.mark.parametrize("name", ["raise_exception", "range", "cls", "kwargs", "args", "tokenizer", "a b", ""])
def test_every_other_name_is_a_template_variable_or_an_error_of_the_sender(name: str) -> None:
    ours = Tokenizer(tokenizer())
    assert ours.encode_chat(HELLO, **{name: 1}) == ours.encode_chat(HELLO)
    with pytest.raises(ChatError, match="chat template"):
        ours.encode_chat([{"role": "wizard", "content": "x"}], **{name: 1})


@pytest.mark.parametrize("mode", [1, {}, None, "deep"])
def test_a_template_that_fails_for_a_variable_is_the_senders_error(mode: object) -> None:
    ours = Tokenizer(tokenizer(template="{{ mode + 1 }}{{ messages[0].content }}"))
    if mode == 1:
        assert ours.render(HELLO, mode=mode) == "2Hi"
    else:
        with pytest.raises(ChatError, match="chat template"):
            ours.encode_chat(HELLO, mode=mode)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [{"role": "wizard", "content": "x"}],
            "'wizard' is not known to the model's chat template, which knows assistant, system, user",
        ),
        ([{"role": "user", "content": None}], "chat template"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "chat template"),
        ([{"role": "user"}], "chat template"),
        ([], "chat template"),
        ([{}], "chat template"),
    ],
)
def test_a_template_that_refuses_says_why(messages: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ChatError, match=message):
        Tokenizer(tokenizer()).encode_chat(messages)


def test_a_base_model_has_no_template() -> None:
    ours = Tokenizer(tokenizer(template=None))
    assert not ours.has_chat_template
    with pytest.raises(ChatError, match="no chat template"):
        ours.encode_chat(HELLO)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_dict", "add_generation_prompt", "documents"])
def test_parameters_of_the_call_are_not_template_variables(name: str) -> None:
    with pytest.raises(ChatError, match=name):
        Tokenizer(tokenizer()).encode_chat(HELLO, **{name: True})


def test_text_survives_the_round_trip_without_clean_up() -> None:
    ours = Tokenizer(tokenizer(bos=False))
    for text in ("do n't . ", "  two  spaces ", "한국어 🔥 世界 👨‍👩‍👧 é é", "line\n\n\ttab"):
        assert ours.decode(ours.encode(text)) == text


def test_ids_the_tokenizer_does_not_know_add_nothing() -> None:
    ours = Tokenizer(tokenizer())
    fox = ours.encode("fox")
    assert ours.decode([-1, *fox, ours.size, 2**32, 2**70]) == "fox"
    assert ours.decode([]) == ""


def test_special_tokens_are_shown_on_demand_only() -> None:
    ours = Tokenizer(tokenizer())
    ids = ours.encode("a<|end|>b")
    assert ours.decode(ids) == "ab"
    assert ours.decode(ids, skip_special_tokens=False) == "<s>a<|end|>b"


def test_size_counts_added_tokens() -> None:
    made = tokenizer()
    before = len(made)
    made.add_tokens(["<new>"])
    assert Tokenizer(made).size == before + 1
    assert Tokenizer(made, vocab_size=before).size == before
