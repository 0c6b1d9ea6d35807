"""The queues, clients and workers of the library's tests."""

from tests.tokenmill.conftest import client, queue, server, strict_scripts, worker

__all__ = ["client", "queue", "server", "strict_scripts", "worker"]
