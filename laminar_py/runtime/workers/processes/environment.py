"""The process of environments."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from laminar_py.config.environment import ENVIRONMENTS, EnvironmentHome
from laminar_py.environment.calls import EnvironmentCalls
from laminar_py.environment.host import EnvironmentHost, SavedTurns, environments_path
from laminar_py.environment.writer import open_writer
from laminar_py.records.environment import EnvironmentTurn
from laminar_py.relay.sockets import RelayKeys
from laminar_py.runtime.link.turns import AskedTurn, TurnReceiver
from laminar_py.runtime.workers.processes.base import PartActor, open_part
from laminar_py.runtime.workers.specs import EnvironmentSpec


class EnvironmentActor(PartActor):
    """Hosts the environments of trajectories; replicas call it by its name."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = asyncio.Event()
        self._open = AsyncExitStack()

    async def start(self, spec: EnvironmentSpec) -> None:
        """Load the kind of environment that the config names."""
        config = open_part(spec, f"environment-{spec.index}")
        settings = config.environment
        assert settings is not None, "a run without environments has no process for them"
        writer = open_writer(config.model.path, config.data.chat, settings, messages=spec.messages)
        with ENVIRONMENTS.naming_package(settings.kind):
            home = EnvironmentHome(
                index=spec.index,
                sandbox=config.sandbox,
                folder=environments_path(Path(spec.run_dir)),
                model=config.model.path,
                words=writer,
            )
            opened = ENVIRONMENTS.get(settings.kind).open(settings, home)
            make = await self._open.enter_async_context(opened)  # what it holds ends with the process
        self._calls = EnvironmentCalls(settings)
        self._host = EnvironmentHost(
            make,
            calls=self._calls,
            writer=writer,
            saved=SavedTurns(environments_path(Path(spec.run_dir))),
            limits=settings,
        )
        asyncio.get_running_loop().set_default_executor(self._calls.threads)  # for tools that are not `async`
        self._receiver = TurnReceiver(RelayKeys(spec.public_key, spec.secret_key), spec.host)
        self._hearing = asyncio.create_task(self._receiver.run(self._host.hear), name="turns")
        self._ready.set()

    async def answer(self, asked: AskedTurn) -> EnvironmentTurn:
        """Return the environment's answer to a turn; one that listens also answers over its socket."""
        await self._ready.wait()
        turn = await self._host.answer(asked.turn)
        if turn.listens:
            self._receiver.answer(asked, turn)
        return turn

    async def turns_address(self) -> str:
        """Return the address of the socket that takes turns while they are sampled."""
        await self._ready.wait()
        return self._receiver.endpoint

    async def forget(self, trajectory_ids: list[str]) -> None:
        """Let go of trajectories."""
        await self._ready.wait()
        self._host.forget(trajectory_ids)

    async def watch(self, seconds: float) -> None:
        """Return after so many seconds; raise the error that makes the process of no use, if there is one."""
        if self._hearing.done():
            self._hearing.result()
        await self._calls.watch(seconds)
