"""The process of environments."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from laminar_py.config.environment import ENVIRONMENTS, EnvironmentHome
from laminar_py.environment.calls import EnvironmentCalls
from laminar_py.environment.host import EnvironmentHost
from laminar_py.environment.saved_turns import SavedTurns, environments_path
from laminar_py.environment.writer import open_writer
from laminar_py.runtime.link.turns import TurnServer
from laminar_py.runtime.workers.processes.base import PartActor, read_run_config
from laminar_py.runtime.workers.specs import EnvironmentSpec


class EnvironmentActor(PartActor):
    """Hosts the environments of trajectories; replicas ask it over its socket."""

    def __init__(self) -> None:
        super().__init__()
        self._open = AsyncExitStack()

    async def start(self, spec: EnvironmentSpec) -> None:
        """Open the kind of environment that the config names, and start to answer turns over a socket."""
        config = read_run_config(spec, f"environment-{spec.index}")
        settings = config.environment
        assert settings is not None, "a run without environments has no process for them"
        writer = open_writer(config.model.path, config.data.chat, settings, messages=spec.messages)
        with ENVIRONMENTS.naming_package(settings.kind):
            home = EnvironmentHome(
                index=spec.index,
                sandbox=config.sandbox,
                folder=environments_path(Path(spec.run_dir)),
                model=config.model.path,
                decode_turn=writer.decode_turn,
            )
            opened = ENVIRONMENTS.get(settings.kind).open(settings, home)
            make = await self._open.enter_async_context(opened)  # its resources end with the process
        self._calls = EnvironmentCalls(settings)
        self._host = EnvironmentHost(
            make,
            calls=self._calls,
            writer=writer,
            saved=SavedTurns(environments_path(Path(spec.run_dir))),
            limits=settings,
        )
        asyncio.get_running_loop().set_default_executor(self._calls.threads)  # for tools that are not `async`
        server = TurnServer(spec.keys, spec.host, run_dir=Path(spec.run_dir), index=spec.index)
        self._serving = asyncio.create_task(server.run(self._host), name="turns")

    async def forget(self, trajectory_ids: list[str]) -> None:
        """Close the environments of trajectories that have ended."""
        self._host.forget(trajectory_ids)

    async def watch(self, seconds: float) -> None:
        """Return after so many seconds. Raises the error that ended the socket, or spent the process's limits."""
        if self._serving.done():
            self._serving.result()
        await self._calls.watch(seconds)
