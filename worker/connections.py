"""The Redis clients of a worker: one for each thread, so that a slow command of one thread delays no other."""

from __future__ import annotations

import redis

from tokenmill.protocol.connection import RETRIES, blocking_client, command_client
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.scripts import Scripts
from worker.settings import Settings


class Connections:
    """Makes clients, and closes all of them."""

    def __init__(self, settings: Settings, keys: Keys, consumer: str) -> None:
        """Make no connection yet. `consumer`: the worker's name in the consumer groups."""
        self._settings = settings
        self._keys = keys
        self._consumer = consumer
        self._clients: list[redis.Redis] = []

    def client(self, retries: int = RETRIES) -> redis.Redis:
        """Make a client for commands that return at once."""
        return self._keep(command_client(self._settings.redis, retries=retries))

    def blocking(self) -> redis.Redis:
        """Make a client for reads that block for `block_ms`."""
        return self._keep(blocking_client(self._settings.redis, self._settings.block_ms))

    def scripts(self, retries: int = RETRIES) -> Scripts:
        """Make a caller of the Lua scripts, over a client of its own."""
        settings = self._settings
        return Scripts(
            self.client(retries), self._keys, self._consumer, settings.result_ttl_seconds, settings.stream_ttl_seconds
        )

    def close(self) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()

    def _keep(self, client: redis.Redis) -> redis.Redis:
        self._clients.append(client)
        return client
