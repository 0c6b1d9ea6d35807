"""Scripts touch declared keys only (tests run them with a check, tests/strict.py), and take one JSON request."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from redis.exceptions import RedisError, ResponseError

from tests.strict import strict
from tests.tokenmill.mini import Queue
from tokenmill.protocol.lua import AGAIN_TIMES, Runner

SCRIPTS = {
    file.name.removesuffix(".lua"): file.read_text("utf-8")
    for file in files("tokenmill.protocol.lua").iterdir()
    if file.name.endswith(".lua")
}


def test_a_strict_script_refuses_an_undeclared_key(queue: Queue) -> None:
    script = strict("redis.call('SET', KEYS[1], '1') return redis.pcall('GET', ARGV[1])")
    key, other = queue.keys.meta, queue.keys.open
    assert queue.redis.eval(script, 2, key, other, other) is None
    with pytest.raises(RedisError):  # fakeredis puts a line break into the message, which its protocol does not allow
        queue.redis.eval(script, 1, key, other)


def test_only_count_keys_builds_key_names_in_lua() -> None:
    """All other functions take keys from KEYS; names that are built go through `undeclared` before they are used."""
    for name, text in SCRIPTS.items():
        code = re.sub(r"--.*", "", text)
        assert len(re.findall(r"root \.\. '", code)) == (5 if name == "common" else 0), name
        if "count_keys" in code:
            assert "undeclared" in code, name


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - {"common", "publish"}))
def test_every_script_names_its_keys_at_the_top_and_takes_one_json_request(name: str) -> None:
    header, code = re.fullmatch(r"((?:[#-][^\n]*\n)+)(.*)", SCRIPTS[name], re.S).groups()  # type: ignore[union-attr]
    documented = re.search(r"^-- KEYS (.*)", header, re.M)
    top, _, rest = code.partition("\n\n")
    assert documented
    keys = [int(number) for number in re.findall(r"KEYS\[(\d+)\]", code)]
    assert keys == list(range(1, len(keys) + 1)), "each key is used once, in order"
    if "then for each" not in documented[1]:
        assert len(documented[1].split()) == len(keys)
    assert top.count("cjson.decode(ARGV[1])") == 1
    assert "ARGV" not in rest
    assert not re.search(r"KEYS\[\d+\]", rest)


def test_a_script_that_asks_for_keys_without_end_is_an_error(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, asked = Runner(queue.redis), 0

    def reply(*command: object) -> list[bytes]:
        nonlocal asked
        asked += 1
        return [b"AGAIN", b"key"]

    monkeypatch.setattr(runner, "_execute", reply)
    with pytest.raises(ResponseError, match="cancel"):
        runner.run("cancel", ["a"], [])
    assert asked == AGAIN_TIMES + 1
