"""laminar_py against TRL's `GRPOTrainer`, same task, same machine: `python experiments/vs_trl/run.py [--json]`.

Both sides start RL from one warm-started model and share prompts, reward, batch, group size, learning rate and
clip; README.md lists all of it. For each seed ours runs first and leaves the warm start for TRL, which lives in a
virtual environment of its own that this script makes once. Progress goes to stderr, the result to stdout. A
second start measures only the missing runs.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from laminar_lab.bench.report import Ratio, Row, show, spread
from laminar_lab.bench.runs import FinishedRun, KeptResults, call, make_parser, train
from laminar_py.config.loading import load_config
from laminar_py.runtime.preflight.inputs import initial_folder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIG = "configs/quickstart.yaml"
DATA = ROOT / "experiments/quickstart/data"
CONSTRAINTS = ROOT / "constraints/trl.txt"
KEPT = ROOT / ".cache/vs_trl"

SEEDS = 3
MAX_STEPS = 120
OURS_LIMIT_S, TRL_LIMIT_S = 600.0, 1800.0  # of one run, its evaluations included; on two idle cores a third of it
FIRST_STEP, LAST_STEP = 3, 20  # steps whose throughput counts: warm, and before either side has learnt much
EVAL_EVERY = 5

# glibc keeps large tensors instead of handing their pages back to the kernel at every step: a quarter faster.
TRL_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**26)}


@dataclass(frozen=True, slots=True)
class Measured:
    """One training run, e.g. steps of 13,000 tokens in 1.1 s and accuracies (5, 5.6, 0.41), (10, 11.2, 0.62)."""

    steps: list[tuple[int, float]]  # consumed response tokens, seconds
    accuracy: list[tuple[int, float, float]]  # step, seconds since RL began, share of held-out problems solved

    @property
    def tokens_per_s(self) -> float:
        """Consumed response tokens per second over steps 3 to 20."""
        counted = self.steps[FIRST_STEP - 1 : LAST_STEP]
        return sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted)

    def seconds_to(self, target: float) -> float | None:
        """Seconds of RL until an evaluation first reached `target`; None if none did."""
        return next((seconds for _, seconds, accuracy in self.accuracy if accuracy >= target), None)


ON_ONE_CORE = ["rollout.replicas=1", "relay.nodes=1"]


def run_ours(seed: int, steps: int, *settings: str) -> FinishedRun:
    """Train with laminar_py."""
    return train(
        Path(CONFIG),
        [
            "name=vs_trl",
            f"seed={seed}",
            f"steps={steps}",
            "rollout.without_signal=train",  # as TRL does
            f"eval.every_steps={EVAL_EVERY}",
            "eval.deferred=true",
            *settings,
        ],
        limit_s=OURS_LIMIT_S,
    )


def measure(run: FinishedRun) -> Measured:
    """A run of `laminar train` in the form of both sides."""
    tokens = [0, *(step.trained_tokens for step in run.steps)]
    ends = [0.0, *(step.rl_s for step in run.steps)]
    steps = [
        (after - before, end - start)
        for (before, after), (start, end) in zip(pairwise(tokens), pairwise(ends), strict=True)
    ]
    return Measured(steps, [(e.step, e.rl_s, e.mean) for e in run.summary.evaluations if e.step > 0])


def warm_started_model(run: FinishedRun) -> Path:
    """The Hugging Face folder that RL began from: the warm start in the cache."""
    config = load_config(run.folder / "config.yaml", [])
    assert config.warm_start is not None, f"{run.folder} had no warm start"
    return initial_folder(config)


def run_trl(python: Path, *, model: Path, seed: int, steps: int, target: float, threads: int = 2) -> Measured:
    """Train with TRL from the same weights."""
    with tempfile.TemporaryDirectory(prefix="laminar-trl-") as folder:
        out = Path(folder, "measured.json")
        files = [model, DATA / "train.jsonl", DATA / "heldout.jsonl", out]
        options = ["--seed", seed, "--steps", steps, "--target", target, "--threads", threads]
        run_command(
            [python, HERE / "trl_side.py", *files, *options], limit_s=TRL_LIMIT_S, environment=TRL_ALLOCATOR
        )
        return msgspec.json.decode(out.read_bytes(), type=Measured)


def ensure_venv(folder: Path) -> Path:
    """Make TRL's virtual environment, again where its pins have changed; return its Python."""
    python, stamp = folder / "bin/python", folder / "constraints.txt"
    if stamp.is_file() and stamp.read_text() == CONSTRAINTS.read_text():
        return python
    run_command([sys.executable, "-m", "venv", "--clear", folder])
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS]
    run_command([*pip, "torch"])  # first and alone, so that pip takes any available build
    run_command([*pip, "trl", "transformers"])
    stamp.write_text(CONSTRAINTS.read_text())
    return python


def run_command(
    words: Sequence[object], *, limit_s: float | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Print a command and run it in the repository root, without the Hub."""
    command = [str(word) for word in words]
    print("$", *command, file=sys.stderr, flush=True)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    call(command, limit_s=limit_s, cwd=ROOT, environment=variables)


def rows_of(ours: list[Measured], trl: list[Measured], *, target: float) -> list[Row]:
    """The figures, medians and ranges over the seeds; a time to accuracy only if every run reached it."""
    setting = f"quickstart task, model of 245,000 parameters, {len(ours)} seeds"
    speeds = [[run.tokens_per_s for run in side] for side in (ours, trl)]
    ratio = Ratio.between(*speeds)
    conditions = (
        f"{setting}, 32 prompts x 8, lr 1e-3, {len(os.sched_getaffinity(0))} cores each; {ratio};"
        f" ours {spread(speeds[0])},"
        f" TRL {spread(speeds[1])} response tokens/s over steps {FIRST_STEP} to {LAST_STEP}"
    )
    rows: list[Row] = [Row("trained_tokens_over_trl", ratio.median, "x", conditions)]
    times = [(mine.seconds_to(target), theirs.seconds_to(target)) for mine, theirs in zip(ours, trl, strict=True)]
    reached = [(mine, theirs) for mine, theirs in times if mine is not None and theirs is not None]
    if len(reached) < len(times):
        print(f"accuracy {target:g} was not reached by every run: {times}", file=sys.stderr)
        return rows
    mine, theirs = ([pair[side] for pair in reached] for side in (0, 1))
    ratio = Ratio.between(theirs, mine)
    conditions = (
        f"{setting}; seconds of RL to {target:g} greedy accuracy on 300 held-out problems, looked at every"
        f" {EVAL_EVERY} steps off the clock; {ratio}; ours {spread(mine, '.1f')} s, TRL {spread(theirs, '.1f')} s"
    )
    return [*rows, Row("time_to_accuracy_trl_over_ours", ratio.median, "x", conditions)]


def turns_row(in_turns: list[Measured], beside: list[Measured]) -> Row:
    """The figure of one core: learner and replica in turns over both beside each other."""
    speeds = [[run.tokens_per_s for run in side] for side in (in_turns, beside)]
    ratio = Ratio.between(*speeds)
    conditions = (
        f"quickstart, one core, {len(beside)} seeds; {ratio}; in turns {spread(speeds[0])}, beside each other"
        f" {spread(speeds[1])} response tokens/s over steps {FIRST_STEP} to {LAST_STEP}"
    )
    return Row("shared_over_split", ratio.median, "x", conditions)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each side, with seeds 0, 1, ...")
    parser.add_argument("--steps", type=int, default=MAX_STEPS, help="of a run, if it does not reach the target")
    parser.add_argument("--trl-seeds", type=int, help="runs of TRL (--seeds)")
    parser.add_argument("--core", type=int, help="run on this core alone, learner and replica in turns and beside")
    parser.add_argument("--target", type=float, default=0.9, help="held-out accuracy that ends the race")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-trl", help="TRL's virtual environment")
    return parser.parse_args()


def main() -> None:
    """Run both sides in turn, as far as that has not been done, and print the result."""
    args = parse()
    python = ensure_venv(args.venv.absolute())
    sources = [HERE, ROOT / CONFIG, CONSTRAINTS]
    where = "" if args.core is None else f", core {args.core}"
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    threads = min(2, len(os.sched_getaffinity(0)))
    kept = KeptResults(KEPT, sources=sources, settings=f"{args.steps} steps, target {args.target}{where}")
    few = [] if args.core is None else ON_ONE_CORE
    ours, in_turns, trl = [], [], []
    for seed in range(args.seeds):
        run = kept.run(f"ours-{seed}", partial(run_ours, seed, args.steps, *few))
        ours.append(measure(run))
        if args.core is not None:
            turns = partial(run_ours, seed, args.steps, *few, "cluster.share=true")
            in_turns.append(measure(kept.run(f"turns-{seed}", turns)))
        if seed < (args.seeds if args.trl_seeds is None else args.trl_seeds):
            side = partial(
                run_trl,
                python,
                model=warm_started_model(run),
                seed=seed,
                steps=args.steps,
                target=args.target,
                threads=threads,
            )
            trl.append(kept.get(f"trl-{seed}", Measured, side))
    rows = [] if args.core is None else [turns_row(in_turns, ours)]
    compared = (in_turns or ours)[: len(trl)]
    show("vs_trl", rows + (rows_of(compared, trl, target=args.target) if trl else []), as_json=args.json)


if __name__ == "__main__":
    main()
