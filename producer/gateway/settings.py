"""The settings of the gateway: `tokenmill gateway` makes its options from them."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tokenmill.cli.settings import CommandSettings, Size, variable
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.protocol.keys import NAME, Keys
from tokenmill.protocol.url import check_url

_KEYS = Keys()
"""Has the default names."""
_NAME = f"^{NAME.pattern}$"


class GatewaySettings(CommandSettings):
    """The settings of a gateway."""

    redis: Annotated[str, AfterValidator(check_url)] = Field(default=DEFAULT_URL, description="URL of Redis or Valkey.")
    queue: str = Field(default=_KEYS.queue, pattern=_NAME, description="Name of the queue.")
    prefix: str = Field(default=_KEYS.prefix, pattern=_NAME, description="Prefix of every Redis key.")

    # Address, API keys and files
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on; 0.0.0.0 or :: for all. An address beyond this machine needs --api-keys or "
        "--no-auth.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_keys: str | None = Field(
        default=None,
        min_length=1,
        description="File of API keys: lines `<sha256 of the key> <tenant> [rpm=N] [tpm=N] [priority=low]`. It is read "
        "again when it changes. Default: requests need no key.",
    )
    no_auth: bool = Field(
        default=False, description="Serve other machines without API keys. Every host that reaches --port may use it."
    )
    files: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of uploaded files and batches, which gateways and clerks share. Default: the gateway "
        "serves neither.",
    )

    # Limits
    request_timeout: float = Field(
        default=600,
        gt=0,
        description="Seconds until a synchronous request ends with status 504 and its job is cancelled.",
    )
    worker_timeout: float = Field(
        default=10, ge=0, description="Seconds a request waits for a live worker before it ends with status 503."
    )
    max_body_bytes: Size = Field(
        default=1024**2, ge=1, description="Maximum size of a request's JSON body, such as 1MiB."
    )
    max_file_bytes: Size = Field(default=200 * 1024**2, ge=1, description="Maximum size of an uploaded file.")
    max_requests: int = Field(
        default=1000, ge=1, description="Maximum number of requests in flight; further requests get status 503."
    )
    header_timeout: float = Field(
        default=10, gt=0, description="Seconds a client may take to send the headers of a request."
    )
    body_timeout: float = Field(
        default=30,
        gt=0,
        description="Seconds without a byte of a request's body until the request gets status 408, as do bodies that "
        "come slower than 500 bytes a second.",
    )
    drain_seconds: float = Field(
        default=25, ge=0, description="How long running requests may take after SIGTERM; their jobs go on in the queue."
    )

    # Batches
    batch_queue: str = Field(default="clerk", min_length=1, description="RQ queue of the clerk that runs batches.")
    file_ttl_days: float = Field(
        default=30, ge=0, description="Days until an uploaded file and its batches' files are deleted; 0: never."
    )

    # Logs
    log_format: Literal["console", "json"] = Field(default="console", description="Format of the log on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Minimum log level.")

    @property
    def loopback(self) -> bool:
        """Whether --host is an address of this machine only."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.api_keys is not None and self.no_auth:
            raise ValueError("give --api-keys or --no-auth, not both")
        if self.api_keys is None and not self.no_auth and not self.loopback:
            raise ValueError(
                f"--host {self.host} serves other machines: give --api-keys, or --no-auth to serve them without keys"
            )
        return self


VARIABLES = frozenset(map(variable, GatewaySettings.model_fields))
"""The environment variables of all fields."""
