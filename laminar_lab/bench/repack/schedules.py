"""Training throughput of whole schedules at equal devices, on emulated replicas and an emulated learner.

`sync` is colocated: all devices generate, then all train. Training gets the speed with which generation makes up
`GENERATION_SHARE` of a step. Every other schedule divides as many devices between replicas and learner; pilot runs
found the best splits once (`CONTENDERS`).

Times of GPUs are emulated, `COMPRESSION` times as fast. Processes, relays, ledger and controller are real and
share the cores of this machine. The workload is `CONFIG`; run this in the project's folder.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from laminar_lab.bench.repack.arms import CONFIG, FULL, arm_settings
from laminar_lab.bench.report import Row, log_line
from laminar_lab.bench.runs import FinishedRun, require_project_file, train
from laminar_lab.emulation.settings import emulation_of
from laminar_py.config import load_config
from laminar_py.config.rollout import DEFAULT_PLANNER, NO_PLANNER

ROWS = (
    "sync_tokens_per_s",
    "sync_generation_share",
    "sync_disaggregated_over_sync",
    "one_step_over_sync",
    "async_over_sync",
    "async_repack_over_sync",
    "async_full_over_sync",
    "async_repack_over_full",
)
COMPRESSION = 20
INTERVAL_S, MAX_STALL_S = 5.0, 5.0  # emulated, as all seconds below
ROOFLINE_BATCH = 48
SPREAD_S = 400.0  # over which the replicas begin, about one batch, so that they start at different times
DEVICES = 16
SEED = 0
SIGMA = 0.99  # of log-lengths: p99 is 10 times the median; with 1.288 it is 20 times the median
GENERATION_SHARE = 0.831  # of a synchronous step (Laminar, figure of the motivation)
WARM_STEPS = 1
STEPS = 4
GROUP_SIZE, STEP_GROUPS = 8, 400


@dataclass(frozen=True, slots=True)
class Contender:
    """A schedule and its split of the devices, e.g. `Contender("one_step", "one_step", replicas=13)`."""

    name: str
    schedule: str
    replicas: int  # the other devices are the learner's; `sync` uses all devices for both
    arm: str = NO_PLANNER  # of `arms`


SYNC = Contender("sync", "sync", DEVICES)
CONTENDERS = (
    Contender("sync_disaggregated", "sync", 10),
    Contender("one_step", "one_step", 13),
    Contender("async", "async", 12),
    Contender("async_repack", "async", 12, DEFAULT_PLANNER),
    Contender("async_full", "async", 11, FULL),
)


@dataclass(frozen=True, slots=True)
class ScheduleRate:
    """Speed of a run from the end of its warm steps on."""

    tokens_per_s: float  # trained, of an emulated second
    learner_share: float  # of the time, in which the learner was busy


def rows(*, sigma: float = SIGMA) -> list[Row]:
    """Run all schedules on lengths of that skew, with one seed, and compare them. 15 minutes, and 5 before."""
    require_project_file(CONFIG)
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        folder = Path(name)
        profile = _write_profile(sigma, folder)
        rates: dict[str, ScheduleRate] = {}
        for contender in (SYNC, *CONTENDERS):
            rates[contender.name] = measured(_run(contender, sigma=sigma, profile=profile, folder=folder))
            log_line(f"{contender.name} on {contender.replicas} replicas: {rates[contender.name]}")
        return table(rates, sigma=sigma)


def _write_profile(sigma: float, folder: Path) -> Path:
    """Measure a synchronous step; write a profile whose learner takes its share of the step."""
    given = emulation_of(load_config(CONFIG, [])).profile
    done = _run(SYNC, sigma=sigma, profile=given, folder=folder, steps=2)
    first, last = done.steps[0], done.steps[-1]
    generate_s = COMPRESSION * (last.rl_s - first.rl_s - (last.learner_busy_s - first.learner_busy_s))
    train_s = generate_s * (1 / GENERATION_SHARE - 1)
    settings = yaml.safe_load(given.read_text())
    fixed_s = settings["learner"]["optimizer_s"]
    settings["learner"]["train_tokens_per_s"] *= (COMPRESSION * last.learner_s - fixed_s) / (train_s - fixed_s)
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def _run(contender: Contender, *, sigma: float, profile: Path, folder: Path, steps: int = STEPS) -> FinishedRun:
    """Train `steps` steps with a schedule on the emulated times of `profile`; settings are in real seconds."""
    is_async = contender.schedule == "async"
    batch = 200 if is_async else GROUP_SIZE * -(-STEP_GROUPS // contender.replicas)
    settings = [
        f"name=schedules-{contender.name}",
        f"runs={folder}",
        f"seed={SEED}",
        *arm_settings(contender.arm),
        f"repack.interval_s={INTERVAL_S / COMPRESSION}",
        f"repack.max_stall_s={MAX_STALL_S / COMPRESSION}",
        f"repack.roofline_batch={ROOFLINE_BATCH}",
        f"schedule={contender.schedule}",
        f"rollout.replicas={contender.replicas}",
        f"rollout.batch_per_replica={batch}",
        f"rollout.engine.profile={profile}",
        f"rollout.engine.compression={COMPRESSION}",
        f"rollout.engine.learner_devices={DEVICES if contender is SYNC else DEVICES - contender.replicas}",
        f"rollout.engine.sigma={sigma}",
        f"rollout.engine.start_spread_s={SPREAD_S if is_async else 0.0}",
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


def table(rates: dict[str, ScheduleRate], *, sigma: float) -> list[Row]:
    """Make the rows of `sync` and of each contender, all of which have an entry in `rates`."""
    splits = ", ".join(f"{contender.name} {contender.replicas}" for contender in CONTENDERS)
    conditions = (
        f"{DEVICES} devices in all, sync colocated with generation {GENERATION_SHARE:.1%} of its step; replicas of"
        f" the others: {splits}; lengths with sigma {sigma:g}; steps {WARM_STEPS + 1} to {STEPS} of 3,200"
        f" trajectories, compressed {COMPRESSION} times, seed {SEED}"
    )
    speeds = {name: rate.tokens_per_s for name, rate in rates.items()}
    generating = 1 - rates["sync"].learner_share
    over_full = speeds["async_repack"] / speeds["async_full"]
    return [
        Row("sync_tokens_per_s", speeds["sync"], "trained tokens/s, emulated", conditions),
        Row("sync_generation_share", generating, "of its step, as measured", conditions),
        *(
            Row(f"{name}_over_sync", speeds[name] / speeds["sync"], "x trained tokens/s", conditions)
            for name in (contender.name for contender in CONTENDERS)
        ),
        Row("async_repack_over_full", over_full, "of replicas that never drain", conditions),
    ]
