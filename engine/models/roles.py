"""Finds out which roles a chat template knows, by rendering test conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Any] | None], str]

STANDARD = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of OpenAI's API. A template that accepts any role, as ChatML does, knows these and those that it names."""

_TAG = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_KEY = re.compile(r"""(?<=[\w\])])\[\s*(['"])\w+\1\s*\]""")
"""A key such as in `message['role']`, which is not a role."""
_NAME = re.compile(r"""(['"])([A-Za-z0-9_.-]{1,64})\1""")

_MARK = "q7f3kzw1"
_CALL_ID = "abcdefghi"
"""Templates of Mistral require nine letters or digits."""
_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}


class Roles:
    """The roles of one template. Any thread may use it.

    Args:
        source: text of the template.
        render: renders messages and tools with the template; any exception means that the template refuses them.
    """

    def __init__(self, source: str, render: Render) -> None:
        self._render = render
        self._candidates = STANDARD | _named_roles(source)
        self._verdicts: dict[str, bool | None] = {}

    def problem(self, messages: Sequence[Message]) -> str | None:
        """Return a message that begins with the key of the first unknown role; None: the template knows all roles."""
        for i, message in enumerate(messages):
            role = message.get("role")
            if not isinstance(role, str):
                continue
            if role not in self._candidates:
                return f"messages[{i}].role: {role[:64]!r} is not known to the model's chat template, {self._known()}"
            if self._shown(role) is False and any(map(self._shown, self._candidates)):
                return f"messages[{i}].role: the model's chat template leaves out messages of {role!r}, {self._known()}"
        return None

    def refused(self, messages: Sequence[Message]) -> int | None:
        """Return the index of the first message whose role the template refuses in each test conversation."""
        roles = (message.get("role") for message in messages)
        return next((i for i, role in enumerate(roles) if role in self._candidates and self._shown(role) is None), None)

    def _known(self) -> str:
        return f"which knows {', '.join(sorted(role for role in self._candidates if self._shown(role)))}"

    def _shown(self, role: str) -> bool | None:
        """Return whether the template renders the text of messages of this role; None: it refuses them."""
        if role not in self._verdicts:
            self._verdicts[role] = self._try(role)
        return self._verdicts[role]

    def _try(self, role: str) -> bool | None:
        found: bool | None = None
        for messages in _conversations(role):
            for tools in (None, [_TOOL]):
                try:
                    text = self._render(messages, tools)
                except Exception:  # noqa: BLE001 - a template may raise anything for a conversation that it does not expect
                    continue
                if _MARK in text:
                    return True
                found = False
        return found


def _conversations(role: str) -> list[list[Message]]:
    """Return test conversations with a message of this role at each place where templates expect one."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    tried = {"role": role, "content": _MARK, "name": "f", "tool_call_id": _CALL_ID}
    return [[tried, user], [user, tried], [user, answer, tried], [user, calling, tried], [tried]]


def _named_roles(source: str) -> frozenset[str]:
    """Return the strings in those tags of a template that mention roles."""
    tags = (match[0] for match in _TAG.finditer(source) if "role" in match[0])
    return frozenset(match[2] for tag in tags for match in _NAME.finditer(_KEY.sub("", tag))) - {"role"}
