"""The processes in which environments run: placed, watched, replaced. Owned by the controller.

Replicas send turns to these processes over sockets (`link.turns`). A process that replaces a crashed process
rebuilds the environments from saved turns.
"""

import asyncio
from collections.abc import Callable, Sequence

from laminar_py.environment.calls import ProcessSpentError
from laminar_py.environment.saved_turns import SavedTurns, environments_path
from laminar_py.relay.messages import RelayKeys
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.placement import NodeSlot
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, KeeperGroup
from laminar_py.runtime.workers.specs import EnvironmentSpec

START_S = 120.0
SWEEP_S = 10.0


class EnvironmentKeeper(Keeper):
    """Keeps one environment process alive."""

    actor_class = "laminar_py.runtime.workers.processes.environment:EnvironmentActor"
    timeout_s = 30.0
    first_starts = 2
    memory_advice = "lower environment.at_once or environment.most_kept, or raise environment.workers"

    def __init__(self, incarnation: Incarnation, index: int, keys: RelayKeys) -> None:
        super().__init__(incarnation, f"environment-{index}")
        self._index = index
        self._keys = keys

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the place of the process: its index chooses among the nodes of the run."""
        return [self._placement.scorer_place(self._index)]

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Load the environments in a started process, which then listens for turns of replicas."""
        node = parts[0].place.node
        assert node is not None, "a plan names a node for every part"
        spec = EnvironmentSpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            index=self._index,
            messages=self._incarnation.inputs.messages,
            host=self._placement.ip(node),  # loopback where the run is on this machine alone
            keys=self._keys,
        )
        await parts[0].call("start", spec, timeout_s=START_S)

    async def clean_up(self, error: PartCrashedError) -> PartCrashedError | None:
        """Return the crash to count; None if the process ended itself because it had used up its limits."""
        return None if error.reason.startswith(ProcessSpentError.__name__) else error


class EnvironmentProcesses(KeeperGroup[EnvironmentKeeper]):
    """Keeps the environment processes of a run alive, if it has any."""

    def __init__(self, incarnation: Incarnation, keys: RelayKeys) -> None:
        self._incarnation = incarnation
        settings = incarnation.config.environment
        workers = range(0 if settings is None else settings.workers)
        super().__init__(EnvironmentKeeper(incarnation, index, keys) for index in workers)

    async def start(self) -> None:
        """Load the environments in all processes. Raises ConfigError, or RunFailedError after too many crashes."""
        await asyncio.gather(*(keeper.bring_up() for keeper in self.keepers))

    async def sweep(self, is_followed: Callable[[str], bool]) -> None:
        """Every `SWEEP_S`, delete the environments and saved turns of trajectories not `is_followed`.

        Commits the ledger first, so that it has the ends of the trajectories. Runs until cancelled, or returns at
        once without environment processes.
        """
        if not self.keepers:
            return
        saved = SavedTurns(environments_path(self._incarnation.run.path))
        while True:
            await asyncio.sleep(SWEEP_S)
            ended = [name for name in await asyncio.to_thread(saved.names) if not is_followed(name)]
            if ended:
                await self._incarnation.ledger.commit()
                for part in (part for keeper in self.keepers if keeper.is_up for part in keeper.parts):
                    part.send("forget", ended)
                await asyncio.to_thread(saved.forget, ended)
