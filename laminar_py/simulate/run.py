"""A run on a virtual clock: scheduler, packing and repacking of any run, among modelled engines and learner.

Called by `laminar simulate`. Nothing is generated or trained; time is what the profile says. Invariant: what comes
out depends on the config alone.
"""

import asyncio
import gc
import math
import random
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from laminar_py.config.emulated_profile import EmulationProfile, LearnerTimes, read_profile
from laminar_py.config.emulation import EmulationConfig
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.closing import Credit, Stages
from laminar_py.control.deadlines import HOUSEKEEPING_S
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.settings import control_settings, packing
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.records.events import AnyEvent, Dropped, Issued
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.metrics import StepRow
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import Prompt
from laminar_py.repack.migration import Migration, MigrationSettings
from laminar_py.simulate.cores import SharedCores
from laminar_py.simulate.figures import ControlTraffic, EndedResponse, SimulatedRun
from laminar_py.simulate.fleet import END, SimulatedFleet
from laminar_py.simulate.learner import LearnerParts, SimulatedLearner
from laminar_py.simulate.parts import ModelledWeights, NoRecord
from laminar_py.simulate.virtual_loop import LoopClock, virtually
from laminar_py.telemetry.stats import Stats, Totals

MIN_STEPS = 2


LearnerMaker: TypeAlias = Callable[[RunConfig, LearnerTimes, LearnerParts], SimulatedLearner]


def simulate(
    config: RunConfig,
    *,
    show: Callable[[StepRow], None] = lambda row: None,
    profile: EmulationProfile | None = None,
    learner: LearnerMaker = SimulatedLearner,
) -> SimulatedRun:
    """Lead a run from its first step to its last; `show` has each. Raises `ConfigError`.

    `profile` takes the place of the one that the config names, `learner` that of the production learner.
    """
    check(config)
    assert config.emulation is not None, "`check` has looked"
    times = profile or read_profile(config.emulation.profile)

    async def lead() -> SimulatedRun:
        return await _Simulation(config, times, learner, show).lead()

    collects = gc.isenabled()
    gc.disable()  # next to nothing is freed by it, and what lives would be looked at ever again
    try:
        done = virtually(lead(), limit_s=math.inf)
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
    if emulation.median_tokens > cap:
        raise ConfigError(
            f"emulation.median_tokens={emulation.median_tokens}: above rollout.sampling.max_new_tokens={cap}, so"
            " that most responses would be cut; lower it, or raise the cap"
        )


class _Simulation:
    """Parts of one run, made on the loop that they run on."""

    def __init__(
        self,
        config: RunConfig,
        profile: EmulationProfile,
        learner: LearnerMaker,
        show: Callable[[StepRow], None],
    ) -> None:
        self._config = config
        self._show = show
        self._loop = asyncio.get_running_loop()
        self._random = random.Random(config.seed)
        self._ids = np.zeros(config.simulation.prompt_tokens, np.int32)
        self._rows: list[StepRow] = []
        self._issued: dict[str, float] = {}  # when, on the loop's clock
        self._ended: list[EndedResponse] = []
        self._traffic: list[ControlTraffic] = []  # [steps]
        self._num_events = 0
        clock = LoopClock()
        self._stats = stats = Stats(clock, replicas=config.rollout.replicas, totals=Totals())
        self._scheduler = scheduler = self._make_scheduler(clock)
        self._weights = weights = ModelledWeights()
        self._cores = cores = SharedCores(config.simulation.cores)
        self._fleet = SimulatedFleet(
            config, profile.engine, scheduler=scheduler, weights=weights, stats=stats, clock=clock, cores=cores
        )
        self._learner = learner(
            config,
            profile.learner,
            LearnerParts(scheduler=scheduler, weights=weights, stats=stats, cores=cores, show=self._stepped),
        )
        self._migration = Migration(
            MigrationSettings.of(config),
            scheduler=scheduler,
            fleet=self._fleet,
            published=weights.wait_newer,
            clock=clock,
        )

    def _make_scheduler(self, clock: LoopClock) -> TrajectoryScheduler:
        algorithm, cap = self._config.algorithm, self._config.rollout.sampling.max_new_tokens
        scheduler = TrajectoryScheduler(
            control_settings(self._config, stop_ids=(END,)),
            prompt_at=self._prompt,
            recorder=NoRecord(self._see),
            stages=Stages(submit_score=self._finished),
            credit=Credit(group_advantages(algorithm.advantage), overlong_cost(cap, algorithm.overlong_tokens)),
            clock=clock,
        )
        scheduler.consumption.pack(packing(self._config))
        return scheduler

    async def lead(self) -> SimulatedRun:
        """Until the last step is done, or time is up."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            background = [
                tasks.create_task(self._fleet.run(), name="fleet"),
                tasks.create_task(self._keep_house(), name="housekeeping"),
                tasks.create_task(self._cores.run(), name="cores"),
            ]
            self._learner.publish()
            if self._config.repacks:
                speed = await self._fleet.speed()
                background.append(tasks.create_task(self._migration.run(speed), name="repack"))
            self._stats.rl_phase(True)
            self._scheduler.admit()
            self._fleet.wake()
            await self._learner.run(self._config.max_rl_seconds)
            for task in background:
                task.cancel()
        return SimulatedRun(
            config=self._config,
            rows=self._rows,
            samples=self._fleet.samples,
            ended=self._ended,
            traffic=self._traffic,
        )

    # ---- data and reward

    def _prompt(self, index: int) -> Prompt:
        return Prompt(id=f"p{index}", index=index, text="", ids=self._ids)

    def _see(self, event: AnyEvent) -> None:
        """Count it, and know when each training trajectory was issued, until it has ended."""
        self._num_events += 1
        if isinstance(event, Issued):
            self._issued[event.trajectory_id] = self._loop.time()
        elif isinstance(event, Dropped):
            self._issued.pop(event.trajectory_id, None)

    def _finished(self, trajectory: FinishedTrajectory, prompt: Prompt) -> None:
        """Score it after a while."""
        self._migration.finished(trajectory)
        if trajectory.id in self._issued:  # else it was dropped, and goes on for the record alone
            latency_s = self._loop.time() - self._issued.pop(trajectory.id)
            age = self._learner.version - trajectory.oldest_version
            self._ended.append(EndedResponse(self._stats.rl_s, latency_s, age))
        reward = self._config.simulation
        self._cores.spend(reward.trajectory_cpu_s)
        delay_s = reward.reward_median_s * self._random.lognormvariate(0.0, reward.reward_sigma)
        value = float(self._random.random() < reward.solved)
        self._loop.call_later(delay_s, self._score, trajectory, value)

    def _score(self, trajectory: FinishedTrajectory, value: float) -> None:
        self._tasks.create_task(self._deliver(trajectory, value), name="score")

    async def _deliver(self, trajectory: FinishedTrajectory, value: float) -> None:
        await self._scheduler.closing.on_score(Score(trajectory_id=trajectory.id, value=value))
        self._stats.scored(value, (), trajectory.length)

    # ---- beside the learner

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._scheduler.enforce_deadlines()
            self._fleet.wake()

    def _stepped(self, row: StepRow) -> None:
        self._rows.append(row)
        self._traffic.append(ControlTraffic(self._num_events, self._fleet.num_reports))
        self._fleet.sample()
        self._fleet.wake()
        self._show(row)
