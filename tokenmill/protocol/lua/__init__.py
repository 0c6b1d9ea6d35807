"""Load and run the Lua scripts of this folder.

    Runner(client).run("renew", keys, [encode(lane="high", …)])     # one EVALSHA; loads the script if it is missing
    await AsyncRunner(client).run(…)

A script is `common.lua` followed by its own file. Its first argument is a JSON object, the request; opaque bytes
follow as arguments of their own. (`publish`, called for every step, takes flat JSON lists instead.) A script touches
only keys in KEYS. Where a key's name depends on data in Redis, the script replies `AGAIN` with that name before it
writes data of the job (at most it renews the caller's lease and removes foreign values), and is run again with the key
behind the other keys. The line `#!lua flags=…` allows an ending while Redis is out of memory; it is left out for a
server that does not know it (fakeredis, Redis 6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import orjson
import redis
import redis.asyncio as aioredis
from redis.exceptions import NoScriptError, ResponseError

AGAIN_TIMES = 8
"""How often a script may ask for more keys; each time the job was changed between two calls."""

_TEXTS = {file.name: file.read_text("utf-8") for file in files(__name__).iterdir() if file.name.endswith(".lua")}
"""All files, read with the code that calls them: an upgrade in place changes no running process."""


@cache
def source(name: str, shebang: bool = True) -> str:
    """Return the text of a script, with or without its first `#!` line."""
    own = _TEXTS[f"{name}.lua"]
    first = ""
    if own.startswith("#!"):
        line, _, own = own.partition("\n")
        first = line + "\n" if shebang else ""
    return f"{first}{_TEXTS['common.lua']}\n{own}"


@cache
def _sha(name: str, shebang: bool) -> str:
    return hashlib.sha1(source(name, shebang).encode(), usedforsecurity=False).hexdigest()


def encode(**request: Any) -> bytes:
    """Encode a script's request as JSON, without the fields that are None.

    Nones are left out since cjson reads null as a value that is not nil. Bytes, and texts of megabytes, are separate
    arguments after the request.
    """
    return orjson.dumps({name: value for name, value in request.items() if value is not None})


class _Shared:
    """The common part of both runners. `shebang` becomes False when the server refuses the `#!` line."""

    shebang: bool = True

    def command(self, name: str, keys: Sequence[str | bytes], args: Sequence[Any]) -> tuple[Any, ...]:
        return ("EVALSHA", _sha(name, self.shebang), len(keys), *keys, *args)

    def more_keys(self, name: str, reply: Any, times: int) -> list[str | bytes]:
        """Return the keys that a script asks for; empty if `reply` is a proper reply.

        Raises:
            ResponseError: the script was given more keys `times` times, the limit, and still asks.
        """
        if not (isinstance(reply, list) and reply and reply[0] == b"AGAIN"):
            return []
        if times >= AGAIN_TIMES:
            raise ResponseError(
                f"script {name} asked for more keys {times} times, as its job keeps changing; try again"
            )
        return list(reply[1:])

    def to_repeat(self, reply: Any, sent: bool) -> bool:
        """Return whether to send the script again: the server lacks it, or cannot compile the `#!` line.

        `sent`: whether the line was in the call.
        """
        if isinstance(reply, NoScriptError):
            return True
        return isinstance(reply, ResponseError) and self.refused_shebang(reply, sent)

    def refused_shebang(self, error: ResponseError, sent: bool | None = None) -> bool:
        """Return whether the server could not compile the `#!` line; the line is then left out of later calls.

        `sent`: whether the line was in the call; default: whether it is in calls now.
        """
        if not (self.shebang if sent is None else sent) or "near '#'" not in str(error):
            return False
        self.shebang = False
        return True


class Runner(_Shared):
    """Runs scripts on a synchronous client; as thread-safe as that client."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self._execute: Callable[..., Any] = client.execute_command

    def run(self, name: str, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        """Run a script and return its reply.

        Raises:
            redis.RedisError: as for any command.
        """
        times = 0
        while True:
            try:
                reply = self._execute(*self.command(name, keys, args))
                more = self.more_keys(name, reply, times)
                if not more:
                    return reply
                keys, times = [*keys, *more], times + 1
            except NoScriptError:
                self._load(name)
            except ResponseError as error:
                if not self.refused_shebang(error):
                    raise

    def run_all(self, calls: Sequence[tuple[str, Sequence[str | bytes], Sequence[Any]]]) -> list[Any]:
        """Run several scripts in one round trip and return their replies.

        Raises:
            redis.RedisError: of the first call that failed; the other calls may have been executed.
        """
        if len(calls) == 1:
            return [self.run(*calls[0])]
        pipe = self.client.pipeline(transaction=False)
        send: Callable[..., Any] = pipe.execute_command
        shebang = self.shebang
        for name, keys, args in calls:
            send(*self.command(name, keys, args))
        replies = pipe.execute(raise_on_error=False)
        for at, reply in enumerate(replies):
            name, keys, args = calls[at]
            more = self.more_keys(name, reply, 0)
            if more or self.to_repeat(reply, shebang):
                replies[at] = self.run(name, [*keys, *more], args)
            elif isinstance(reply, Exception):
                raise reply
        return replies

    def _load(self, name: str) -> None:
        try:
            self.client.script_load(source(name, self.shebang))
        except ResponseError as error:
            if not self.refused_shebang(error):
                raise
            self.client.script_load(source(name, self.shebang))


class AsyncRunner(_Shared):
    """Runs scripts on an asyncio client."""

    def __init__(self, client: aioredis.Redis) -> None:
        self.client = client
        self._execute: Callable[..., Any] = client.execute_command

    async def run(self, name: str, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        """Same as `Runner.run`."""
        times = 0
        while True:
            try:
                reply = await self._execute(*self.command(name, keys, args))
                more = self.more_keys(name, reply, times)
                if not more:
                    return reply
                keys, times = [*keys, *more], times + 1
            except NoScriptError:
                await self._load(name)
            except ResponseError as error:
                if not self.refused_shebang(error):
                    raise

    async def run_all(self, calls: Sequence[tuple[str, Sequence[str | bytes], Sequence[Any]]]) -> list[Any]:
        """Same as `Runner.run_all`."""
        if len(calls) == 1:
            return [await self.run(*calls[0])]
        pipe = self.client.pipeline(transaction=False)
        send: Callable[..., Any] = pipe.execute_command
        shebang = self.shebang
        for name, keys, args in calls:
            send(*self.command(name, keys, args))
        replies = await pipe.execute(raise_on_error=False)
        for at, reply in enumerate(replies):
            name, keys, args = calls[at]
            more = self.more_keys(name, reply, 0)
            if more or self.to_repeat(reply, shebang):
                replies[at] = await self.run(name, [*keys, *more], args)
            elif isinstance(reply, Exception):
                raise reply
        return replies

    async def _load(self, name: str) -> None:
        try:
            await self.client.script_load(source(name, self.shebang))
        except ResponseError as error:
            if not self.refused_shebang(error):
                raise
            await self.client.script_load(source(name, self.shebang))
