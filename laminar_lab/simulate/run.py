"""A run on a virtual clock: scheduler, packing and repacking of any run, among modelled engines and learner.

Called by `laminar simulate`. Nothing is generated or trained; time is what the profile says. Invariant: what comes
out depends on the config alone.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from laminar_lab.simulate.cores import SharedCores
from laminar_lab.simulate.figures import ControlTraffic, SimulatedRun
from laminar_lab.simulate.fleet import END, SimulatedFleet
from laminar_lab.simulate.learner import LearnerParts, SimulatedLearner
from laminar_lab.simulate.parts import HeardRecorder
from laminar_lab.simulate.record import SimulatedRecord
from laminar_lab.simulate.rewards import SimulatedRewards
from laminar_lab.simulate.stalls import StallWatch
from laminar_lab.simulate.virtual_loop import LoopClock, virtually
from laminar_lab.simulate.weights import ModelledWeights, host_arrivals_s
from laminar_py.config import ConfigError, EmulationProfile, RunConfig, read_profile
from laminar_py.config.emulation import EmulationConfig, LearnerTimes
from laminar_py.control import HOUSEKEEPING_S, Credit, Stages, TrajectoryScheduler, control_settings, packing
from laminar_py.learner.losses import group_advantages, overlong_cost
from laminar_py.ledger import RunFolder
from laminar_py.observe import Stats, Totals
from laminar_py.records import Prompt, StepRow
from laminar_py.records.trajectory import FinishedTrajectory
from laminar_py.repack import Migration, MigrationSettings

MIN_STEPS = 2


LearnerMaker: TypeAlias = Callable[[RunConfig, LearnerTimes, LearnerParts], SimulatedLearner]


def simulate(
    config: RunConfig,
    *,
    run: RunFolder | None = None,
    show: Callable[[StepRow], None] = lambda row: None,
    profile: EmulationProfile | None = None,
    learner: LearnerMaker = SimulatedLearner,
) -> SimulatedRun:
    """Lead a run from its first step to its last; `show` has each, and `run` a record. Raises `ConfigError`.

    `profile` takes the place of the one that the config names, `learner` that of the production learner.
    """
    check(config)
    assert config.emulation is not None, "`check` has looked"
    times = profile or read_profile(config.emulation.profile)

    async def lead() -> SimulatedRun:
        return await _Simulation(config, times, run=run, learner=learner, show=show).lead()

    collects = gc.isenabled()
    gc.disable()  # next to nothing is freed by it, and what lives would be looked at ever again
    try:
        done = virtually(lead(), limit_s=None)
    except ExceptionGroup as group:
        faults, others = group.split(ConfigError)
        if faults is None or others is not None:
            raise
        fault: Exception = faults
        while isinstance(fault, ExceptionGroup):
            fault = fault.exceptions[0]
        raise fault from None
    finally:
        if collects:
            gc.enable()
    if len(done.rows) < MIN_STEPS:
        raise ConfigError(
            f"max_rl_seconds={config.max_rl_seconds}: ends the run after {len(done.rows)} steps, and figures need"
            f" {MIN_STEPS}; raise it"
        )
    if not done.latencies_s:
        raise ConfigError(f"steps={config.steps}: no response ends in those that count; raise it")
    return done


def check(config: RunConfig) -> None:
    """Refuse what is not simulated."""
    if config.emulation is None:
        raise ConfigError(
            "emulation=null: nothing says how fast GPUs and model are; add the section, with a profile such as"
            " configs/emulation/h100_7b_tp1.yaml"
        )
    if config.eval.sets:
        names = ",".join(config.eval.sets)
        raise ConfigError(f"eval.sets={names}: evaluations are not simulated; leave them out with eval.sets={{}}")
    if config.rollout.max_seconds is not None:
        raise ConfigError(
            f"rollout.max_seconds={config.rollout.max_seconds:g}: a cap on time is not simulated; leave it out"
        )
    if config.steps < MIN_STEPS:
        raise ConfigError(f"steps={config.steps}: figures need {MIN_STEPS} steps; raise it")
    _check_lengths(config, config.emulation)


def _check_lengths(config: RunConfig, emulation: EmulationConfig) -> None:
    """Refuse lengths that nearly all responses would be cut to fit."""
    most = emulation.most_sampled(config.rollout.sampling.max_new_tokens)
    prompt, cap, max_len = (
        config.simulation.prompt_tokens,
        config.rollout.sampling.max_new_tokens,
        config.rollout.max_len,
    )
    if prompt + cap > max_len:
        raise ConfigError(
            f"simulation.prompt_tokens={prompt}: with rollout.sampling.max_new_tokens={cap} above rollout.max_len="
            f"{max_len}; lower one of the first two, or raise max_len"
        )
    if emulation.median_tokens > most:
        raise ConfigError(
            f"emulation.median_tokens={emulation.median_tokens}: above the {most} tokens that the model has of"
            f" rollout.sampling.max_new_tokens={cap}, so that most responses would be cut; lower it, or raise the"
            " cap"
        )


class _Simulation:
    """Parts of one run, made on the loop that they run on."""

    def __init__(
        self,
        config: RunConfig,
        profile: EmulationProfile,
        *,
        run: RunFolder | None,
        learner: LearnerMaker,
        show: Callable[[StepRow], None],
    ) -> None:
        self._config, self._show = config, show
        self._loop = asyncio.get_running_loop()
        self._rows: list[StepRow] = []
        self._traffic: list[ControlTraffic] = []  # [steps]
        clock = LoopClock()
        self._stats = stats = Stats(clock, replicas=config.rollout.replicas, totals=Totals())
        self._record = None if run is None else SimulatedRecord(config, run, clock=clock, stats=stats)
        self._rewards = SimulatedRewards(config, self._stats)
        self._recorder = HeardRecorder(
            None if self._record is None else self._record.ledger, see=self._rewards.see
        )
        self._scheduler = scheduler = self._make_scheduler(clock)
        self._weights = weights = _weights(config, profile)
        self._cores = cores = SharedCores(config.simulation.cores)
        self._fleet = SimulatedFleet(
            config, profile.engine, scheduler=scheduler, weights=weights, stats=stats, clock=clock, cores=cores
        )
        parts = LearnerParts(
            scheduler=scheduler,
            recorder=self._recorder,
            weights=weights,
            stats=stats,
            cores=cores,
            show=self._stepped,
        )
        self._learner = learner(config, profile.learner, parts)
        self._migration = self._make_migration(clock)

    def _make_migration(self, clock: LoopClock) -> Migration:
        return Migration(
            MigrationSettings.from_config(self._config),
            scheduler=self._scheduler,
            fleet=self._fleet,
            published=self._weights.root.wait_newer,
            clock=clock,
        )

    def _make_scheduler(self, clock: LoopClock) -> TrajectoryScheduler:
        algorithm, cap = self._config.algorithm, self._config.rollout.sampling.max_new_tokens
        ids = np.zeros(self._config.simulation.prompt_tokens, np.int32)
        scheduler = TrajectoryScheduler(
            control_settings(self._config, stop_ids=(END,)),
            prompt_at=lambda index: Prompt(id="p", index=index, text="", ids=ids),
            recorder=self._recorder,
            stages=Stages(submit_score=self._finished),
            credit=Credit(group_advantages(algorithm.advantage), overlong_cost(cap, algorithm.overlong_tokens)),
            clock=clock,
        )
        scheduler.consumption.pack(packing(self._config))
        return scheduler

    async def lead(self) -> SimulatedRun:
        """Until the last step is done, or time is up."""
        record = self._record
        if record is not None:
            await record.begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._rewards.open(self._scheduler, wake=self._fleet.wake)
                background = [
                    tasks.create_task(self._rewards.run(), name="rewards"),
                    tasks.create_task(self._fleet.run(), name="fleet"),
                    tasks.create_task(self._keep_house(), name="housekeeping"),
                    tasks.create_task(self._cores.run(), name="cores"),
                ]
                if record is not None:
                    rows = record.watch(generated_tokens=lambda: self._scheduler.book.generated_tokens)
                    background.append(tasks.create_task(rows, name="rows"))
                self._learner.publish()
                if self._config.repacks:
                    speed = await self._fleet.speed()
                    background.append(tasks.create_task(self._migration.run(speed), name="repack"))
                self._stats.set_rl_phase(True)
                self._scheduler.admit()
                self._fleet.begin_rl()
                await self._learner.run(self._config.max_rl_seconds)
                done = self._outcome()  # a record goes on for a moment
                await self._end()
                for task in background:
                    task.cancel()
        finally:
            if record is not None:
                await record.close()
        return done

    def _outcome(self) -> SimulatedRun:
        return SimulatedRun(
            config=self._config,
            rows=self._rows,
            samples=tuple(self._fleet.samples),
            ended=tuple(self._rewards.ended),
            traffic=tuple(self._traffic),
            failed_s=tuple(at_s for at_s, _ in self._fleet.failures),
        )

    async def _end(self) -> None:
        """Interrupt what still runs, and put on record what it has, where there is a record."""
        self._stats.set_rl_phase(False)
        self._scheduler.pause()
        self._rewards.close()
        if self._record is not None:
            await self._fleet.stop()
            await self._record.end(restarts=self._fleet.restarts)

    # ---- between the parts

    def _finished(self, trajectory: FinishedTrajectory, prompt: Prompt) -> None:
        """A response has ended, and is to be scored."""
        self._migration.finished(trajectory)
        self._cores.spend(self._config.simulation.trajectory_cpu_s)
        self._rewards.submit(trajectory, version=self._learner.version)

    async def _keep_house(self) -> None:
        stalls = StallWatch(self._config)
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._scheduler.enforce_deadlines()
            self._fleet.wake()
            stalls.look(
                self._loop.time(),
                step=self._learner.step,
                ended=len(self._rewards.ended),
                moved=(self._rewards.num_events, self._fleet.generated_tokens),
                waits=self._stats.learner_idle_s is None or self._rewards.num_open > 0 or self._fleet.is_short,
            )

    def _stepped(self, row: StepRow) -> None:
        self._rows.append(row)
        self._traffic.append(ControlTraffic(self._rewards.num_events, self._fleet.num_reports))
        self._fleet.sample()
        self._fleet.wake()
        if self._record is not None:
            self._record.step(row)
        self._show(row)


def _weights(config: RunConfig, profile: EmulationProfile) -> ModelledWeights:
    """Weights that travel by the tree of the config, in seconds of the run."""
    assert config.emulation is not None, "`check` has looked"
    arrivals_s = host_arrivals_s(config, num_parameters=profile.learner.num_parameters)
    return ModelledWeights(
        [arrival_s / config.emulation.compression for arrival_s in arrivals_s],
        replicas_per_host=config.simulation.replicas_per_host,
        keep_versions=config.relay.keep_versions,
    )
