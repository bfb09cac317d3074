"""Fleets whose contexts are long: does repacking ever cost more than it gains?

`python experiments/repack/long_contexts.py [--json] [--fleets N]` draws fleets of 8 to 64 replicas by seeds 0, 1,
and so on, and simulates each with and without repacking, on a virtual clock. Contexts end at 20,000 to 100,000
tokens. Each replica has as many trajectories as its KV cache holds, or up to 2.5 times as many. Most trajectories
have turns: a move has to prefill the context again, and a returning turn finds its cache evicted if the replica
holds too much. 40 fleets take about ten minutes of one core. Figures are in `docs/performance.md`.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from laminar_lab.bench.report import Row, log_line, show
from laminar_lab.bench.runs import make_parser
from laminar_lab.emulation.settings import read_profile
from laminar_lab.simulate.figures import SimulatedFigures
from laminar_lab.simulate.run import simulate
from laminar_py.config import load_config
from laminar_py.config.rollout import DEFAULT_PLANNER, NO_PLANNER

CONFIG = Path("configs/emulation/repack.yaml")
KV_TOKENS = {"h100_32b_tp2": 272_000, "h100_7b_tp1": 463_000, "h100_72b_tp4": 391_000}  # of a replica, by table
REPLICAS = (8, 8, 8, 8, 16, 8, 32, 64)
FLEETS = 40
LEAST = 0.99  # generated tokens a second with repacking, over none


@dataclass(frozen=True, slots=True, kw_only=True)
class LongFleet:
    """A fleet and its trajectories, e.g. `draw(4)`: 16 turns of 667 tokens, which end at 32,582 tokens."""

    replicas: int
    table: str  # file of the engine's times in `configs/emulation`
    turns: int  # of the model
    prompt: int  # tokens
    own: int  # tokens of the model in a trajectory, about the mean
    observed: int  # tokens of the environment after each turn but the last
    latency_s: float  # median of an environment's; its p95 is 4 times as long
    group: int  # samples of a prompt
    batch: int  # trajectories of a replica under a version
    steps: int

    @property
    def context(self) -> int:
        """Tokens of a trajectory at its end, about the mean."""
        return self.prompt + self.own + (self.turns - 1) * self.observed


def draw(seed: int) -> LongFleet:
    """Draw a fleet; the seed also gives its number of replicas."""
    rng, replicas = random.Random(seed), REPLICAS[seed % len(REPLICAS)]
    table = rng.choice(list(KV_TOKENS))
    context = int(20_000 * 5 ** (rng.random() if replicas < 32 else 1))
    turns = rng.choice([1, 4, 8, 16])
    prompt = int(context * (rng.uniform(0.5, 0.9) if turns == 1 else rng.uniform(0.05, 0.4)))
    own = int((context - prompt) * (1 if turns == 1 else 0.02 * 20 ** rng.random()))
    latency_s = rng.choice([1.0, 3.0, 10.0, 30.0])
    full = rng.choice([1.0, 1.5, 2.5]) * KV_TOKENS[table] / context
    group = rng.choice([2, 4])
    batch = max(1, round(full / group)) * group
    return LongFleet(
        replicas=replicas,
        table=table,
        turns=turns,
        prompt=prompt,
        own=own,
        observed=0 if turns == 1 else (context - prompt - own) // (turns - 1),
        latency_s=latency_s,
        group=group,
        batch=batch,
        steps=min(12, max(8, 12_000 // (replicas * batch * turns))),
    )


def measure(fleet: LongFleet, planner: str, *, seed: int) -> SimulatedFigures:
    """Simulate a fleet with a planner. The learner takes no time, so that generation binds."""
    observed = (fleet.turns - 1) * fleet.observed
    cap = 4 * fleet.own + observed
    settings = {
        "seed": seed,
        "steps": fleet.steps,
        "rollout.engine.profile": CONFIG.with_name(f"{fleet.table}.yaml"),
        "rollout.engine.compression": 1,
        "rollout.engine.start_spread_s": 0.02 * fleet.own,
        "rollout.engine.median_tokens": 3 * fleet.own // 4,
        "rollout.engine.sigma": 0.8,
        "rollout.engine.simulation.prompt_tokens": fleet.prompt,
        "rollout.replicas": fleet.replicas,
        "rollout.max_batch": 256,
        "rollout.max_len": fleet.prompt + cap,
        "rollout.sampling.max_new_tokens": cap,
        "rollout.kv_capacity": max(KV_TOKENS[fleet.table], fleet.prompt + cap),
        "rollout.batch_per_replica": fleet.batch,
        "rollout.prompts_per_step": fleet.replicas * fleet.batch // fleet.group,
        "rollout.group_size": fleet.group,
        "packer.max_tokens": fleet.prompt + cap,
        "repack.interval_s": 5,
        "repack.max_stall_s": 5,
        "repack.planner": planner,
    }
    if fleet.turns > 1:
        settings["rollout.engine.turns"] = (
            f"{{count: {fleet.turns}, median_s: {fleet.latency_s}, p95_s: {4 * fleet.latency_s},"
            f" observation_tokens: {fleet.observed}}}"
        )
    config = load_config(CONFIG, [f"{key}={value}" for key, value in settings.items()])
    profile = read_profile(CONFIG.with_name(f"{fleet.table}.yaml"))
    learner = profile.learner.model_copy(update={"train_tokens_per_s": 1e9})
    return simulate(config, profile=profile.model_copy(update={"learner": learner})).figures


def gain(fleet: LongFleet, *, seed: int) -> float:
    """Return generated tokens a second of a fleet with repacking, over none."""
    none, ours = (measure(fleet, planner, seed=seed) for planner in (NO_PLANNER, DEFAULT_PLANNER))
    return ours.generated_tokens_per_s / none.generated_tokens_per_s


def main() -> None:
    """Simulate the fleets, and report the least and the median gain."""
    parser = make_parser(__doc__)
    parser.add_argument("--fleets", type=int, default=FLEETS, help="fleets, with seeds 0, 1, ...")
    args = parser.parse_args()
    gains = []
    for seed in range(args.fleets):
        fleet = draw(seed)
        gains.append(gain(fleet, seed=seed))
        log_line(f"fleet {seed}: {gains[-1]:.3f}, {fleet.context:,} tokens, {fleet}")
    conditions = f"generated tokens/s of {args.fleets} fleets with repacking, over none"
    rows = [
        Row("long_contexts_least", min(gains), "x", f"{conditions}; asked: {LEAST}"),
        Row("long_contexts_median", median(gains), "x", conditions),
        Row(
            "long_contexts_losses", sum(value < LEAST for value in gains), "fleets", f"{conditions}: below {LEAST}"
        ),
    ]
    show("long_contexts", rows, as_json=args.json)


if __name__ == "__main__":
    main()
