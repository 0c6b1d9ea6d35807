"""Classify errors of Redis, by one rule for workers and clients. No I/O here.

    transient(error)        # retryable: the same command may work later
    refused(error)          # Redis rejects the credentials, or denies the command
    no_group(error)         # a lane or its consumer group is gone: create it again
    misdirected(error)      # before a first answer: the URL is wrong; a retry does not help
    answered(error)         # the error is a reply of Redis, so Redis was reached

In a failover, blocked commands fail with UNBLOCKED, writes with READONLY or NOREPLICAS, nodes of a cluster reply MOVED,
CLUSTERDOWN, MASTERDOWN or TRYAGAIN, a server that starts replies LOADING, and connections are refused, reset or time
out.
"""

from __future__ import annotations

import re
import socket
import ssl
from typing import Final

from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

_PASSING: Final = (
    ConnectionError,
    TimeoutError,
    ReadOnlyError,
    MovedError,
    ClusterDownError,
    MasterDownError,
    TryAgainError,
    OutOfMemoryError,
)
_WORDS: Final = re.compile(
    r"\b(UNBLOCKED|READONLY|NOREPLICAS|LOADING|CLUSTERDOWN|MASTERDOWN|TRYAGAIN|MOVED|OOM|BUSY|MISCONF)\b"
)
"""First words of replies that redis-py has no class for, or that a script passes on. OOM, BUSY and MISCONF are no
signs of a failover, but are retryable too: memory or disk is full, a slow script runs."""

DEMOTED: Final = (ReadOnlyError, MovedError)
"""The server is no longer the master: the next try needs a new connection, which looks the host's name up again."""

_UNKNOWN: Final = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


_REFUSED: Final = (AuthenticationError, AuthorizationError, AuthenticationWrongNumberOfArgsError, NoPermissionError)
_REFUSED_WORDS: Final = re.compile(r"\b(NOAUTH|WRONGPASS|NOPERM|ACL failure in script|unauthenticated)\b")
"""`Protocol error: unauthenticated multibulk length` is the reply to a long command without a login."""


class WrongProtocol(ConnectionError):
    """The client speaks TLS to a port without TLS, or no TLS to a port with TLS."""


def refused(error: RedisError) -> bool:
    """Return whether Redis rejects the user or its password, or denies the user the command."""
    if isinstance(error, _REFUSED):
        return True
    return isinstance(error, ResponseError) and _REFUSED_WORDS.search(str(error)) is not None


def transient(error: RedisError) -> bool:
    """Return whether an error is retryable: Redis is unreachable, starting, full, or changing its master."""
    if refused(error):  # redis-py makes some of these errors of the connection
        return False
    if isinstance(error, _PASSING):
        return True
    # An error inside a script is a plain response error that contains the text of the first error.
    return isinstance(error, ResponseError) and _WORDS.search(str(error)) is not None


def no_group(error: RedisError) -> bool:
    """Return whether a lane or its consumer group is gone: Redis was flushed, or came back empty."""
    words = ("NOGROUP", "no longer exists", "requires the key to exist")  # the last one is fakeredis' message
    return isinstance(error, ResponseError) and any(word in str(error) for word in words)


def answered(error: RedisError) -> bool:
    """Return whether the error is a reply of Redis."""
    return isinstance(error, (ResponseError, BusyLoadingError))


def misdirected(error: RedisError) -> bool:
    """Return whether the host is unknown, the socket file may not be opened, or TLS fails.

    If the server was reached before, such an error is retryable, too: a failover changes names and certificates.
    """
    if isinstance(error, WrongProtocol):
        return True
    cause = error.__cause__ or error.__context__
    if isinstance(cause, socket.gaierror):
        return cause.errno in _UNKNOWN
    if isinstance(cause, ssl.SSLError):
        return not isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError))
    return isinstance(cause, PermissionError)
