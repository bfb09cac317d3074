"""A short run of a config, with a model of the same widths and few layers: what its parts reach on these machines.

`laminar doctor --try` calls it. The run is `laminar train` in a process of its own, so all parts of a long run are
tried: placement, checks, engines, their first tokens, loads, aborts, learner steps, versions through the relays.
The rows are what the run recorded.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import yaml

from laminar_lab.audit.verify import verify
from laminar_lab.doctor.trial_profile import TrialModel
from laminar_lab.doctor.trial_rows import TRIAL, TriedRow, judged, trial_rows
from laminar_lab.model_shape import ModelShape, read_shape
from laminar_lab.report.snapshot import Snapshot, read_snapshot
from laminar_py.config import RunConfig, parse_config
from laminar_py.config.rollout import OnNewWeights
from laminar_py.ledger import LedgerError, RunFolder
from laminar_py.records.events import VersionPublished

LAMINAR = (sys.executable, "-c", "from laminar_py.cli import main; main()")
NAME = "trial"
LAYERS, STEPS = 2, 3  # the first step compiles
RESPONSE, PROMPT = 256, 200  # tokens; the prompt's only decide how many responses fill the learner's microbatches
SMALL = 50_000_000  # parameters of a model that is tried as it is
GRACE_S, HASTE_S = 30.0, 1.0  # from SIGTERM to SIGKILL: after its limit, after a Ctrl-C
PER_LAYER = ("layer_types", "mlp_only_layers")  # lists of a model's config.json
WEIGHTS_SEED = 0


def try_run(config: RunConfig, *, seconds: float) -> tuple[list[TriedRow], TrialModel | None]:
    """Run a few steps of a config within `seconds`, and return a row for each part and one for the laws.

    A part that the run did not reach is a failed row with the run's last line; those after it were not run. The
    folder of the run is deleted, unless it failed. Also returns the model of a run that did not fail, if a formula
    knows its family.
    """
    with _folder(config.runs, shm=config.relay.shm) as folder:
        settings = trial_config(config, model=_few_layers(config, folder / "model"), runs=folder)
        path = folder / "trial.yaml"
        path.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
        ended = _train(path, seconds)
        runs = sorted(folder.glob(f"{settings.name}-*"))
        limit_s = float(getattr(config.rollout.engine, "start_timeout_s", seconds))
        snapshot = read_snapshot(runs[0]) if runs else None
        rows = [] if snapshot is None else trial_rows(snapshot, start_limit_s=limit_s)
        if snapshot is None or ended is not None:
            kept = config.runs / f"{config.name}-trial"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            return [*rows, *_not_reached(rows, ended or "it left no run", kept)], None
        return [*rows, _laws_row(runs[0])], tried_model(snapshot, read_shape(settings.model.path))


def tried_model(snapshot: Snapshot, shape: ModelShape | None) -> TrialModel | None:
    """Return the figures of a trial's model; None without a formula for it, or without a response."""
    published = next((event for _, event in snapshot.history.of_kind(VersionPublished)), None)
    ended = snapshot.trajectories
    ended = ended.where((ended.length > 0) & ~np.isnan(ended.finished_s - ended.started_s))
    if shape is None or published is None or not len(ended):
        return None
    token_s = float(np.median((ended.finished_s - ended.started_s) / ended.length))
    return TrialModel(shape=shape, num_bytes=published.num_bytes, token_s=token_s)


def trial_config(config: RunConfig, *, model: Path, runs: Path) -> RunConfig:
    """Return the config of a trial: few steps of short responses, which fill every rank's microbatch once."""
    rollout, learner = config.rollout, config.learner
    cap = min(RESPONSE, rollout.sampling.max_new_tokens)
    tokens = learner.world_size * config.packer.max_tokens
    groups = max(1, min(rollout.prompts_per_step, math.ceil(tokens / (rollout.group_size * (PROMPT + cap)))))
    tree = config.model_dump(mode="json")
    tree |= {"name": NAME, "steps": STEPS, "runs": str(runs), "warm_start": None}
    tree["model"]["path"] = str(model)
    tree["eval"]["sets"] = {}
    tree["tracking"]["kinds"] = []
    tree["rollout"] |= {"prompts_per_step": groups, "without_signal": "train"}
    tree["rollout"]["sampling"]["max_new_tokens"] = cap
    if rollout.on_new_weights is OnNewWeights.DRAIN:
        tree["rollout"]["on_new_weights"] = "resume"  # it aborts responses, as repacking does
    return parse_config(tree)


@contextmanager
def _folder(runs: Path, *, shm: Path) -> Iterator[Path]:
    """Yield a folder beside the runs, where every node sees it; the context deletes it and its runs' weights."""
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=runs, ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder).resolve()
        finally:
            for run in Path(folder).resolve().glob(f"{NAME}-*"):
                shutil.rmtree(RunFolder(run).shm(shm), ignore_errors=True)


def _few_layers(config: RunConfig, folder: Path) -> Path:
    """Make a model as the config's, but with few layers and random weights.

    Returns the config's own if it is small, or of a family without a formula.
    """
    shape = read_shape(config.model.path)
    if shape is None or shape.total <= SMALL or shape.num_hidden_layers <= LAYERS:
        return config.model.path
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    for path in config.model.path.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and "index" not in path.name:
            shutil.copy(path, folder)
    tree = json.loads((folder / "config.json").read_text())
    tree["num_hidden_layers"] = LAYERS
    tree |= {key: tree[key][:LAYERS] for key in PER_LAYER if isinstance(tree.get(key), list)}
    (folder / "config.json").write_text(json.dumps(tree))
    if not config.model.from_scratch:
        torch.manual_seed(WEIGHTS_SEED)
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        made.save_pretrained(folder)
    return folder


def _train(path: Path, seconds: float) -> str | None:
    """Run `laminar train`; return the last line that it printed if it failed or took too long, else None."""
    log = path.with_suffix(".log")
    with (
        log.open("w") as output,
        subprocess.Popen([*LAMINAR, "train", str(path)], stdout=output, stderr=output) as run,
    ):
        try:
            code = run.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(run, GRACE_S)
            return f"not done in {seconds:g} s; --seconds gives it more"
        except KeyboardInterrupt:
            _end(run, HASTE_S)
            raise
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return None if code == 0 else (lines[-1].strip() if lines else f"it ended with exit code {code}")


def _end(run: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End a run within `grace_s`, then at once; its processes end with their parent."""
    run.terminate()
    try:
        run.wait(grace_s)
    except subprocess.TimeoutExpired:
        run.kill()


def _not_reached(rows: list[TriedRow], ended: str, kept: Path) -> Iterator[TriedRow]:
    """Yield a failed row for the first part without figures, and rows of the parts after it."""
    missing = [what for what in TRIAL if all(row.what != what for row in rows)]
    for index, what in enumerate(missing or ["the run's end"]):
        if index:
            yield TriedRow(what=what, asked="")
        else:
            yield judged(what, "", ended, failed=True, remedy=f"as it says; everything else is in {kept}")


def _laws_row(run: Path) -> TriedRow:
    try:
        violations = [str(one) for one in verify(run)]
    except LedgerError as error:
        violations = [str(error)]
    measured = violations[0] if violations else "none"
    return judged("the run's laws", "no violation", measured, failed=bool(violations), remedy="please report it")
