"""The replicas' processes: reports in, assignments out, revival with what they had. Owned by the controller."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from laminar_py.cluster.errors import PartDiedError, RunFailedError
from laminar_py.cluster.part import Part
from laminar_py.cluster.placement import Placement
from laminar_py.config.engine import EngineKind
from laminar_py.config.run import RunConfig
from laminar_py.control.flow import Flow
from laminar_py.engines.opening import api_key
from laminar_py.records.codec import decode, encode
from laminar_py.records.replica import Load, ReplicaReport, Survey
from laminar_py.repack.signals import EngineSpeed
from laminar_py.telemetry.stats import Stats
from laminar_py.workers.processes.actors import ReplicaActor
from laminar_py.workers.relays import Relays
from laminar_py.workers.specs import ReplicaSpec
from laminar_py.workers.supervisor import Supervisor

COLLECT_S = 1.0
START_S = 120.0  # of a replica, its engine apart
SPEED_S = 600.0  # of its measurement, which also waits for the first weights
CHECKSUMS_KEPT = 64
FIRST_STARTS = 2  # that may fail before the run does; later ones are for the supervisor to count
RETRY_S = 2.0  # after a start that failed; the longer, the more often it did
MAX_PATIENCE = 15  # times that


class Replicas:
    """All rollout replicas."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path,
        flow: Flow,
        relays: Relays,
        placement: Placement,
        stats: Stats,
        supervisor: Supervisor,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._flow = flow
        self._relays = relays
        self._placement = placement
        self._stats = stats
        self._supervisor = supervisor
        self._parts: dict[int, Part] = {}  # a replica without a place has none
        self._starting: set[int] = set()
        self._served: set[int] = set()  # that have started at least once
        self._restarting: set[int] = set()  # killed on purpose
        self._checksums: dict[tuple[int, int], tuple[str, int]] = {}  # (version, GPUs) -> checksum and whose it is

    def spawn(self) -> None:
        """Start all processes; `keep` starts what runs in them."""
        for index in range(self._config.rollout.replicas):
            self._spawn(index)

    async def keep(self) -> None:
        """Serve every replica until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._config.rollout.replicas):
                tasks.create_task(self._keep(index), name=f"keep-replica-{index}")

    async def dispatch(self) -> None:
        """Hand out what the flow has for replicas now."""
        for index, trajectory_ids in self._flow.take_aborts().items():
            if index in self._parts:
                self._parts[index].send("abort", encode(trajectory_ids))
        for index, assignments in self._flow.dispatch().items():
            self._parts[index].send("submit", encode(assignments))
        for index, trajectory_ids in self._flow.moves.take_called_off().items():
            self._tell(index, "call_off", trajectory_ids)
        self._stats.generating(any(view.in_flight for view in self._flow.dispatcher.views.values()))

    # ---- repacking

    async def speed(self) -> EngineSpeed:
        """Of the engines, by the first that is up; it has nothing to do yet."""
        while True:
            for replica in list(self._parts):
                answer = await self._ask(replica, "speed", timeout_s=SPEED_S)
                if isinstance(answer, bytes):
                    return decode(EngineSpeed, answer)
            await asyncio.sleep(RETRY_S)  # all are starting

    async def survey(self, replica: int) -> Survey | None:
        """See `migration.Fleet.survey`."""
        answer = await self._ask(replica, "survey")
        return decode(Survey, answer) if isinstance(answer, bytes) else None

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """See `migration.Fleet.expect`."""
        return await self._ask(replica, "expect", version, encode(list(trajectory_ids))) is True

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """See `migration.Fleet.give_up`."""
        self._tell(replica, "give_up", trajectory_ids)

    def _tell(self, replica: int, method: str, trajectory_ids: Sequence[str]) -> None:
        """Unless it is dying or not there yet: then it has none of them."""
        if replica in self._parts and replica not in self._starting:
            self._parts[replica].send(method, encode(list(trajectory_ids)))

    async def _ask(self, replica: int, method: str, *arguments: object, timeout_s: float | None = None) -> object:
        """Its answer; None if it is dying, which its keeper notices as well."""
        part = self._parts.get(replica)
        if part is None or replica in self._starting:
            return None
        try:
            return await part.call(method, *arguments, timeout_s=timeout_s)
        except PartDiedError:
            return None

    # ---- their life

    async def stop(self) -> None:
        """Interrupt all trajectories and wait until their partial responses are in.

        One that is starting has nothing to tell: it starts once more, with nothing to do.
        """
        views = self._flow.dispatcher.views
        for index, part in self._parts.items():
            if index in self._starting:
                self._restarting.add(index)
                part.kill()
            else:
                part.send("stop")
        while any(view.in_flight for view in views.values()):
            self._stats.next_report.clear()
            await self._stats.next_report.wait()

    def restart(self) -> None:
        """End all processes for fresh ones, whose engines may serve versions that these have outrun."""
        for index, part in self._parts.items():
            self._restarting.add(index)
            self._flow.dispatcher.retire(index)
            part.kill()

    async def _keep(self, index: int) -> None:
        failures = 0  # starts in a row that came to nothing
        while True:
            while index not in self._parts:  # until its place is free again
                await asyncio.sleep(RETRY_S)
                self._spawn(index)
            try:
                await self._start(index)
                failures = 0
                await self._serve(index)
            except PartDiedError as error:
                failures += index in self._starting
                await self._bury(index, error, failures)
                await asyncio.sleep(RETRY_S * min(failures, MAX_PATIENCE))
                self._spawn(index)

    async def _bury(self, index: int, error: PartDiedError, failures: int) -> None:
        """What it had goes elsewhere. Raises RunFailedError if it has never started, nor could start again."""
        self._starting.discard(index)
        del self._parts[index]
        await self._flow.on_replica_lost(index)
        if index in self._restarting:
            self._restarting.discard(index)
            return
        self._supervisor.died(error)
        if failures == FIRST_STARTS and index not in self._served:
            raise RunFailedError(f"{error.part} does not start: {error.reason}; see logs/{error.part}.log")
        await self.dispatch()

    async def _start(self, index: int) -> None:
        self._starting.add(index)
        spec = ReplicaSpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._run_dir),
            index=index,
            model_dir=str(self._config.model.path),
            relay=await self._relays.attach(index),
            public_key=self._relays.keys.public,
            secret_key=self._relays.keys.secret,
            assignments=self._flow.adopt(index),
            api_key=api_key(self._config),
        )
        engine = self._config.rollout.engine
        limit = START_S if engine.kind is EngineKind.LOCAL else START_S + engine.start_timeout_s
        pid = await self._parts[index].call("start", encode(spec), timeout_s=limit)
        assert isinstance(pid, int)
        self._starting.discard(index)
        self._served.add(index)
        self._supervisor.started(f"replica-{index}", pid)

    async def _serve(self, index: int) -> None:
        while True:
            data = await self._parts[index].call("collect", COLLECT_S)
            assert isinstance(data, bytes)
            if index in self._restarting:
                raise PartDiedError(f"replica-{index}", "restarted")
            report = decode(ReplicaReport, data)
            await self._flow.on_report(report)
            self._stats.on_report(report)
            self._compare(index, report.loads)
            await self.dispatch()

    def _compare(self, index: int, loads: Sequence[Load]) -> None:
        """Engines that verified one version in one layout hold the same tensors. Raises PartDiedError if not."""
        for load in loads:
            if load.checksum is None:
                continue
            layout = load.checksum.count("-") + 1
            agreed, first = self._checksums.setdefault((load.version, layout), (load.checksum, index))
            if agreed != load.checksum:
                reason = f"its weights of version {load.version} differ from those of replica-{first}"
                self._parts[index].kill()
                raise PartDiedError(f"replica-{index}", reason)
        for key in sorted(self._checksums)[:-CHECKSUMS_KEPT]:
            del self._checksums[key]

    def _spawn(self, index: int) -> None:
        """Start its process, if there is room for it."""
        self._placement.refresh()
        place = self._placement.plan.replicas[index]
        if place is not None:
            timeout_s = self._config.supervisor.heartbeat_timeout_s
            self._parts[index] = Part(
                f"replica-{index}", ReplicaActor, concurrency=16, timeout_s=timeout_s, place=place
            )
