"""A look at a Ray cluster for room for a run: `python -m laminar_lab.launcher.room CONFIG [KEY=VALUE...]`.

A process of its own asks, since Ray ends one whose cluster goes away while it looks. Exit code 0 if there is room.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from laminar_py.config import ConfigError, load_config
from laminar_py.runtime.cluster import Needs, make_plan

PATIENCE_S = 120.0  # with a cluster that takes part of a connection and then hangs


async def has_room(arguments: Sequence[str]) -> bool:
    """True if the cluster of a run has what it needs free; arguments are those of `laminar train`."""
    command = [sys.executable, "-P", "-m", __name__, *arguments]
    nowhere = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await process.wait() == 0
    except TimeoutError:
        return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    """End with exit code 1 where there is no room."""
    from laminar_py.runtime.cluster import nodes, open_cluster

    config = load_config(Path(sys.argv[1]), sys.argv[2:])
    try:
        with open_cluster(config.cluster.address):
            make_plan(Needs.from_config(config), nodes())
    except ConfigError:
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
