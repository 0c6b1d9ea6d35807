"""Find out whether a connection failed because one side speaks TLS and the other does not.

Neither side reports it: a plain Redis waits for the end of a line that a TLS handshake never sends, and a TLS port
closes the connection. So after such a failure a second connection tries the other protocol.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, Final

import redis
import redis.asyncio as aioredis
from redis.exceptions import RedisError, TimeoutError

from tokenmill.protocol.faults import WrongProtocol

PROBE_S: Final = 1.0
"""Time-out for connecting, and for the answer."""


def wrong_protocol(connection: Any, error: RedisError) -> WrongProtocol | None:
    """Return the error to raise where `connection` failed to connect with `error`; None if TLS is not the reason."""
    if isinstance(connection, (redis.UnixDomainSocketConnection, aioredis.UnixDomainSocketConnection)):
        return None
    host, port, cause = connection.host, connection.port, error.__cause__ or error.__context__
    if isinstance(connection, (redis.SSLConnection, aioredis.SSLConnection)):
        garbled = isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLCertVerificationError)
        if (garbled or isinstance(error, TimeoutError)) and _speaks_plainly(host, port):
            return WrongProtocol(f"{host}:{port} speaks no TLS: use redis://, not rediss://")
    elif (isinstance(cause, ConnectionError) or "closed" in str(error)) and _speaks_tls(host, port):
        return WrongProtocol(f"{host}:{port} speaks TLS only: use rediss://, not redis://")
    return None


def _speaks_plainly(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), PROBE_S) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(1) in (b"+", b"-")
    except OSError:
        return False


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), PROBE_S) as probe, context.wrap_socket(probe):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
