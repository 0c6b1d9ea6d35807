"""Which errors of Redis pass by themselves: the one rule of workers and clients. No I/O here.

    transient(error)        # the same command may work later: try again
    refused(error)          # Redis does not take the credentials, or grants no right
    misdirected(error)      # before a first answer: the URL is wrong, and waiting does not mend it
    answered(error)         # Redis itself said so, which it can only do where it was reached

A failover looks like this to its clients: blocked commands end with UNBLOCKED, writes with READONLY or NOREPLICAS, a
node of a cluster says MOVED, CLUSTERDOWN, MASTERDOWN or TRYAGAIN, a server that starts says LOADING, and in between
connections are refused, reset or time out.
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
failover, but end without the caller's doing as well: memory or disk is full, a slow script runs."""

DEMOTED: Final = (ReadOnlyError, MovedError)
"""The server is no master any more: the next try needs a new connection, to where the host's name leads by then."""

_UNKNOWN: Final = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


_REFUSED: Final = (AuthenticationError, AuthorizationError, AuthenticationWrongNumberOfArgsError, NoPermissionError)
_REFUSED_WORDS: Final = re.compile(r"\b(NOAUTH|WRONGPASS|NOPERM|ACL failure in script|unauthenticated)\b")
"""The last one is of `Protocol error: unauthenticated multibulk length`: without a login long commands are cut off."""


class WrongProtocol(ConnectionError):
    """TLS was spoken to a plain port, or the other way round."""


def refused(error: RedisError) -> bool:
    """Whether Redis does not take our user, its password or, for lack of a right, the command."""
    if isinstance(error, _REFUSED):
        return True
    return isinstance(error, ResponseError) and _REFUSED_WORDS.search(str(error)) is not None


def transient(error: RedisError) -> bool:
    """Whether the same command may work later: Redis is away, starting, full, or changing its master."""
    if refused(error):  # redis-py counts some of these as errors of the connection
        return False
    if isinstance(error, _PASSING):
        return True
    # Errors inside a script come as plain response errors that hold the first one's text.
    return isinstance(error, ResponseError) and _WORDS.search(str(error)) is not None


def answered(error: RedisError) -> bool:
    """Whether the error is a reply of Redis."""
    return isinstance(error, (ResponseError, BusyLoadingError))


def misdirected(error: RedisError) -> bool:
    """Whether the host is unknown, the file of a socket may not be opened, or TLS cannot be agreed upon.

    Of a server that was reached before this can pass, too: names and certificates come and go in a failover.
    """
    if isinstance(error, WrongProtocol):
        return True
    cause = error.__cause__ or error.__context__
    if isinstance(cause, socket.gaierror):
        return cause.errno in _UNKNOWN
    if isinstance(cause, ssl.SSLError):
        return not isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError))
    return isinstance(cause, PermissionError)
