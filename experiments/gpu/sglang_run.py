"""Visit 6: the whole system with an SGLang server and the learner on one GPU, under 256 streams.

`python -m experiments.gpu.sglang_run POLICY --sglang PYTHON [--dry]` trains one run that takes new weights by this
policy. Its server has a quarter of the GPU's memory and the learner the rest. The model is a Qwen3 of 1.5B
parameters with random weights, so that its tokens are nearly uniform; one id in 300 ends a response. With `--dry`
the model is tiny, on a CPU.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen3Config

from experiments.gpu.servers import interpreter
from experiments.gpu.steps import ONE_B
from laminar_lab.audit.verify import verify
from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import FinishedRun, train
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from laminar_py.records.events import VersionLoaded

POLICIES = ("in_place", "retract", "resume", "drain")
SERVER_SHARE = 0.25  # of the memory of the GPU
NUM_PROMPTS, PROMPT_TOKENS = 2000, (64, 192)
END_EVERY = 300  # ids, of which the last ends a response
SHM, SHM_BYTES = Path("/dev/shm"), 60e9  # versions, two checkpoints of 12 bytes a parameter, and room
RL_S, LIMIT_S = 150.0, 400.0  # of RL at most, and of the whole run with the start of its server
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
        model=Qwen3Config(**ONE_B, dtype="bfloat16"),
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


def run_config(folder: Path, size: Size, *, python: Path, device: str) -> dict[str, object]:
    """The config of a run, but for its name, its folder, and how it takes new weights."""
    return {
        "steps": size.steps,
        "model": {"path": str(folder / "model"), "from_scratch": True},
        "data": {"train": str(folder / "prompts.jsonl")},
        "rollout": {
            "engine": engine_section(python, device),
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


def engine_section(python: Path, device: str) -> dict[str, object]:
    """The section `rollout.engine` of a run whose server shares the GPU with the learner."""
    section: dict[str, object] = {"kind": "sglang", "python": str(python), "device": device, "stream_interval": 32}
    return section | ({"flags": {"mem-fraction-static": SERVER_SHARE}} if device == "cuda" else {})


# ---- what it did


def loads_s(run: Path) -> tuple[float, list[float]]:
    """Seconds of the first load of a version, which is hashed too, and of the others."""
    with reading(run) as connection:
        found = connection.execute("SELECT body FROM event WHERE kind = 'versionloaded' ORDER BY seq").fetchall()
    events = [event for (body,) in found if isinstance(event := decode_event(body), VersionLoaded)]
    return events[0].elapsed_s, [event.elapsed_s for event in events[1:] if event.checksum is None]


def busy_rate(run: FinishedRun, least: int) -> tuple[float, float]:
    """Generated tokens a second while `least` trajectories or more ran, and for how many seconds they did."""
    pairs = [(a, b) for a, b in pairwise(run.fleet) if min(sum(a.running), sum(b.running)) >= least]
    seconds = sum(b.rl_s - a.rl_s for a, b in pairs)
    return sum(b.generated_tokens - a.generated_tokens for a, b in pairs) / seconds if seconds else nan, seconds


def rows(run: FinishedRun, size: Size, policy: str) -> list[Row]:
    """Figures of a run."""
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


def train_run(folder: Path, size: Size, *, python: Path, device: str, policy: str, limit_s: float) -> list[Row]:
    """Figures of one run. Raises `CalledProcessError` or `TimeoutExpired` if it fails."""
    write_data(folder, size)
    config = folder / "config.yaml"
    config.write_text(json.dumps(run_config(folder, size, python=interpreter(python, folder), device=device)))
    disk = device == "cuda" and shutil.disk_usage(SHM).free < SHM_BYTES
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=None if disk else SHM) as runs:
        settings = [f"name=gpu_{policy}", f"runs={runs}", f"rollout.on_new_weights={policy}"]
        return rows(train(config, [*settings, f"max_rl_seconds={RL_S}"], limit_s=limit_s), size, policy)


def main(given: Sequence[str] | None = None) -> None:
    """Train and print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", choices=POLICIES, help="rollout.on_new_weights")
    parser.add_argument("--sglang", type=Path, required=True, help="interpreter of an environment with SGLang")
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args(given)
    device = "cpu" if args.dry else "cuda"
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        found = train_run(
            Path(folder),
            SIZES[device],
            python=args.sglang,
            device=device,
            policy=args.policy,
            limit_s=LIMIT_S,
        )
    show("gpu", found, as_json=True)


if __name__ == "__main__":
    main()
