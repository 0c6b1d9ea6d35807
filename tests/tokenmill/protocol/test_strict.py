"""Scripts touch declared keys only: tests run them under a guard that sees to it."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from redis.exceptions import RedisError, ResponseError

from tests.strict import strict
from tests.tokenmill.mini import Queue
from tokenmill.protocol.lua import AGAIN_TIMES, Runner


def test_the_guard_refuses_a_key_that_was_not_declared(queue: Queue) -> None:
    script = strict("redis.call('SET', KEYS[1], '1') return redis.pcall('GET', ARGV[1])")
    key, other = queue.keys.meta, queue.keys.open
    assert queue.redis.eval(script, 2, key, other, other) is None
    with pytest.raises(RedisError):  # fakeredis breaks the line of the message, and its protocol with it
        queue.redis.eval(script, 1, key, other)


def test_only_one_function_makes_names_of_keys() -> None:
    """All others take them from KEYS; what it makes goes through `undeclared` before it is used."""
    for file in files("tokenmill.protocol").iterdir():
        if file.name.endswith(".lua"):
            code = re.sub(r"--.*", "", file.read_text("utf-8"))
            made = len(re.findall(r"root \.\. '", code))
            assert made == (5 if file.name == "common.lua" else 0), file.name
            if "count_keys" in code:
                assert "undeclared" in code, file.name


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
