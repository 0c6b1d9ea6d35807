"""Detokenising and stop strings, with scripted ids."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest

from engine.sampling.text import TextStream, TokenBytes


def pieces(*texts: str | bytes) -> TokenBytes:
    """A made-up vocabulary: id i stands for texts[i], bytes or text."""
    table = [t.encode() if isinstance(t, str) else t for t in texts]
    return lambda token, skip_special: table[token]


def feed(stops: Sequence[str], *texts: str | bytes, min_tokens: int = 0) -> tuple[list[str], str | None]:
    """(what was sent after each id and at the end, the stop string)."""
    stream = TextStream(pieces(*texts), stops)
    sent = []
    for i in range(len(texts)):
        stop = stream.push(i, i + 1 >= min_tokens)
        sent.append(stream.take()[0])
        if stop is not None:
            break
    else:
        stream.finish()
        stop = None
        sent.append(stream.take()[0])
    assert "".join(sent) == stream.text
    return sent, stop


TEXTS = ["한국어 🔥 世界 👨‍👩‍👧 é é", "plain", "🔥🔥🔥🔥", "\ufffd is a real character"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_delta_splits_a_character_wherever_the_token_borders_fall(text: str, size: int) -> None:
    data = text.encode()
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    sent, _ = feed([], *parts)
    assert "".join(sent) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in s for s in sent)


def test_text_flows_through_endless_broken_bytes_in_linear_time() -> None:
    stream = TextStream(pieces(b"\x9f", b"ok"))
    longest_gap, gap = 0, 0
    begin = time.perf_counter()
    for _ in range(20_000):
        stream.push(0)
        gap = 0 if stream.take()[0] else gap + 1
        longest_gap = max(longest_gap, gap)
    assert longest_gap < 10
    stream.push(1)
    stream.finish()
    stream.take()
    assert stream.text == "\ufffd" * 20_000 + "ok"
    assert time.perf_counter() - begin < 30  # quadratic would take hours


@pytest.mark.parametrize("silent", [1, 6, 1000])
@pytest.mark.parametrize("text", ["🔥", "한", "é"])
def test_ids_without_text_inside_of_a_character_lose_nothing(text: str, silent: int) -> None:
    raw = text.encode()
    sent, _ = feed([], "a", *[b""] * silent, raw[:1], *[b""] * silent, raw[1:], "b")
    assert "".join(sent) == f"a{text}b"


def test_an_incomplete_character_at_the_end_is_left_out() -> None:
    sent, _ = feed([], "a", b"\xf0\x9f")
    assert sent == ["a", "", ""]
    sent, _ = feed([], "a", b"b\xf0\x9f")
    assert sent == ["a", "b", ""]


def test_a_replacement_character_of_the_model_itself_is_text_at_the_end_too() -> None:
    sent, _ = feed([], "a", "\ufffd")
    assert sent == ["a", "\ufffd", ""]


@pytest.mark.parametrize(
    ("stops", "texts", "sent", "stop"),
    [
        (["one|two"], ["on", "e|", "t", "wo", "x"], "", "one|two"),
        (["q"], ["pqr"], "p", "q"),
        (["END", "EN"], ["xEND"], "x", "EN"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["🔥"], ["x", b"\xf0\x9f", b"\x94\xa5", "y"], "x", "🔥"),
        (["\n", "Bob>"], [" Bob", "!"], " Bob!", None),
        (["\n", "Bob>"], [" Bo"], " Bo", None),
        (["\n"], ["x\n"], "x", "\n"),
        (["b,c"], ["</think>"], "</think>", None),
    ],
)
def test_the_text_ends_before_the_first_stop_string(
    stops: list[str], texts: list[str | bytes], sent: str, stop: str | None
) -> None:
    got, found = feed(stops, *texts)
    assert ("".join(got), found) == (sent, stop)


def test_only_a_real_beginning_of_a_stop_string_is_held_back() -> None:
    sent, _ = feed(["b,c"], "</think>", "b", "x")
    assert sent == ["</think>", "", "bx", ""]


@pytest.mark.parametrize("stops", [["ab"], ["aa", "ba"], ["abc", "c", "bb"]])
def test_text_and_stop_do_not_depend_on_token_borders(stops: list[str]) -> None:
    for letters in itertools.product("abc", repeat=5):
        text = "".join(letters)
        outcomes = set()
        for cuts in itertools.product([0, 1], repeat=4):
            parts, last = [], 0
            for i, cut in enumerate(cuts, 1):
                if cut:
                    parts.append(text[last:i])
                    last = i
            got, stop = feed(stops, *parts, text[last:])
            outcomes.add(("".join(got), stop))
        assert len(outcomes) == 1, (text, outcomes)


def test_a_stop_string_before_min_tokens_does_not_fire_then_or_later() -> None:
    sent, stop = feed(["\n"], "a", "\n", "b", "c", min_tokens=3)
    assert ("".join(sent), stop) == ("a\nbc", None)
    sent, stop = feed(["\n"], "a", "\n", "b", "\n", "c", min_tokens=3)
    assert ("".join(sent), stop) == ("a\nb", "\n")
