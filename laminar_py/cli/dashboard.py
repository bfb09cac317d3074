"""`laminar dashboard`. Owns its arguments; the serving is done by `analytics.show.dashboard`."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from laminar_py.cli.lines import say


def dashboard(
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one")] = 8400,
    host: Annotated[
        str, typer.Option(help="Interface; beyond loopback LAMINAR_DASHBOARD_TOKEN must be set")
    ] = "127.0.0.1",
) -> None:
    """Serve the report's page, updating while the run goes on, and /metrics for Prometheus, until Ctrl-C."""
    from laminar_py.observe.dashboard import TOKEN_VARIABLE, serve

    asyncio.run(serve(run, host=host, port=port, token=os.environ.get(TOKEN_VARIABLE) or None, tell=say))
