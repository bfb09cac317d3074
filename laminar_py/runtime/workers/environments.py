"""The processes that environments run in: placed, watched, replaced. Owned by the controller.

Replicas ask them directly, by name (`remote_environments`), so nothing of a turn passes here. What a process had
is rebuilt in the one that has its name after it.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from laminar_py.environment.calls import ProcessSpentError
from laminar_py.environment.host import SavedTurns, environments_path
from laminar_py.relay.wire.transport import RelayKeys
from laminar_py.runtime.cluster.errors import PartDiedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.specs import EnvironmentSpec

START_S = 120.0
WATCH_S = 5.0  # of one look at a process
PATIENCE_S = 30.0  # of an answer to that
SWEEP_S = 10.0
CALLS = 1_000_000  # at the same time, most of which wait: none may keep its keeper's from being heard
FIRST_STARTS = 2  # that may fail before the run does


def environment_names(incarnation: Incarnation) -> list[str]:
    """Names under which replicas find the processes."""
    settings, run = incarnation.config.environment, incarnation.run.path.name
    workers = 0 if settings is None else settings.workers
    return [f"{run}.{incarnation.number}.environment-{index}" for index in range(workers)]


async def count_unless_spent(error: PartDiedError) -> PartDiedError | None:
    """The death to count: that of a process which ended itself since it had used up its limits is none."""
    return None if error.reason.startswith(ProcessSpentError.__name__) else error


class EnvironmentProcesses:
    """Processes of environments, none where a run has none."""

    def __init__(self, incarnation: Incarnation, keys: RelayKeys) -> None:
        self._incarnation = incarnation
        self._keys = keys
        names = enumerate(environment_names(incarnation))
        self._keepers = [Keeper(self._spec(index, known_as=name), incarnation) for index, name in names]

    def spawn(self) -> None:
        """Start all processes; `start` starts what runs in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def start(self) -> None:
        """Have all up. Raises ConfigError where an environment cannot be loaded, RunFailedError."""
        await asyncio.gather(*(keeper.up() for keeper in self._keepers))

    async def keep(self) -> None:
        """Have all processes up until cancelled. Raises RunFailedError if one dies too often."""
        async with asyncio.TaskGroup() as tasks:
            for keeper in self._keepers:
                tasks.create_task(keeper.calling(self._watch), name="keep-environments")

    async def sweep(self, is_followed: Callable[[str], bool]) -> None:
        """Let go of trajectories that nobody follows any more, once that is on record; until cancelled.

        Those that were dropped end here: no replica says of them that no turn is to come.
        """
        if not self._keepers:
            return
        saved = SavedTurns(environments_path(self._incarnation.run.path))
        while True:
            await asyncio.sleep(SWEEP_S)
            ended = [name for name in await asyncio.to_thread(saved.names) if not is_followed(name)]
            if ended:
                await self._incarnation.ledger.commit()
                for part in (part for keeper in self._keepers if keeper.is_up for part in keeper.parts):
                    part.send("forget", ended)
                await asyncio.to_thread(saved.forget, ended)

    async def _watch(self, parts: Sequence[Part]) -> None:
        while True:
            await parts[0].call("watch", WATCH_S)

    def _spec(self, index: int, *, known_as: str) -> PartSpec:
        return PartSpec(
            names=[f"environment-{index}"],
            actor="laminar_py.runtime.workers.processes.environment:EnvironmentActor",
            concurrency=CALLS,
            timeout_s=PATIENCE_S,
            places=lambda: [self._incarnation.placement.of_scorer(index)],
            start=partial(self._start, index),
            settle=count_unless_spent,
            first_starts=FIRST_STARTS,
            make=partial(Part, known_as=known_as),
            spares_memory="lower environment.at_once or environment.most_kept, or raise environment.workers",
        )

    async def _start(self, index: int, parts: Sequence[Part]) -> None:
        node = parts[0].place.node
        assert node is not None, "a plan names a node for every part"
        spec = EnvironmentSpec(
            config=self._incarnation.config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            index=index,
            messages=self._incarnation.inputs.messages,
            host=self._incarnation.placement.ip(node),  # loopback where the run is on this machine alone
            public_key=self._keys.public,
            secret_key=self._keys.secret,
        )
        await parts[0].call("start", spec, timeout_s=START_S)
