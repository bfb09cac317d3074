"""Processes of a run's services: a server of a reward pool, a tracker."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from laminar_py.children.hosted import log_to
from laminar_py.config.reward import server_name
from laminar_py.config.tracking import TRACKERS
from laminar_py.observe.trackers import Ending, Message, Rewound, Values
from laminar_py.records.scoring import ServerAddress
from laminar_py.runtime.workers.processes.base import PartActor, log_of, read_run_config
from laminar_py.runtime.workers.specs import ServerStart, TrackerSpec

NICENESS = 10  # of a tracker

# each actor imports its own libraries in a method, since the other actors do not need them


class ServerActor(PartActor):
    """Launches and watches a server of a reward pool."""

    async def start(self, spec: ServerStart) -> ServerAddress:
        """Launch the server; return its address once it is ready."""
        from laminar_py.engines.sglang.launch import pool_server
        from laminar_py.engines.sglang.server import SGLangServer

        name = server_name(spec.pool, spec.index)
        settings = read_run_config(spec, name).reward.servers[spec.pool]
        log = log_of(spec.run_dir, f"sglang-{name}")
        self._server = SGLangServer(pool_server(spec.pool, settings, log, host=spec.host))
        await self._server.start()
        return ServerAddress(self._server.url, self._server.api_key)

    async def watch(self, wait_s: float) -> None:
        """Wait `wait_s` seconds. Raises `EngineLostError` as soon as the server has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._server.watch()


class TrackerError(Exception):
    """An error in a tracker's package, of any kind: never a mistake of ours."""


class TrackerActor(PartActor):
    """Hosts a tracker; the tracker's own package is imported here and nowhere else. Single-threaded."""

    def start(self, spec: TrackerSpec) -> None:
        """Open the tracker's run, or continue it."""
        os.nice(NICENESS)
        os.environ.update(spec.environment)
        log_to(log_of(spec.opening.folder, f"tracker-{spec.opening.kind}"), force=True)
        with _tracker_errors():
            self._tracker = TRACKERS.get(spec.opening.kind).open(spec.opening)

    def deliver(self, message: Message) -> None:
        """Pass a message to the tracker."""
        with _tracker_errors():
            match message:
                case Values(step, values):
                    self._tracker.log(step, values)
                case Rewound(step):
                    self._tracker.undo(step)
                case Ending(summary):
                    self._tracker.close(summary)


@contextmanager
def _tracker_errors() -> Iterator[None]:
    """Raise any error of the block as `TrackerError`."""
    try:
        yield
    except Exception as error:
        raise TrackerError(f"{type(error).__name__}: {error}") from error
