"""The quickstart with its learner on a GPU: `python -m experiments.gpu.quickstart`, as `run` calls it.

The whole system in its smallest form: two embedded engines on CPU cores, a tree of relays, the learner's layers in
bf16 on the GPU. The model has 245,000 parameters, so its speed says nothing about that of larger ones.
"""

import tempfile
from pathlib import Path

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import FinishedRun, train

CONFIG = Path("configs/quickstart.yaml")
SETTINGS = ("name=gpu_quickstart", "seed=0", "cluster.learner_device=cuda")


def rows(run: FinishedRun) -> list[Row]:
    """Achievements of the run."""
    found = run.summary
    setting = f"{CONFIG.stem} with {', '.join(SETTINGS)}, {found.steps} steps"
    stall_s = found.relay.stall_s
    return [
        Row("quickstart_accuracy_start", found.accuracy_start, "of held-out problems", setting),
        Row("quickstart_accuracy_end", found.accuracy_end, "of held-out problems", setting),
        Row("quickstart_rl_s", found.rl_seconds, "s", setting),
        Row("quickstart_tokens_per_s", found.trained_tokens_per_s, "trained tokens/s", setting),
        Row("quickstart_waiting_share", found.learner_waiting_share, "of the learner's time", setting),
        Row("quickstart_stall_ms", None if stall_s is None else 1000 * stall_s, "ms a publish", setting),
    ]


def main() -> None:
    """Train and print the report as JSON."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        show("gpu", rows(train(CONFIG, [*SETTINGS, f"runs={folder}"])), as_json=True)


if __name__ == "__main__":
    main()
