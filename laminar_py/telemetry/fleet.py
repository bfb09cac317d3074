"""`fleet.jsonl`: what the replicas do, once a second of the RL phase. Run by the controller."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from laminar_py.ledger.row_files import append_row
from laminar_py.telemetry.stats import Stats

EVERY_S = 1.0


async def watch_fleet(path: Path, stats: Stats, *, generated_tokens: Callable[[], int]) -> None:
    """Append a row for each second of RL until cancelled."""
    with path.open("ab") as file:
        while True:
            await asyncio.sleep(EVERY_S)
            if stats.in_rl:
                append_row(file, stats.fleet(generated_tokens()))
                file.flush()
