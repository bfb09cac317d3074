"""Training throughput of whole schedules at equal devices, on emulated replicas and an emulated learner.

`sync` is colocated: all devices generate, then all train. Training gets the speed with which generation makes up
`GENERATION_SHARE` of a step. Each other schedule has as many devices in all, and divides them between replicas and
learner as a pilot run finds best for it (`PilotRun`, `best_split`).
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from laminar_lab.bench.repack.arms import FULL
from laminar_lab.bench.repack.workload import (
    COMPRESSION,
    CONFIG,
    SIGMA,
    SPREAD_S,
    Window,
    run_arm,
    settings_of,
)
from laminar_lab.bench.report import Row, log_line
from laminar_lab.bench.runs import FinishedRun, require_project_file, train
from laminar_lab.emulation.settings import emulation_of
from laminar_py.config import load_config
from laminar_py.config.rollout import DEFAULT_PLANNER, NO_PLANNER

ROWS = (
    "sync_tokens_per_s sync_generation_share sync_disaggregated_over_sync one_step_over_sync async_over_sync "
    "async_repack_over_sync async_full_over_sync async_repack_of_ceiling sync_tokens_per_s_20x "
    "sync_generation_share_20x sync_disaggregated_over_sync_20x one_step_over_sync_20x async_over_sync_20x "
    "async_repack_over_sync_20x async_full_over_sync_20x async_repack_of_ceiling_20x"
)
DEVICES = 16
SEED = 0
SIGMA_20X = 1.288  # p99 of lengths is 20 times the median
GENERATION_SHARE = 0.831  # of a synchronous step (Laminar, figure of the motivation)
PILOT = Window(600.0, 600.0)
WARM_STEPS = 1
STEPS = 4
GROUP_SIZE, STEP_GROUPS = 8, 400


@dataclass(frozen=True, slots=True)
class Contender:
    """A schedule that divides the devices between replicas and learner."""

    name: str
    schedule: str
    arm: str | None = None  # of `arms`, for its replicas


SYNC = Contender("sync", "sync")
CONTENDERS = (
    Contender("sync_disaggregated", "sync"),
    Contender("one_step", "one_step"),
    Contender("async", "async", NO_PLANNER),
    Contender("async_repack", "async", DEFAULT_PLANNER),
    Contender("async_full", "async", FULL),
)


@dataclass(frozen=True, slots=True)
class ScheduleRate:
    """Speed of a run from the end of its warm steps on."""

    tokens_per_s: float  # trained, of an emulated second
    learner_share: float  # of the time, in which the learner was busy


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotRun:
    """Times and rates of all devices, in emulated seconds."""

    full_s: float  # of a synchronous step: generation, until nothing waits any more
    tail_s: float  # generation, from there on
    train_s: float  # training, on all devices
    step_tokens: float  # response tokens in a step
    rates: dict[str, float]  # tokens/s of all devices as replicas, by arm of the workload


def rows() -> list[Row]:
    """The table of each length skew, with one seed. 15 minutes for one, and 5 before."""
    require_project_file(CONFIG)
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        return [row for sigma in (SIGMA, SIGMA_20X) for row in _compare(sigma, Path(folder))]


def _compare(sigma: float, folder: Path) -> list[Row]:
    pilot, profile = _pilot(sigma, folder)
    splits = {contender.name: best_split(contender, pilot) for contender in CONTENDERS}
    log_line(f"sigma {sigma:g}: {pilot}; replicas {splits}")
    found: dict[str, ScheduleRate] = {}
    for contender in [SYNC, *CONTENDERS]:
        replicas = splits.get(contender.name, DEVICES)
        found[contender.name] = measured(_run(contender, replicas, sigma=sigma, profile=profile, folder=folder))
        log_line(f"{contender.name} on {replicas} replicas: {found[contender.name]}")
    return table(found, splits, sigma=sigma)


def best_split(contender: Contender, pilot: PilotRun) -> int:
    """Replicas out of all devices with which a step is shortest."""
    return min(range(1, DEVICES), key=lambda replicas: _step_s(contender, replicas, pilot))


def _step_s(contender: Contender, replicas: int, pilot: PilotRun) -> float:
    train_s = pilot.train_s * DEVICES / (DEVICES - replicas)
    if contender.arm is not None:
        return max(pilot.step_tokens / (pilot.rates[contender.arm] * replicas / DEVICES), train_s)
    generate_s = pilot.full_s * DEVICES / replicas + pilot.tail_s
    return max(generate_s, train_s) if contender.schedule == "one_step" else generate_s + train_s


def _pilot(sigma: float, folder: Path) -> tuple[PilotRun, Path]:
    """Measure the devices; also a profile whose learner takes its share of a synchronous step."""
    done = _run(SYNC, DEVICES, sigma=sigma, profile=_profile(), folder=folder, steps=2)
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
    arms = [contender.arm for contender in CONTENDERS if contender.arm is not None]
    rates = {arm: run_arm(arm, seed=SEED, folder=folder, window=PILOT, sigma=sigma).tokens_per_s for arm in arms}
    step_tokens = last.trained_tokens - first.trained_tokens
    return PilotRun(
        full_s=full_s, tail_s=generate_s - full_s, train_s=train_s, step_tokens=step_tokens, rates=rates
    ), path


def _profile() -> Path:
    return emulation_of(load_config(CONFIG, [])).profile


def _run(
    contender: Contender,
    replicas: int,
    *,
    sigma: float,
    profile: Path,
    folder: Path,
    steps: int = STEPS,
) -> FinishedRun:
    batch = 200 if contender.schedule == "async" else GROUP_SIZE * -(-STEP_GROUPS // replicas)
    settings = [
        f"name=schedules-{contender.name}",
        f"runs={folder}",
        *settings_of(contender.arm or NO_PLANNER, seed=SEED, replicas=replicas),
        f"schedule={contender.schedule}",
        f"rollout.batch_per_replica={batch}",
        f"rollout.engine.profile={profile}",
        f"rollout.engine.learner_devices={DEVICES if contender is SYNC else DEVICES - replicas}",
        f"rollout.engine.sigma={sigma}",
        f"rollout.engine.start_spread_s={SPREAD_S if contender.schedule == 'async' else 0.0}",
        f"steps={steps}",
    ]
    return train(CONFIG, settings)


def measured(done: FinishedRun) -> ScheduleRate:
    """Return the rate of a run and the learner's share of its time, after the warm steps."""
    first, last = done.steps[WARM_STEPS - 1], done.steps[-1]
    elapsed_s = last.rl_s - first.rl_s
    return ScheduleRate(
        (last.trained_tokens - first.trained_tokens) / elapsed_s / COMPRESSION,
        (last.learner_busy_s - first.learner_busy_s) / elapsed_s,
    )


def table(found: dict[str, ScheduleRate], splits: dict[str, int], *, sigma: float) -> list[Row]:
    """Rows of `sync` and of each contender."""
    skew = "_20x" if sigma == SIGMA_20X else ""
    conditions = (
        f"{DEVICES} devices in all, sync colocated with generation {GENERATION_SHARE:.1%} of its step; replicas of"
        f" the others: {', '.join(f'{name} {replicas}' for name, replicas in splits.items())}; lengths with sigma"
        f" {sigma:g}; steps {WARM_STEPS + 1} to {STEPS} of 3,200 trajectories, compressed {COMPRESSION} times,"
        f" seed {SEED}"
    )
    rates = {name: run.tokens_per_s for name, run in found.items()}
    generating = 1 - found["sync"].learner_share
    of_ceiling = rates["async_repack"] / rates["async_full"]
    return [
        Row(f"sync_tokens_per_s{skew}", rates["sync"], "trained tokens/s, emulated", conditions),
        Row(f"sync_generation_share{skew}", generating, "of its step, as measured", conditions),
        *(
            Row(f"{name}_over_sync{skew}", rates[name] / rates["sync"], "x trained tokens/s", conditions)
            for name in splits
        ),
        Row(f"async_repack_of_ceiling{skew}", of_ceiling, "of full replicas", conditions),
    ]
