"""The `tokenmill gateway` command. Its options are generated from `GatewaySettings`."""

from __future__ import annotations

import typer

from producer.gateway.settings import GatewaySettings
from tokenmill.cli.options import settings_of, take_options
from tokenmill.protocol.environment import KNOWN


def gateway(**given: object) -> None:
    """Serve OpenAI's API over HTTP: requests become jobs of the queue; files and batches run on the clerk."""
    settings = settings_of(GatewaySettings, given, KNOWN)
    from producer.gateway.server import main  # late: `--help` stays fast

    raise typer.Exit(main(settings))


take_options(gateway, GatewaySettings)
