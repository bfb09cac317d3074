"""The whole system with an SGLang server and the learner on one GPU: generation, training, weights, audit.

`python -m experiments.gpu.sglang_run data FOLDER` writes a model's folder, on which a server starts with
`--load-format dummy`, prompts and a reward; `python -m experiments.gpu.sglang_run train FOLDER --url URL` attaches
runs to that server, one for each way to take new weights. The model is a Qwen3 of 1.5B parameters with random
weights, so that its tokens are nearly uniform; one id in 300 ends a response. With `--cpu` it is a tiny one.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen3Config

if TYPE_CHECKING:
    from laminar_lab.bench.report import Row
    from laminar_lab.bench.runs import FinishedRun

POLICIES = ("drain", "resume")
NUM_PROMPTS, PROMPT_TOKENS = 2000, (64, 192)
END_EVERY = 300  # ids, of which the last ends a response
SHM, SHM_BYTES = Path("/dev/shm"), 60e9  # versions, two checkpoints of 12 bytes a parameter, and room
AROUND_S, LEAST_RL_S = 110.0, 35.0  # what a run takes beside RL, and the least that this gets
REWARD = "def score(request):\n    return float(sum(map(int, request.response_ids)) % 2)\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and what a run does with it, e.g. `SIZES["cuda"]`."""

    model: Qwen3Config
    max_new_tokens: int
    prompts_per_step: int
    max_batch: int
    max_tokens: int  # of a microbatch
    steps: int

    @property
    def max_len(self) -> int:
        """Longest prompt and longest response."""
        return PROMPT_TOKENS[1] + self.max_new_tokens


SIZES = {
    "cuda": Size(
        model=Qwen3Config(  # that of `learner`
            vocab_size=151_936,
            hidden_size=1536,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            head_dim=128,
            intermediate_size=8960,
            tie_word_embeddings=True,
            dtype="bfloat16",
        ),
        max_new_tokens=1024,
        prompts_per_step=32,
        max_batch=256,
        max_tokens=32_768,
        steps=12,
    ),
    "cpu": Size(
        model=Qwen3Config(
            vocab_size=4000,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=128,
            tie_word_embeddings=True,
            dtype="float32",
        ),
        max_new_tokens=128,
        prompts_per_step=4,
        max_batch=32,
        max_tokens=8192,
        steps=4,
    ),
}


# ---- what a server and a run begin with


def write_data(folder: Path, size: Size) -> None:
    """Write the model's folder without weights, the prompts and the reward."""
    path, vocab = folder / "model", size.model.vocab_size
    path.mkdir(parents=True, exist_ok=True)
    ends = list(range(END_EVERY - 1, vocab, END_EVERY))
    size.model.architectures = ["Qwen3ForCausalLM"]
    size.model.eos_token_id = ends[0]
    size.model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    draw = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(NUM_PROMPTS):
            words = [f"w{draw.randrange(vocab)}" for _ in range(draw.randint(*PROMPT_TOKENS))]
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")
    (folder / "reward.py").write_text(REWARD)


def run_config(folder: Path, size: Size, *, url: str, device: str) -> dict[str, object]:
    """The config of a run, but for its name, its folder, and how it takes new weights."""
    return {
        "steps": size.steps,
        "model": {"path": str(folder / "model"), "from_scratch": True},
        "data": {"train": str(folder / "prompts.jsonl")},
        "rollout": {
            "engine": {"kind": "sglang", "urls": [url]},
            "replicas": 1,
            "max_batch": size.max_batch,
            "batch_per_replica": size.max_batch,
            "max_len": size.max_len,
            "prompts_per_step": size.prompts_per_step,
            "sampling": {"max_new_tokens": size.max_new_tokens},
        },
        "reward": {"use": [f"{folder / 'reward.py'}:score"]},
        "packer": {"max_tokens": size.max_tokens},
        "learner": {"recompute": "all", "checkpoint_every": 1000, "keep_checkpoints": 1},
        "relay": {"nodes": 1, "keep_versions": 1, "shm": str(SHM)},
        "cluster": {"learner_device": device},
        "supervisor": {"heartbeat_timeout_s": 90},
    }


# ---- what it did


def loads_s(run: Path) -> tuple[float, list[float]]:
    """Seconds of the first load of a version, which is hashed too, and of the others."""
    from laminar_py.ledger.database import reading
    from laminar_py.ledger.rows import decode_event
    from laminar_py.records.events import VersionLoaded

    with reading(run) as connection:
        found = connection.execute("SELECT body FROM event WHERE kind = 'versionloaded' ORDER BY seq").fetchall()
    events = [event for (body,) in found if isinstance(event := decode_event(body), VersionLoaded)]
    return events[0].elapsed_s, [event.elapsed_s for event in events[1:] if event.checksum is None]


def busy_rate(run: "FinishedRun", least: int) -> tuple[float, float]:
    """Generated tokens a second while `least` trajectories or more ran, and for how many seconds they did."""
    pairs = [(a, b) for a, b in pairwise(run.fleet) if min(sum(a.running), sum(b.running)) >= least]
    seconds = sum(b.rl_s - a.rl_s for a, b in pairs)
    return sum(b.generated_tokens - a.generated_tokens for a, b in pairs) / seconds if seconds else nan, seconds


def rows(run: "FinishedRun", size: Size, policy: str) -> list["Row"]:
    """Figures of a run."""
    from laminar_lab.audit.verify import verify
    from laminar_lab.bench.report import Row

    found, trained = run.summary, [step for step in run.steps if step.trained]
    steps = trained[1:] or trained  # the first one compiles kernels
    fresh = [step for step in run.steps if "0" in step.by_staleness]
    first, others = loads_s(run.folder)
    busy, busy_s = busy_rate(run, size.max_batch // 2)
    when = f"in the {busy_s:.0f} seconds with {size.max_batch // 2} responses or more under way"
    what = f"on_new_weights={policy}, {found.steps} steps of {size.prompts_per_step} x 8 responses"
    lengths = found.response_length
    figures = [
        ("rl", found.rl_seconds, "s", ""),
        ("trained_tokens_per_s", found.trained_tokens_per_s, "response tokens/s", ""),
        ("generated_tokens_per_s", found.tokens.generated / found.rl_seconds, "response tokens/s", ""),
        ("busy_tokens_per_s", busy, "response tokens/s", when),
        ("learner_tokens_per_s", median(step.learner_tokens_per_s for step in steps), "tokens/s in a step", ""),
        ("learner_mfu", median(step.mfu or 0.0 for step in steps), "share of the peak in a step", ""),
        ("learner_waiting_share", found.learner_waiting_share, "of the learner's time", ""),
        ("overlap_share", found.overlap_share, "of the learner's steps, while responses were generated", ""),
        ("stall", 1000 * (found.relay.stall_s or 0.0), "ms a publish", ""),
        ("load_first", first, "s until a version is served", "with a hash of the engine's tensors"),
        ("load", median(others or [nan]), "s until a version is served", f"{len(others)} loads"),
        ("mismatch_mean", median([step.mismatch_mean for step in fresh] or [nan]), "nats", "median of steps"),
        ("mismatch_p99", max([step.mismatch_p99 for step in fresh] or [nan]), "nats", "worst step"),
        ("mismatch_max", max([step.mismatch_max for step in fresh] or [nan]), "nats", "worst token"),
        ("staleness_mean", found.staleness.mean, "learner steps", f"at most {found.staleness.max}"),
        ("length_p50", float(lengths.p50), "tokens", ""),
        ("length_p95", float(lengths.p95), "tokens", f"cut at {size.max_new_tokens}"),
        ("checkpoint", found.checkpoints.elapsed_s, "s until it is written", f"{found.checkpoints.count} of them"),
        ("violations", float(len(verify(run.folder))), "of the laws, by `laminar audit RUN verify`", ""),
    ]
    return [
        Row(f"{policy}_{name}", None if isnan(value) else value, unit, f"{what}; {more}" if more else what)
        for name, value, unit, more in figures
    ]


def train_runs(args: argparse.Namespace, size: Size, device: str) -> list["Row"]:
    """Figures of a run for each policy, as long as there is time."""
    end = time.monotonic() + args.limit_s
    config = args.folder / "config.yaml"
    config.write_text(json.dumps(run_config(args.folder, size, url=args.url, device=device)))
    disk = device == "cuda" and shutil.disk_usage(SHM).free < SHM_BYTES
    reports: list[Row] = []
    for policy in args.policies.split(","):
        left = end - time.monotonic()
        if left < AROUND_S + LEAST_RL_S:
            print(f"{policy}: not begun, {left:.0f} s are left", file=sys.stderr)
            break
        with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=None if disk else SHM) as runs:
            rl_s = min(args.rl_s, left - AROUND_S)
            chosen = [f"name=gpu_{policy}", f"runs={runs}", f"rollout.on_new_weights={policy}"]
            reports += train_run(config, [*chosen, f"max_rl_seconds={rl_s}", *args.settings], size, policy, left)
            keep(Path(runs), args.keep)
    return reports


def train_run(config: Path, chosen: list[str], size: Size, policy: str, limit_s: float) -> list["Row"]:
    """Figures of one run; one without a value if it fails."""
    from laminar_lab.bench.report import Row
    from laminar_lab.bench.runs import train

    try:
        return rows(train(config, chosen, limit_s=limit_s), size, policy)
    except (subprocess.SubprocessError, ValueError, IndexError) as error:  # the last two where it made no step
        return [Row(f"{policy}_rl", None, "s", f"failed: {error}")]


def keep(runs: Path, folder: Path | None) -> None:
    """Copy what a run wrote, but for ledgers, responses and checkpoints."""
    for run in runs.iterdir() if folder is not None else ():
        for path in [*run.glob("*.json*"), *run.glob("*.yaml"), *run.glob("logs/*.log")]:
            place = folder / run.name / path.name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def main(given: Sequence[str] | None = None) -> None:
    """Write data, or train and print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "train"])
    parser.add_argument("folder", type=Path, help="of the model, the prompts and the reward")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the server")
    parser.add_argument("--policies", default=",".join(POLICIES), help="rollout.on_new_weights of the runs")
    parser.add_argument("--rl-s", type=float, default=80.0, help="seconds of RL of a run, at most")
    parser.add_argument("--limit-s", type=float, default=400.0, help="seconds of all")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="another setting of the runs")
    parser.add_argument("--keep", type=Path, help="folder for figures and logs of the runs")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args(given)
    device = "cpu" if args.cpu else "cuda"
    if args.what == "data":
        write_data(args.folder.resolve(), SIZES[device])
        return
    from laminar_lab.bench.report import show

    args.folder = args.folder.resolve()
    show("gpu", train_runs(args, SIZES[device], device), as_json=True)


if __name__ == "__main__":
    main()
