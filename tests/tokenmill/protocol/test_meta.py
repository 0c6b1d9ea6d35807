"""`meta` is read as operators write it, and misspelt fields and values are reported."""

from __future__ import annotations

import pytest

from tests.tokenmill.mini import Queue
from tokenmill.protocol.calls import QueueFull
from tokenmill.protocol.job import JobEntry
from tokenmill.protocol.meta import Meta, paused

BODY = b'{"prompt":"x"}'


@pytest.mark.parametrize("word", ["1", "true", "True", "YES", "on", " on "])
def test_every_word_for_on_pauses_the_queue(queue: Queue, word: str) -> None:
    scripts = queue.scripts()
    scripts.enqueue(JobEntry("a", BODY))
    queue.redis.hset(queue.keys.meta, "paused", word)
    assert scripts.read(1) is None
    assert paused(queue.redis, queue.keys)
    assert Meta.of(queue.redis.hgetall(queue.keys.meta)) == Meta(paused=True)


@pytest.mark.parametrize("word", ["0", "false", "No", "off"])
def test_every_word_for_off_lets_workers_read(queue: Queue, word: str) -> None:
    scripts = queue.scripts()
    scripts.enqueue(JobEntry("a", BODY))
    queue.redis.hset(queue.keys.meta, "paused", word)
    assert len(scripts.read(1) or ()) == 1
    assert not paused(queue.redis, queue.keys)
    assert Meta.of(queue.redis.hgetall(queue.keys.meta)) == Meta()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("paused", "treu", "paused is 'treu': write 1 or 0"),
        ("paused", "", "paused is '': write 1 or 0"),
        ("pause", "1", "unknown field 'pause': did you mean paused?"),
        ("max_dept", "5", "unknown field 'max_dept': did you mean max_depth?"),
        ("Max_Depth", "5", "unknown field 'Max_Depth': did you mean max_depth?"),
        ("max_per_tenant", "many", "max_per_tenant is 'many': write a whole number"),
        ("max_depth", "-1", "max_depth is '-1': write a whole number"),
        ("lease_ms", "30s", "lease_ms is '30s': write a whole number"),
        ("zzz", "5", "unknown field 'zzz'"),
    ],
)
def test_misspelt_fields_and_values_of_meta_are_reported(name: str, value: str, told: str) -> None:
    assert Meta.of({name.encode(): value.encode()}) == Meta(problems=(told,))


def test_of_many_misspelt_fields_the_first_are_named() -> None:
    found = Meta.of({f"zz{n}".encode(): b"" for n in range(9)}).problems
    assert (len(found), found[-1]) == (6, "and 4 more")


def test_a_malformed_number_in_meta_has_no_effect_and_breaks_no_script(queue: Queue) -> None:
    scripts, keys = queue.scripts(), queue.keys
    names = ("max_depth", "max_per_tenant", "max_running_per_tenant", "lease_ms", "result_ttl_seconds")
    queue.redis.hset(keys.meta, mapping=dict.fromkeys(names, "many"))
    scripts.enqueue(JobEntry("a", BODY, tenant="t"))
    (found,) = scripts.read(1) or ()
    assert found.fields[b"id"] == b"a"
    scripts.enqueue(JobEntry("b", BODY, tenant="t"))
    scripts.cancel("b")
    assert 80_000 < queue.redis.ttl(keys.result("b")) <= 86_400
    queue.redis.hset(keys.meta, "max_depth", " 1 ")
    with pytest.raises(QueueFull):
        scripts.enqueue(JobEntry("c", BODY))
