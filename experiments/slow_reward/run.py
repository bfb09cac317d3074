"""What a slow reward costs: the same emulated run with a reward that is free and with one that waits.

`python experiments/slow_reward/run.py [--json] [--steps N]`: 8 emulated replicas and a learner of 10 s a step in
real time, 512 trajectories a step, the real controller, processes and ledger. `reward.py` has both rewards. The
runs are made under a bound on staleness of 4 and under none.
"""

from pathlib import Path

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import FinishedRun, make_parser, train
from laminar_py.records.trajectory import DropReason

HERE = Path(__file__).parent
CONFIG = Path("configs/emulation/repack.yaml")
STEPS = 20
FIRST = 6  # steps that are not counted: the buffer fills
STEP_S = 10.0  # of the learner
REST_S = 300.0
SETTINGS = (
    "name=slow-reward",
    "rollout.engine.compression=1",
    "rollout.engine.median_tokens=200",
    "rollout.engine.learner_devices=6",
    "rollout.replicas=8",
    "rollout.batch_per_replica=128",
    "rollout.max_len=1424",
    "rollout.sampling.max_new_tokens=1024",
    "rollout.prompts_per_step=64",
    "repack.interval_s=5",
    "repack.max_stall_s=5",
    "reward.timeout_s=120",
    "learner.checkpoint_every=1000",
)
BOUNDS = ("4", "null")


def run(reward: str, bound: str, steps: int) -> FinishedRun:
    """One run."""
    chosen = [f"reward.use=[{HERE / 'reward.py'}:{reward}]", f"staleness.max_staleness={bound}", f"steps={steps}"]
    return train(CONFIG, [*SETTINGS, *chosen], limit_s=3 * STEP_S * steps + REST_S)


def staleness(done: FinishedRun) -> float:
    """Mean of the counted steps, in steps."""
    counted = [row for row in done.steps[FIRST:] if row.trajectories]
    return sum(row.staleness_mean for row in counted) / len(counted)


def stale_share(done: FinishedRun) -> float:
    """Share of the trajectories that became too old."""
    trajectories = done.summary.trajectories
    return trajectories.dropped_by_reason.get(DropReason.STALE, 0) / trajectories.issued


def describe(done: FinishedRun) -> str:
    """Figures of a run in words."""
    stale = f"{100 * stale_share(done):.1f} % stale"
    return f"{done.trained_tokens_per_s(FIRST):,.0f} trained tokens/s, staleness {staleness(done):.2f}, {stale}"


def rows(steps: int) -> list[Row]:
    """Slow over free under each bound."""
    found = []
    for bound in BOUNDS:
        free, slow = (run(reward, bound, steps) for reward in ("free", "slow"))
        name = "slow_reward_over_free" if bound != "null" else "slow_reward_over_free_unbounded"
        conditions = (
            f"bound {bound}; 8 emulated replicas, learner {STEP_S:g} s a step, 512 trajectories a step, reward p50"
            f" 0.5 s, p95 5 s, one scorer, steps {FIRST + 1} to {steps}; free: {describe(free)}; slow:"
            f" {describe(slow)}"
        )
        found.append(
            Row(name, slow.trained_tokens_per_s(FIRST) / free.trained_tokens_per_s(FIRST), "x", conditions)
        )
    return found


def main() -> None:
    """Run and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    show("slow_reward", rows(args.steps), as_json=args.json)


if __name__ == "__main__":
    main()
