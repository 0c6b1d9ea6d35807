"""Requests that share a prefix in the cache have equal hashes; others do not."""

from __future__ import annotations

from typing import Any

from tokenmill.batch.prefix import prefix_of

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_prefixes_are_equal_where_the_cache_could_share_something() -> None:
    def chat(*messages: tuple[str, Any], **body: Any) -> int:
        return prefix_of({"messages": [{"role": role, "content": content} for role, content in messages], **body})

    system = ("system", "be brief")
    assert chat(system, ("user", "a")) == chat(system, ("user", "b")) != 0
    assert chat(system, ("user", "a")) != chat(("system", "be long"), ("user", "a"))
    assert chat(system, ("user", "a"), tools=TOOLS) != chat(system, ("user", "a"))
    assert chat(("user", "a"), tools=TOOLS) == chat(("user", "b"), tools=TOOLS) != 0
    assert chat(("user", "x" * 256 + "a")) == chat(("user", "x" * 256 + "b")) == prefix_of({"prompt": "x" * 300}) != 0
    assert prefix_of({"prompt": [*range(64), 1]}) == prefix_of({"prompt": [*range(64), 2]}) != 0
    assert chat(("user", "short")) == prefix_of({"prompt": "short"}) == prefix_of({}) == 0
    assert prefix_of({"messages": ["x"], "prompt": 7}) == prefix_of({"messages": "x"}) == 0
