"""The process of environments."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from laminar_py.records.codec import decode, encode
from laminar_py.runtime.workers.processes.setup import PartActor, open_part
from laminar_py.runtime.workers.specs import EnvironmentSpec


class EnvironmentActor(PartActor):
    """Shell of a process of environments; replicas ask it by its name."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = asyncio.Event()
        self._open = AsyncExitStack()

    async def start(self, data: bytes) -> None:
        """Load what makes environments."""
        from laminar_py.config.environment import ENVIRONMENTS, EnvironmentHome
        from laminar_py.environment.calls import EnvironmentCalls
        from laminar_py.environment.host import EnvironmentHost, SavedTurns, environments_path
        from laminar_py.environment.writer import open_writer
        from laminar_py.relay.sockets import RelayKeys
        from laminar_py.runtime.link.turns import TurnReceiver

        spec = decode(EnvironmentSpec, data)
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

    async def answer(self, data: bytes) -> bytes:
        """`EnvironmentTurn` for an `AskedTurn`; who asks has it sooner where it tells what is sampled."""
        from laminar_py.runtime.link.turns import AskedTurn

        await self._ready.wait()
        asked = decode(AskedTurn, data)
        turn = await self._host.answer(asked.turn)
        if turn.listens:
            self._receiver.answer(asked, turn)
        return encode(turn)

    async def turns_address(self, _: bytes) -> bytes:
        """Address that takes what is sampled."""
        await self._ready.wait()
        return self._receiver.endpoint.encode()

    async def forget(self, data: bytes) -> bytes:
        """Let go of trajectories, a list of names."""
        await self._ready.wait()
        self._host.forget(decode(list[str], data))
        return b""

    async def watch(self, seconds: float) -> None:
        """Return after so many seconds; raises what makes the process of no use."""
        if self._hearing.done():
            self._hearing.result()
        await self._calls.watch(seconds)
