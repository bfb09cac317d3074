"""The quickstart's task, predicted and run: rows `plan_*` of `laminar bench plan --only quickstart`.

In each round the machine is calibrated, a run of the base setting tells lengths and what the machinery takes, and
each other setting is simulated with that and run for real. Invariant: nothing of a run that is predicted is used
to predict it. Run it in the project's folder.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from laminar_py.bench.plan.cpu import watching_cpu
from laminar_py.bench.plan.facts import RunFacts, read_facts
from laminar_py.bench.plan.settings import Compared, Setting, median_error, trained_tokens_per_s, warm_steps
from laminar_py.bench.report import Row
from laminar_py.bench.runs import train
from laminar_py.bench.turns import Tell, spread
from laminar_py.calibration.profile import calibrate
from laminar_py.config.emulated_profile import EmulationProfile
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.relay.cores import num_cores
from laminar_py.simulate.run import simulate

CONFIG = Path("configs/quickstart.yaml")
STEPS = 20
LIMIT_S = 600.0  # for a run, its warm start included
CALIBRATIONS = 2  # rounds of a calibration
BASE = ("rollout.without_signal=train", "eval.sets={}", f"steps={STEPS}")
SLOW_REWARD = "reward.use=[experiments/slow_reward/reward.py:slow]"
SETTINGS = (
    Setting("sync", ("schedule=sync",)),
    Setting("one_step", ("schedule=one_step",)),
    Setting("one_replica", ("rollout.replicas=1",)),
    Setting("sync_one_replica", ("schedule=sync", "rollout.replicas=1")),
    Setting("half_batch", ("rollout.prompts_per_step=16",)),
    Setting("double_batch", ("rollout.prompts_per_step=64",)),
    Setting("stale_0", ("staleness.max_staleness=0",)),
    Setting("slow_reward", (SLOW_REWARD,), ("simulation.reward_median_s=0.5", "simulation.reward_sigma=1.4")),
)
WITHIN, SPREADS = 0.15, 2.0  # an error that is asked for, or so many times the spread of the runs


def rows(*, runs: int, tell: Tell) -> list[Row]:
    """Predicted over measured, medians of `runs` rounds; each takes about six minutes on two cores."""
    if not CONFIG.is_file():
        raise ConfigError(f"{CONFIG}: no such file; run this in the project's folder")
    predicted: dict[str, list[float]] = {one.name: [] for one in SETTINGS}
    measured: dict[str, list[float]] = {one.name: [] for one in SETTINGS}
    loads: list[float] = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        folder = Path(name)
        for turn in range(runs):
            profile, facts = _calibrated(folder, turn, tell)
            first = turn % len(SETTINGS)
            for one in SETTINGS[first:] + SETTINGS[:first]:
                predicted[one.name].append(predict(one, profile, facts))
                done = train(CONFIG, [f"name={one.name}", f"runs={folder}", *BASE, *one.settings], limit_s=LIMIT_S)
                measured[one.name].append(trained_tokens_per_s(done))
                loads.append(os.getloadavg()[0])
                tell(
                    f"round {turn + 1} of {runs}, {one.name}: predicted {predicted[one.name][-1]:,.0f}, measured"
                    f" {measured[one.name][-1]:,.0f} trained tokens/s; load average {loads[-1]:.1f}"
                )
    return table([Compared(one.name, predicted[one.name], measured[one.name]) for one in SETTINGS], loads)


def _calibrated(folder: Path, turn: int, tell: Tell) -> tuple[Path, RunFacts]:
    """A profile of this machine and facts of a run of the base setting."""
    config = load_config(CONFIG, list(BASE))
    profile = calibrate(config, repeats=CALIBRATIONS, tell=lambda line: None).profile
    with watching_cpu() as cpu:
        done = train(CONFIG, ["name=base", f"runs={folder}", *BASE], limit_s=LIMIT_S)
    facts = read_facts(done, cpu, profile.learner, cap=config.rollout.sampling.max_new_tokens)
    tell(f"base: {trained_tokens_per_s(done):,.0f} trained tokens/s; {profile}; {facts}")
    path = folder / f"profile-{turn}.yaml"
    path.write_text(yaml.safe_dump(_handing_over(profile, facts.handover_s).model_dump()))
    return path, facts


def _handing_over(profile: EmulationProfile, seconds: float) -> EmulationProfile:
    """The profile with what a step takes beside the learner's own time."""
    learner = profile.learner.model_copy(update={"optimizer_s": profile.learner.optimizer_s + seconds})
    return profile.model_copy(update={"learner": learner})


def predict(one: Setting, profile: Path, facts: RunFacts) -> float:
    """Trained tokens a second of a simulated run."""
    settings = one.settings if one.simulated is None else one.simulated
    given = [f"emulation.profile={profile}", "warm_start=null", *facts.settings]
    return simulate(load_config(CONFIG, [*BASE, *given, *settings])).figures.trained_tokens_per_s


def table(found: Sequence[Compared], loads: Sequence[float]) -> list[Row]:
    """Rows of all settings; `loads` are the load averages at the end of the runs."""
    conditions = (
        f"{CONFIG} without a group filter and evaluations, steps {warm_steps(STEPS) + 1} to {STEPS} of {STEPS};"
        " each round calibrates, runs the base setting, whose ledger gives log-normal lengths (median, and sigma"
        " with which the mean is right), and then each setting; learner, engines and all else share"
        f" {num_cores()} cores, less what others took of them in the base run; load average after a run"
        f" {spread(loads, '.1f')}"
    )
    within = [one for one in found if abs(one.error) <= max(WITHIN, SPREADS * one.spread)]
    return [
        Row("plan_error_median", median_error(found), "of measured trained tokens/s", conditions),
        Row(
            "plan_within",
            float(len(within)),
            f"settings of {len(found)} within 15 % or twice the spread",
            conditions,
        ),
        *(one.row(f"plan_{one.name}", conditions=conditions) for one in found),
    ]
