"""Trained tokens a second of the quickstart under eight settings: predicted by the simulator, and measured.

Each round calibrates the machine. A run of the base setting then gives lengths and CPU times; with these the next
two settings are simulated, and then run for real. No figure of a predicted run is used to predict it. Run this in
the project's folder.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from laminar_lab.bench.plan.facts import (
    RunFacts,
    read_facts,
    warm_steps,
    watching_cpu,
)
from laminar_lab.bench.report import Row, log_line, spread
from laminar_lab.bench.runs import require_project_file, train
from laminar_lab.calibration.profile import calibrate
from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.simulate.figures import SimulatedFigures
from laminar_lab.simulate.run import simulate
from laminar_py.config import RunConfig, load_config

ROWS = "plan_error_median plan_within"
CONFIG = Path("configs/quickstart.yaml")
STEPS = 20
LIMIT_S = 600.0  # for a run, its warm start included
CALIBRATIONS = 2  # rounds of a calibration
RUNS_OF_A_BASE = 2  # settings that one run of the base predicts, since a machine's speed drifts
SEEDS = 3  # of a simulation
BASE = ("rollout.without_signal=train", "eval.sets={}", f"steps={STEPS}")


@dataclass(frozen=True, slots=True)
class Setting:
    """Overrides of a config under a name, e.g. `Setting("sync", ("schedule=sync",))`.

    The simulation takes `simulated` instead of `settings` where only a real run can have these.
    """

    name: str
    settings: tuple[str, ...]
    simulated: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Trained tokens a second of a setting by round, e.g. `Compared("sync", [8100, 8200], [7900, 8000])`."""

    name: str
    predicted: Sequence[float]
    measured: Sequence[float]

    @property
    def error(self) -> float:
        """Median predicted over median measured, less 1."""
        return median(self.predicted) / median(self.measured) - 1

    def __str__(self) -> str:
        return f"{self.name} {spread(self.predicted)}, {spread(self.measured)}"

    @property
    def spread(self) -> float:
        """Range of the measured over their median."""
        return (max(self.measured) - min(self.measured)) / median(self.measured)


BASE_SETTING = Setting("base", ())
SLOW_REWARD = "reward.use=[experiments/slow_reward/reward.py:slow]"
SETTINGS = (
    Setting("sync", ("schedule=sync",)),
    Setting("one_step", ("schedule=one_step",)),
    Setting("one_replica", ("rollout.replicas=1",)),
    Setting("sync_one_replica", ("schedule=sync", "rollout.replicas=1")),
    Setting("half_batch", ("rollout.prompts_per_step=16",)),
    Setting("double_batch", ("rollout.prompts_per_step=64",)),
    Setting("stale_0", ("staleness.max_staleness=0",)),
    Setting(
        "slow_reward",
        (SLOW_REWARD,),
        ("rollout.engine.simulation.reward_median_s=0.5", "rollout.engine.simulation.reward_sigma=1.4"),
    ),
)
WITHIN, SPREADS = 0.15, 2.0  # the largest error that counts as within, or times the spread of the runs


def rows(*, runs: int = 3) -> list[Row]:
    """Compare predicted with measured, medians of `runs` rounds; a round takes about nine minutes on two cores."""
    require_project_file(CONFIG)
    predicted: dict[str, list[float]] = {one.name: [] for one in SETTINGS}
    measured: dict[str, list[float]] = {one.name: [] for one in SETTINGS}
    loads: list[float] = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        folder = Path(name)
        for turn in range(runs):
            config = load_config(CONFIG, list(BASE))
            alone = calibrate(config, repeats=CALIBRATIONS, log=lambda line: None).profile
            first = turn % len(SETTINGS)
            for number, one in enumerate(SETTINGS[first:] + SETTINGS[:first]):
                if number % RUNS_OF_A_BASE == 0:
                    base = _base(folder, alone, config)
                predicted[one.name].append(base.predict(one).trained_tokens_per_s)
                done = train(CONFIG, [f"name={one.name}", f"runs={folder}", *BASE, *one.settings], limit_s=LIMIT_S)
                measured[one.name].append(done.trained_tokens_per_s(warm_steps(STEPS)))
                loads.append(os.getloadavg()[0])
                log_line(
                    f"round {turn + 1} of {runs}, {one.name}: predicted {predicted[one.name][-1]:,.0f}, measured"
                    f" {measured[one.name][-1]:,.0f} trained tokens/s; load average {loads[-1]:.1f}"
                )
    return table([Compared(one.name, predicted[one.name], measured[one.name]) for one in SETTINGS], loads)


@dataclass(frozen=True, slots=True)
class KnownBase:
    """A run of the base setting; it predicts other settings."""

    facts: RunFacts
    profile: EmulationProfile  # of a machine whose processes share cores and caches

    def predict(self, one: Setting) -> SimulatedFigures:
        """Simulate a setting with several seeds and return the figures of the median speed."""
        settings = one.settings if one.simulated is None else one.simulated
        given = ["rollout.engine.profile=calibrated", "warm_start=null", *self.facts.settings, *settings]
        found = [
            simulate(load_config(CONFIG, [*BASE, *given, f"seed={seed}"]), profile=self.profile).figures
            for seed in range(SEEDS)
        ]
        return sorted(found, key=lambda figures: figures.trained_tokens_per_s)[SEEDS // 2]

    def fitted(self) -> "KnownBase":
        """Return a base whose engines take as long for a token as the replicas of the run took.

        Slower engines have larger batches, so a second fit finds less to change.
        """
        slower = self.facts.replica_cpu_s / self.predict(BASE_SETTING).engine_s_per_token
        engine = self.profile.engine.slower(slower)
        return replace(self, profile=self.profile.model_copy(update={"engine": engine}))


def _base(folder: Path, alone: EmulationProfile, config: RunConfig) -> KnownBase:
    """Run the base setting; `alone` is the profile of engine and learner without other work on the machine."""
    with watching_cpu() as cpu:
        done = train(CONFIG, ["name=base", f"runs={folder}", *BASE], limit_s=LIMIT_S)
    facts = read_facts(done, cpu, alone.learner, cap=config.rollout.sampling.max_new_tokens)
    learner = alone.learner.model_copy(
        update={
            "train_tokens_per_s": alone.learner.train_tokens_per_s / facts.learner_slowdown,
            "optimizer_s": alone.learner.optimizer_s * facts.learner_slowdown + facts.handover_s,
        }
    )
    known = KnownBase(facts, alone.model_copy(update={"learner": learner})).fitted().fitted()
    log_line(
        f"base: measured {done.trained_tokens_per_s(warm_steps(STEPS)):,.0f},"
        f" explained {known.predict(BASE_SETTING).trained_tokens_per_s:,.0f} trained tokens/s; {known}"
    )
    return known


def table(found: Sequence[Compared], loads: Sequence[float]) -> list[Row]:
    """Make the rows of all settings; `loads` are the load averages at the end of the runs."""
    conditions = (
        f"{CONFIG} without a group filter and evaluations, steps {warm_steps(STEPS) + 1} to {STEPS} of {STEPS};"
        f" each round calibrates; before each {RUNS_OF_A_BASE} settings the base setting runs, whose ledger gives"
        " log-normal lengths (median, sigma with which the mean is right, how alike those of a prompt are), and"
        " whose processes' CPU time says how much slower engines and learner are than alone; learner, engines and"
        f" all else share {len(os.sched_getaffinity(0))} cores, less the share of other programs in the base run;"
        f" load average after a run {spread(loads, '.1f')}"
    )
    within = [one for one in found if abs(one.error) <= max(WITHIN, SPREADS * one.spread)]
    return [
        Row(
            "plan_error_median",
            median(abs(one.error) for one in found),
            "of measured trained tokens/s",
            conditions,
        ),
        Row(
            "plan_within",
            float(len(within)),
            f"settings of {len(found)} within 15 % or twice the spread",
            f"{conditions}; predicted and measured: {'; '.join(map(str, found))}",
        ),
    ]
