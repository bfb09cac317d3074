"""A run on a virtual clock: the production scheduler, packing and repacking with modelled engines and learner.

Called by `laminar simulate`, the planner and benchmarks. The profile has the times of engines and learner. The
outcome depends on the config alone (`tests/simulate/test_run.py`).
"""

import asyncio
import gc
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from laminar_lab.emulation.settings import (
    EmulationConfig,
    EmulationProfile,
    LearnerTimes,
    emulation_of,
    read_profile,
)
from laminar_lab.simulate.figures import ControlTraffic, HandOver, SimulatedRun
from laminar_lab.simulate.fleet import END, SimulatedFleet
from laminar_lab.simulate.learner import LearnerParts, SimulatedLearner
from laminar_lab.simulate.record import ObservedRecorder, SimulatedRecord
from laminar_lab.simulate.rewards import SimulatedRewards
from laminar_lab.simulate.virtual_loop import LoopClock, virtually
from laminar_lab.simulate.weights import ModelledWeights
from laminar_lab.step_time import host_arrivals_s, simulated_publish_s
from laminar_py.config import ConfigError, RunConfig
from laminar_py.control import HOUSEKEEPING_S, Credit, TrajectoryScheduler, control_settings, make_lease
from laminar_py.learner.losses import group_advantages, overlong_cost
from laminar_py.ledger import RunFolder
from laminar_py.observe import Stats, Totals
from laminar_py.records import Prompt, StepRow
from laminar_py.records.events import Leased
from laminar_py.records.trajectory import TrajectoryRef
from laminar_py.repack import Migration, MigrationSettings

MIN_STEPS = 2
STALLED_S = 1e5  # emulated, without progress of any response, after which a simulation ends
MOST_USELESS_BATCHES, VAIN_GROUPS = 100, 2000  # of ended responses without a step, after which a simulation ends

LearnerMaker: TypeAlias = Callable[[RunConfig, LearnerTimes, LearnerParts], SimulatedLearner]


def simulate(
    config: RunConfig,
    *,
    run: RunFolder | None = None,
    show: Callable[[StepRow], None] = lambda row: None,
    profile: EmulationProfile | None = None,
    learner: LearnerMaker = SimulatedLearner,
) -> SimulatedRun:
    """Simulate a run from its first step to its last. Raises `ConfigError`.

    `run` gets a record, and `show` receives each step's row. `profile` replaces the config's profile. A
    baseline, as in `experiments/paper/baselines.py`, gives a `learner` in place of the production schedule's.
    """
    check(config)
    times = profile or read_profile(emulation_of(config).profile)

    async def run_to_end() -> SimulatedRun:
        return await _Simulation(config, times, run=run, learner=learner, show=show).run_to_end()

    collects = gc.isenabled()
    gc.disable()  # a simulation makes hardly any cycle, and the collector would visit a million records again
    try:
        done = virtually(run_to_end(), limit_s=None)
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
        raise ConfigError(f"steps={config.steps}: no response ends in the steps that count; raise it")
    return done


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for a config that cannot be simulated."""
    engine = config.rollout.engine
    if not isinstance(engine, EmulationConfig):
        raise ConfigError(
            f"rollout.engine.kind={engine.kind}: nothing gives the speed of GPUs and model; name the GPU, e.g."
            " --gpu H100, or set the kind to emulated and rollout.engine.profile to a profile"
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
    _check_lengths(config, engine)


def _check_lengths(config: RunConfig, emulation: EmulationConfig) -> None:
    """Raise `ConfigError` for lengths at which most responses would be cut."""
    cap, max_len = config.rollout.sampling.max_new_tokens, config.rollout.max_len
    prompt, most = emulation.simulation.prompt_tokens, emulation.most_sampled(cap)
    if prompt + cap > max_len:
        raise ConfigError(
            f"rollout.engine.simulation.prompt_tokens={prompt} plus rollout.sampling.max_new_tokens={cap}"
            f" is above rollout.max_len={max_len}; lower one of the first two, or raise max_len"
        )
    if emulation.median_tokens > most:
        raise ConfigError(
            f"rollout.engine.median_tokens={emulation.median_tokens}: above the {most} tokens that the model has"
            f" of rollout.sampling.max_new_tokens={cap}, which would cut most responses; lower it, or raise"
            " the cap"
        )


class StallWatch:
    """Ends a simulation that makes no further step."""

    def __init__(self, config: RunConfig) -> None:
        rollout = config.rollout
        self._stalled_s = STALLED_S / emulation_of(config).compression
        groups = (MOST_USELESS_BATCHES + rollout.max_refill) * config.fresh_groups + VAIN_GROUPS
        self._most_ended = groups * rollout.group_size
        self._batch = f"rollout.prompts_per_step={rollout.prompts_per_step}"
        self._step = self._ended = 0  # responses that had ended by the last step
        self._moved, self._moved_s = (-1, -1), 0.0  # the last progress, and when it was seen

    def check_progress(self, now_s: float, *, step: int, ended: int, moved: tuple[int, int], waits: bool) -> None:
        """Compare the run with the last call. Raises `ConfigError` for a run without progress.

        `moved` grows with every event and token; `waits` means that something is sure to come, e.g. a score.
        """
        if step > self._step:
            self._step, self._ended = step, ended
        if waits or moved != self._moved:
            self._moved, self._moved_s = moved, now_s
        if now_s - self._moved_s > self._stalled_s:
            raise ConfigError(
                f"{self._batch}: step {step + 1} is not full, and no response has made progress for"
                f" {STALLED_S:g} emulated s; lower it, or raise buffer.capacity, rollout.batch_per_replica or"
                " rollout.replicas"
            )
        if ended - self._ended > self._most_ended:
            raise ConfigError(
                f"{self._batch}: {ended - self._ended:,} responses have ended since step {step}, and step"
                f" {step + 1} is not full, since groups are dropped; raise rollout.group_deadline_s"
            )


class _Simulation:
    """The parts of one run, made on the loop on which they run."""

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
        self._handed_over: list[HandOver] = []
        clock = LoopClock()
        self._stats = stats = Stats(clock, replicas=config.rollout.replicas, totals=Totals())
        self._record = None if run is None else SimulatedRecord(config, run, clock=clock, stats=stats)
        self._rewards = SimulatedRewards(config, self._stats)
        self._recorder = ObservedRecorder(
            None if self._record is None else self._record.ledger, hear=self._rewards.on_event
        )
        self._scheduler = scheduler = self._make_scheduler(clock)
        self._weights = weights = _weights(config, profile)
        self._fleet = SimulatedFleet(
            config, profile.engine, scheduler=scheduler, weights=weights, stats=stats, clock=clock
        )
        self._lease = make_lease(config, self._fleet.shared, clock=clock, record=self._on_hand_over)
        parts = LearnerParts(
            scheduler=scheduler,
            recorder=self._recorder,
            weights=weights,
            stats=stats,
            lease=self._lease,
            show=self._on_step,
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
        """Make the production scheduler on blank prompts; finished responses go to `_on_response` for scores."""
        algorithm, cap = self._config.algorithm, self._config.rollout.sampling.max_new_tokens
        ids = np.zeros(emulation_of(self._config).simulation.prompt_tokens, np.int32)
        return TrajectoryScheduler(
            control_settings(self._config, stop_ids=(END,)),
            prompt_at=lambda index: Prompt(id="p", index=index, text="", ids=ids),
            on_rewards=self._stats.add_group,
            recorder=self._recorder,
            submit_for_scoring=self._on_response,
            credit=Credit(group_advantages(algorithm.advantage), overlong_cost(cap, algorithm.overlong_tokens)),
            clock=clock,
        )

    async def run_to_end(self) -> SimulatedRun:
        """Run until the last step or the time limit; return the outcome."""
        record = self._record
        if record is not None:
            await record.begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._rewards.connect(self._scheduler, wake=self._fleet.wake)
                background = [
                    tasks.create_task(self._rewards.run(), name="rewards"),
                    tasks.create_task(self._fleet.run(), name="fleet"),
                    tasks.create_task(self._keep_house(), name="housekeeping"),
                ]
                if record is not None:
                    rows = record.watch_fleet(generated_tokens=lambda: self._scheduler.state.generated_tokens)
                    background.append(tasks.create_task(rows, name="rows"))
                self._learner.publish_version()
                await self._lease.give(self._learner.step)
                if self._config.repacks:
                    speed = await self._fleet.speed()
                    background.append(tasks.create_task(self._migration.run(speed), name="repack"))
                self._stats.set_rl_phase(True)
                self._scheduler.admit()
                self._fleet.begin_rl()
                await self._learner.run(self._config.max_rl_seconds)
                done = self._outcome()  # before the record's last events
                await self._stop_fleet()
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
            handed_over=tuple(self._handed_over),
        )

    async def _stop_fleet(self) -> None:
        """Stop the fleet; with a record, record the tokens of running trajectories."""
        self._stats.set_rl_phase(False)
        await self._lease.give(self._learner.step)
        self._scheduler.pause()
        self._rewards.close()
        if self._record is not None:
            await self._fleet.stop()
            await self._record.end(restarts=self._fleet.restarts)

    # ---- between the parts

    def _on_hand_over(self, event: Leased) -> None:
        self._recorder.append(event)
        self._handed_over.append(HandOver(self._stats.rl_s, event))

    def _on_response(self, trajectory: TrajectoryRef, prompt: Prompt) -> None:
        """Receive an ended response, and start to score it."""
        self._migration.finished(trajectory)
        self._rewards.score_response(trajectory, version=self._learner.version)

    async def _keep_house(self) -> None:
        """Enforce deadlines and check progress until cancelled; `StallWatch` raises when nothing moves."""
        stalls = StallWatch(self._config)
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._scheduler.incoming.enforce_deadlines()
            self._fleet.wake()
            stalls.check_progress(
                self._loop.time(),
                step=self._learner.step,
                ended=len(self._rewards.ended),
                moved=(self._rewards.num_events, self._fleet.generated_tokens),
                waits=self._stats.learner_idle_s is None or self._rewards.num_open > 0 or self._fleet.is_short,
            )

    def _on_step(self, row: StepRow) -> None:
        self._rows.append(row)
        self._traffic.append(ControlTraffic(self._rewards.num_events, self._fleet.num_reports))
        self._fleet.sample()
        self._fleet.wake()
        if self._record is not None:
            self._record.append_step(row)
        self._show(row)


def _weights(config: RunConfig, profile: EmulationProfile) -> ModelledWeights:
    """Make the weights, which travel by the relay tree of the config, in virtual seconds."""
    arrivals_s = host_arrivals_s(config, num_parameters=profile.learner.num_published)
    return ModelledWeights(
        [arrival_s / emulation_of(config).compression for arrival_s in arrivals_s],
        publish_s=simulated_publish_s(config, profile),
        replicas_per_host=emulation_of(config).simulation.replicas_per_host,
        keep_versions=config.relay.keep_versions,
    )
