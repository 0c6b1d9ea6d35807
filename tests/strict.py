"""Run Lua scripts so that a key that is not in KEYS is an error, as in Dragonfly and serverless services.

`strict(source)` puts a `redis` in front of a script whose `call` and `pcall` know where each command's keys stand and
raise an error for one that is not in KEYS. The fixture `strict_scripts` (see the conftests) runs every script of every
test so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tokenmill.protocol import lua

SHIM = """
local redis = (function(real)
  local given = {}
  for _, key in ipairs(KEYS) do given[key] = true end
  local first = { XINFO = 3, XGROUP = 3 }
  local one = {}
  for name in string.gmatch('XRANGE XPENDING XCLAIM XACK XDEL XADD XLEN TYPE GET SET EXPIRE PERSIST '
      .. 'HGET HMGET HSET HDEL HGETALL HINCRBY ZADD ZREM ZSCORE ZCARD ZCOUNT ZRANGEBYSCORE ZREVRANGEBYSCORE '
      .. 'SADD SREM SCARD SISMEMBER SRANDMEMBER', '%S+') do one[name] = true end
  local function keys_of(arguments)
    local name = arguments[1]
    if name == 'TIME' then return {} end
    if name == 'EXISTS' or name == 'DEL' then return { unpack(arguments, 2) } end
    if name == 'XREADGROUP' then
      for at, word in ipairs(arguments) do
        if word == 'STREAMS' then return { arguments[at + 1] } end
      end
    end
    if first[name] then return { arguments[first[name]] } end
    if one[name] then return { arguments[2] } end
    error('tests/strict.py does not know where the keys of ' .. tostring(name) .. ' stand')
  end
  local function checked(call)
    return function(...)
      for _, key in ipairs(keys_of({ ... })) do
        if not given[key] then error('UNDECLARED key ' .. tostring(key) .. ' of ' .. tostring((...))) end
      end
      return call(...)
    end
  end
  return { call = checked(real.call), pcall = checked(real.pcall) }
end)(redis)
"""


def strict(source: str) -> str:
    """A script that raises an error where it touches a key that is not in KEYS."""
    first, newline, rest = source.partition("\n")
    return f"{first}{newline}{SHIM}{rest}" if first.startswith("#!") else SHIM + source


@pytest.fixture(scope="session", autouse=True)
def strict_scripts() -> Iterator[None]:
    """Every script that the process of the tests runs is strict."""
    with pytest.MonkeyPatch.context() as patch:
        plain = lua.source
        patch.setattr(lua, "source", functools.cache(lambda name, shebang=True: strict(plain(name, shebang))))
        lua._sha.cache_clear()
        yield
    lua._sha.cache_clear()
