"""Cells of the comparison: one schedule on one fleet, with or without turns, from its settings to its figures.

Used by `experiments/multi_turn_tails/run.py`; `README.md` has the source of each number.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from laminar_lab.emulation.settings import emulation_of, read_profile
from laminar_lab.simulate.figures import SimulatedFigures
from laminar_lab.simulate.run import simulate
from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from experiments.paper.baselines import Baseline, simulate_baseline

CONFIG = Path(__file__).parent / "fleet.yaml"
ASYNC = "async"  # this project's schedule, with repacking
STEPS = {
    ASYNC: 24,
    Baseline.PARTIAL: 16,
    Baseline.SYNC: 6,
    Baseline.ONE_STEP: 8,
    Baseline.STREAM: 8,
}  # the first quarter is left out of all figures
PROMPTS, SAMPLES = 128, 16  # of an iteration, a quarter of 512 x 16
RESPONSE_TOKENS = 16384  # of the model, at most
REFRESH_S = 0.54  # of `sync`, in place
SYNC_OVER_LOAD = 1.59  # of the other baselines: a global synchronisation takes so many times a load of the profile
UPDATES = 16  # of `stream`
PARTIAL_STALENESS = 4
TURNS, OBSERVED_TOKENS = 8, 64
TAIL = 5  # p95 of latencies over their median


@dataclass(frozen=True, slots=True)
class Fleet:
    """A quarter of a fleet, e.g. `Fleet(64, 10, 6)`."""

    gpus: int  # of the whole
    replicas: int  # of one GPU each; `sync` has all devices for either side
    learner: int  # devices

    def sizes(self, arm: str) -> tuple[int, int]:
        """Replicas and learner's devices under a schedule."""
        both = self.replicas + self.learner
        return (both, both) if arm == Baseline.SYNC else (self.replicas, self.learner)


FLEETS = (Fleet(64, 10, 6), Fleet(256, 40, 24))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A schedule on a fleet, e.g. `Cell(arm="sync", fleet=FLEETS[0], latency_s=2.0, seed=0)`."""

    arm: str
    fleet: Fleet
    latency_s: float | None  # median of an environment's; None: one turn
    seed: int

    @property
    def name(self) -> str:
        """The cell in a word."""
        return f"{self.arm}_{turns_name(self.latency_s)}_{self.fleet.gpus}_seed{self.seed}"


def turns_name(latency_s: float | None) -> str:
    """Turns with such environments in a word."""
    return "single" if latency_s is None else f"turns_{latency_s:g}s"


def turns_settings(latency_s: float | None) -> dict[str, object]:
    """Settings of turns between which environments work for so long; the model has as many tokens as without."""
    if latency_s is None:
        return {"rollout.sampling.max_new_tokens": RESPONSE_TOKENS}
    return {
        "rollout.sampling.max_new_tokens": RESPONSE_TOKENS + (TURNS - 1) * OBSERVED_TOKENS,
        "rollout.engine.turns": f"{{count: {TURNS}, median_s: {latency_s}, p95_s: {TAIL * latency_s},"
        f" observation_tokens: {OBSERVED_TOKENS}}}",
    }


def config_of(settings: dict[str, object]) -> RunConfig:
    """The experiment's config with these."""
    return load_config(CONFIG, [f"{key}={value}" for key, value in settings.items()])


def measure(cell: Cell) -> SimulatedFigures:
    """Lead the cell's run."""
    replicas, learner = cell.fleet.sizes(cell.arm)
    config = config_of(
        {
            "seed": cell.seed,
            "steps": STEPS[cell.arm],
            "rollout.replicas": replicas,
            "rollout.prompts_per_step": PROMPTS,
            "rollout.group_size": SAMPLES,
            "rollout.batch_per_replica": -(-PROMPTS // replicas) * SAMPLES,
            "rollout.engine.learner_devices": learner,
            **turns_settings(cell.latency_s),
        }
    )
    if cell.arm == ASYNC:
        return simulate(config).figures
    profile = read_profile(emulation_of(config).profile)
    return simulate_baseline(
        config,
        Baseline(cell.arm),
        profile=profile,
        sync_s=REFRESH_S if cell.arm == Baseline.SYNC else SYNC_OVER_LOAD * profile.engine.load_s,
        updates=UPDATES,
        max_staleness=PARTIAL_STALENESS,
    ).figures
