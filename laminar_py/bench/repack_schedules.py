"""Training throughput of whole schedules at equal devices, on emulated replicas and an emulated learner.

`sync` is colocated: all devices generate, then all train, and training is given the speed at which generation
makes up `GENERATION_SHARE` of its step. The others have as many devices in all, divided between replicas and
learner as serves each best by what they were seen to do before (`Pilot`, `best_split`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

from laminar_py.bench.repack_workload import (
    COMPRESSION,
    CONFIG,
    SPREAD_S,
    Window,
    check_folder,
    run_arm,
    settings_of,
)
from laminar_py.bench.report import Row
from laminar_py.bench.runs import FinishedRun, train
from laminar_py.config.loading import load_config
from laminar_py.config.repack import RepackPlanner

DEVICES = 16
GENERATION_SHARE = 0.831  # of a synchronous step (Laminar, figure of the motivation)
PILOT = Window(600.0, 600.0)
WARM_STEPS = 1
STEPS = 4
GROUP_SIZE, STEP_GROUPS = 8, 400


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule on so many replicas; the other devices train."""

    name: str
    schedule: str
    arm: str | None = None  # of the workload, whose replicas it has

    @property
    def planner(self) -> RepackPlanner:
        """What moves trajectories."""
        return RepackPlanner.PREDICTIVE if self.arm == "predictive" else RepackPlanner.NONE


SYNC = Plan("sync", "sync")
PLANS = (
    Plan("sync_disaggregated", "sync"),
    Plan("one_step", "one_step"),
    Plan("async", "async", "none"),
    Plan("async_repack", "async", "predictive"),
    Plan("async_full", "async", "full"),  # the ceiling: replicas that never drain
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, from the end of its warm steps on."""

    tokens_per_s: float  # trained, of an emulated second
    learner_share: float  # of the time, in which the learner was busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """What the devices were seen to do, in emulated seconds."""

    full_s: float  # of a synchronous step: generation, until nothing waits any more
    tail_s: float  # generation, from there on
    train_s: float  # training, on all devices
    step_tokens: float  # response tokens in a step
    rates: dict[str, float]  # tokens/s of all devices as replicas, by arm of the workload


def schedule_rows(*, seeds: Sequence[int], sigma: float, tell: Callable[[str], None], folder: Path) -> list[Row]:
    """The table for lengths with this sigma. 15 minutes a seed, and 5 before."""
    check_folder()
    pilot, profile = _pilot(seeds[0], sigma, folder)
    splits = {plan.name: best_split(plan, pilot) for plan in PLANS}
    tell(f"sigma {sigma:g}: {pilot}; replicas {splits}")
    found: dict[str, list[Measured]] = {}
    for seed in seeds:
        for plan in [SYNC, *PLANS]:
            replicas = splits.get(plan.name, DEVICES)
            done = _run(plan, replicas, seed=seed, sigma=sigma, profile=profile, folder=folder)
            found.setdefault(plan.name, []).append(measured(done))
            tell(f"seed {seed}, {plan.name} on {replicas} replicas: {found[plan.name][-1]}")
    return _rows(found, splits, seeds, sigma)


def best_split(plan: Plan, pilot: Pilot) -> int:
    """Replicas out of all devices with which a step is shortest."""
    return min(range(1, DEVICES), key=lambda replicas: _step_s(plan, replicas, pilot))


def _step_s(plan: Plan, replicas: int, pilot: Pilot) -> float:
    train_s = pilot.train_s * DEVICES / (DEVICES - replicas)
    if plan.arm is not None:
        return max(pilot.step_tokens / (pilot.rates[plan.arm] * replicas / DEVICES), train_s)
    generate_s = pilot.full_s * DEVICES / replicas + pilot.tail_s
    return max(generate_s, train_s) if plan.schedule == "one_step" else generate_s + train_s


def _pilot(seed: int, sigma: float, folder: Path) -> tuple[Pilot, Path]:
    """What the devices do, and a profile whose learner takes its share of a synchronous step."""
    done = _run(SYNC, DEVICES, seed=seed, sigma=sigma, profile=_profile(), folder=folder, steps=2)
    first, last = done.steps[0], done.steps[-1]
    generated_s = last.rl_s - first.rl_s - (last.learner_busy_s - first.learner_busy_s)
    waits = [row.rl_s - first.rl_s for row in done.fleet if any(row.waiting)]
    full_s = COMPRESSION * max(
        wait_s for wait_s in waits if 0 < wait_s < generated_s
    )  # the next batch waits later
    generate_s = COMPRESSION * generated_s
    train_s = generate_s * (1 / GENERATION_SHARE - 1)
    settings = yaml.safe_load(_profile().read_text())
    fixed_s = settings["learner"]["optimizer_s"]
    seen_s = COMPRESSION * last.learner_s
    settings["learner"]["train_tokens_per_s"] *= (seen_s - fixed_s) / (train_s - fixed_s)
    path = folder / f"profile-{sigma:g}.yaml"
    path.write_text(yaml.safe_dump(settings))
    arms = [plan.arm for plan in PLANS if plan.arm is not None]
    rates = {arm: run_arm(arm, seed=seed, folder=folder, window=PILOT, sigma=sigma).tokens_per_s for arm in arms}
    step_tokens = last.trained_tokens - first.trained_tokens
    return Pilot(
        full_s=full_s, tail_s=generate_s - full_s, train_s=train_s, step_tokens=step_tokens, rates=rates
    ), path


def _profile() -> Path:
    emulation = load_config(CONFIG, []).emulation
    assert emulation is not None, f"{CONFIG} is of an emulation"
    return emulation.profile


def _run(
    plan: Plan, replicas: int, *, seed: int, sigma: float, profile: Path, folder: Path, steps: int = STEPS
) -> FinishedRun:
    batch = 200 if plan.schedule == "async" else GROUP_SIZE * -(-STEP_GROUPS // replicas)
    settings = [
        f"name=schedules-{plan.name}",
        f"runs={folder}",
        *settings_of(plan.planner, seed=seed, replicas=replicas),
        f"schedule={plan.schedule}",
        f"rollout.on_new_weights={'in_place' if plan.arm == 'full' else 'drain'}",
        f"rollout.batch_per_replica={batch}",
        f"emulation.profile={profile}",
        f"emulation.learner_devices={DEVICES if plan is SYNC else DEVICES - replicas}",
        f"emulation.sigma={sigma}",
        f"emulation.start_spread_s={SPREAD_S if plan.schedule == 'async' else 0.0}",
        f"steps={steps}",
    ]
    return train(CONFIG, settings)


def measured(done: FinishedRun) -> Measured:
    """What counts of a run."""
    first, last = done.steps[WARM_STEPS - 1], done.steps[-1]
    elapsed_s = last.rl_s - first.rl_s
    return Measured(
        (last.trained_tokens - first.trained_tokens) / elapsed_s / COMPRESSION,
        (last.learner_busy_s - first.learner_busy_s) / elapsed_s,
    )


def _rows(
    found: dict[str, list[Measured]], splits: dict[str, int], seeds: Sequence[int], sigma: float
) -> list[Row]:
    skew = "" if sigma < 1.2 else "_20x"
    conditions = (
        f"{DEVICES} devices in all, sync colocated with generation {GENERATION_SHARE:.1%} of its step; replicas of"
        f" the others: {', '.join(f'{name} {replicas}' for name, replicas in splits.items())}; lengths with sigma"
        f" {sigma:g}; steps {WARM_STEPS + 1} to {STEPS} of 3,200 trajectories, compressed {COMPRESSION} times,"
        f" median of seeds {', '.join(map(str, seeds))}"
    )

    def over(name: str, other: str) -> float:
        pairs = zip(found[name], found[other], strict=True)
        return median(one.tokens_per_s / two.tokens_per_s for one, two in pairs)

    tokens_per_s = median(run.tokens_per_s for run in found["sync"])
    generating = median(1 - run.learner_share for run in found["sync"])
    return [
        Row(f"sync_tokens_per_s{skew}", tokens_per_s, "trained tokens/s, emulated", conditions),
        Row(f"sync_generation_share{skew}", generating, "of its step, as measured", conditions),
        *(Row(f"{name}_over_sync{skew}", over(name, "sync"), "x trained tokens/s", conditions) for name in splits),
        Row(f"async_repack_of_ceiling{skew}", over("async_repack", "async_full"), "of full replicas", conditions),
    ]
