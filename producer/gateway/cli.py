"""The `tokenmill gateway` command. Its options are generated from `GatewaySettings`."""

from __future__ import annotations

import sys

import typer

from producer.gateway.settings import GatewaySettings
from tokenmill.cli.options import settings_of, take_options
from tokenmill.protocol.environment import KNOWN


def gateway(**given: object) -> None:
    """Serve OpenAI's API over HTTP: requests become jobs of the queue; files and batches run on the clerk."""
    settings = settings_of(GatewaySettings, given, KNOWN)
    from producer.gateway.server import USAGE, main  # late: `--help` stays fast
    from producer.gateway.storing import FilesError

    try:
        status = main(settings)
    except FilesError as error:
        print(error, file=sys.stderr)
        status = USAGE
    raise typer.Exit(status)


take_options(gateway, GatewaySettings)
