"""laminar_py against TRL's `GRPOTrainer`, same task, same machine: `python experiments/vs_trl/run.py [--json]`.

Both sides start RL from one warm-started model and share prompts, reward, batch, group size, learning rate and
clip; README.md lists all of it. Ours runs first and leaves the warm start for TRL, which lives in a virtual
environment of its own that this script makes once. Progress goes to stderr, the result to stdout.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from laminar_py.bench.report import Row, show
from laminar_py.bench.runs import FinishedRun, train
from laminar_py.config.loading import load_config
from laminar_py.learner.warm_start import cache_key

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIG = "configs/quickstart.yaml"
DATA = ROOT / "experiments/quickstart/data"
CONSTRAINTS = ROOT / "constraints/trl.txt"

MAX_STEPS = 120
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


def run_ours(seed: int) -> FinishedRun:
    """Train with laminar_py."""
    return train(
        Path(CONFIG),
        [
            "name=vs_trl",
            f"seed={seed}",
            f"steps={MAX_STEPS}",
            "rollout.without_signal=train",  # as TRL does
            f"eval.every_steps={EVAL_EVERY}",
            "eval.deferred=true",
        ],
    )


def measure(run: FinishedRun) -> Measured:
    """A run of `laminar train` in the form of both sides."""
    tokens = [0, *(step.trained_tokens for step in run.steps)]
    ends = [0.0, *(step.rl_s for step in run.steps)]
    steps = [
        (after - before, end - start)
        for (before, after), (start, end) in zip(pairwise(tokens), pairwise(ends), strict=True)
    ]
    return Measured(steps, [(e.step, e.rl_s, e.accuracy) for e in run.summary.evaluations if e.step > 0])


def warm_started_model(run: FinishedRun) -> Path:
    """The Hugging Face folder that RL began from: the warm start in the cache."""
    config = load_config(run.folder / "config.yaml", [])
    assert config.warm_start is not None, f"{run.folder} had no warm start"
    return config.warm_start.cache / cache_key(config.model, config.warm_start, seed=config.seed)


def run_trl(python: Path, *, model: Path, seed: int, target: float) -> Measured:
    """Train with TRL from the same weights."""
    out = HERE / "out" / f"trl-{seed}.json"
    out.parent.mkdir(exist_ok=True)
    files = [model, DATA / "train.jsonl", DATA / "heldout.jsonl", out]
    options = ["--seed", seed, "--steps", MAX_STEPS, "--target", target]
    call([python, HERE / "trl_side.py", *files, *options], environment=TRL_ALLOCATOR)
    measured = json.loads(out.read_text())
    return Measured(
        [(tokens, seconds) for tokens, seconds in measured["steps"]],
        [(step, seconds, accuracy) for step, seconds, accuracy in measured["accuracy"]],
    )


def ensure_venv(folder: Path) -> Path:
    """TRL's virtual environment, made or made anew where its pins have changed; returns its Python."""
    python, stamp = folder / "bin/python", folder / "constraints.txt"
    if stamp.is_file() and stamp.read_text() == CONSTRAINTS.read_text():
        return python
    call([sys.executable, "-m", "venv", "--clear", folder])
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS]
    call([*pip, "torch"])  # first and alone, so that pip takes whatever build of it is at hand
    call([*pip, "trl", "transformers"])
    stamp.write_text(CONSTRAINTS.read_text())
    return python


def call(command: list[object], *, environment: dict[str, str] | None = None) -> None:
    """Run it in the repository root; its output goes to stderr. Raises `CalledProcessError`."""
    words = [str(word) for word in command]
    print("$", *words, file=sys.stderr, flush=True)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    subprocess.run(words, check=True, cwd=ROOT, stdout=sys.stderr, env=variables)


def rows_of(ours: list[Measured], trl: list[Measured], *, target: float) -> list[Row]:
    """The figures, each the median over the seeds; a time to accuracy only if every run reached it."""
    conditions = (
        f"quickstart task, 32 prompts x 8, lr 1e-3, median of {len(ours)} seeds, {os.cpu_count()} cores each;"
        f" ours {median([run.tokens_per_s for run in ours]):.0f},"
        f" TRL {median([run.tokens_per_s for run in trl]):.0f} response tokens/s over steps 3 to 20"
    )
    ratios = [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in zip(ours, trl, strict=True)]
    rows: list[Row] = [Row("trained_tokens_over_trl", median(ratios), "x", conditions)]
    times = [(mine.seconds_to(target), theirs.seconds_to(target)) for mine, theirs in zip(ours, trl, strict=True)]
    reached = [(mine, theirs) for mine, theirs in times if mine is not None and theirs is not None]
    if len(reached) < len(times):
        print(f"accuracy {target:g} was not reached by every run: {times}", file=sys.stderr)
        return rows
    conditions = (
        f"seconds of RL to {target:g} greedy accuracy on 300 held-out problems, looked at every {EVAL_EVERY} steps"
        f" off the clock, median of {len(ours)} seeds; ours {median([mine for mine, _ in reached]):.1f} s,"
        f" TRL {median([theirs for _, theirs in reached]):.1f} s"
    )
    ratio = median([theirs / mine for mine, theirs in reached])
    return [*rows, Row("time_to_accuracy_trl_over_ours", ratio, "x", conditions)]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each side, with seeds 0, 1, ...")
    parser.add_argument("--target", type=float, default=0.9, help="held-out accuracy that ends the race")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-trl", help="TRL's virtual environment")
    return parser.parse_args()


def main() -> None:
    """Run both sides in turn and print the result."""
    args = parse()
    python = ensure_venv(args.venv.absolute())
    ours, trl = [], []
    for seed in range(args.seeds):
        run = run_ours(seed)
        ours.append(measure(run))
        trl.append(run_trl(python, model=warm_started_model(run), seed=seed, target=args.target))
    show("vs_trl", rows_of(ours, trl, target=args.target), as_json=args.json)


if __name__ == "__main__":
    main()
