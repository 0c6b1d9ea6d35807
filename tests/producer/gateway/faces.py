"""The sync and the async client of the `openai` package behind one face, so that each test runs with both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from tests.producer.gateway.harness import GatewayProcess, async_client_of, client_of

Call = Callable[[Any], Any]
"""From a client to what one of its methods returns."""


class Face:
    """One of the two clients: `face(lambda c: c.models.list())` calls a method and returns what it returns.

    Args:
        kind: `sync` or `async`.
        options: arguments of the client.
    """

    def __init__(self, kind: str, gateway: GatewayProcess, key: str = "none", **options: Any) -> None:
        self.kind, self._gateway, self._key, self._options = kind, gateway, key, options

    def of(self, gateway: GatewayProcess, key: str = "none", **options: Any) -> Face:
        """Return the same kind of client for another gateway, key or other options."""
        return Face(self.kind, gateway, key, **options)

    def __call__(self, call: Call) -> Any:
        if self.kind == "sync":
            with client_of(self._gateway, self._key, **self._options) as client:
                return call(client)
        return asyncio.run(self._await(call))

    def items(self, call: Call, enough: Callable[[list[Any]], bool] = lambda _: False) -> list[Any]:
        """Return the items of a stream or of all pages; stop and close it when `enough` says so of those so far."""
        if self.kind == "sync":
            with client_of(self._gateway, self._key, **self._options) as client:
                return self._iterate(call(client), enough)
        return asyncio.run(self._iterate_async(call, enough))

    async def _await(self, call: Call) -> Any:
        async with async_client_of(self._gateway, self._key, **self._options) as client:
            found = call(client)
            return await found if inspect.isawaitable(found) else found

    def _iterate(self, found: Any, enough: Callable[[list[Any]], bool]) -> list[Any]:
        items: list[Any] = []
        for item in found:
            items.append(item)
            if enough(items):
                found.close()
                break
        return items

    async def _iterate_async(self, call: Call, enough: Callable[[list[Any]], bool]) -> list[Any]:
        async with async_client_of(self._gateway, self._key, **self._options) as client:
            found = call(client)
            if not hasattr(found, "__aiter__"):
                found = await found
            items: list[Any] = []
            async for item in found:
                items.append(item)
                if enough(items):
                    await found.close()
                    break
            return items
