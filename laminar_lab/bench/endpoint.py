"""Time that the endpoint of agents adds to the engine's first token, for one agent that streams.

The agent's process is started as in a run and speaks HTTP on loopback. Turns have one token. The time to the first
event runs from the agent's request; the engine's own time, from the replica's request to the first token, is
subtracted.
"""

import asyncio
import json
from pathlib import Path

import numpy as np
from transformers import Qwen3Config

from laminar_lab.bench import timed_agent
from laminar_lab.bench.report import Row, log_line
from laminar_lab.bench.turns import BenchReplica, added_rows
from laminar_lab.bench.workplace import SMALL, workplace, write_model
from laminar_lab.tiny_models import EOS, PAD, SPECIAL, tiny_model
from laminar_py.config import RunConfig, parse_config
from laminar_py.runtime.cluster import open_cluster

ROWS = ("endpoint_added_ms", "endpoint_total_ms", "endpoint_engine_ms")
MARKS = ("<user>", "<assistant>")
VOCAB = 8192
NUMBERS = [f"{number:04d}" for number in range(VOCAB - len(MARKS) - len(SPECIAL))]  # a token each
PROMPT, MAX_LEN = 16, 1024  # tokens of a prompt, of a trajectory at most
TURNS, WORDS = 12, 32  # of a conversation, and tokens of the agent's message before each turn
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rows(*, repeats: int = 25) -> list[Row]:
    """Measure a conversation a round, medians over `repeats` rounds. One more round warms all up."""
    with workplace() as folder, open_cluster(None):
        rounds = asyncio.run(_measure_rounds(folder, repeats=repeats))
    where = (
        f"p50, one agent that streams, {TURNS} turns, 25M parameters, one thread, no other at work; from its"
        " request to the first event"
    )
    return added_rows("endpoint", rounds, where)


async def _measure_rounds(folder: Path, *, repeats: int) -> list[list[tuple[float, float]]]:
    """Hold all conversations with one replica; return total and engine seconds of each turn, without the first."""
    rng = np.random.default_rng(0)
    prompt = np.arange(PROMPT, dtype=np.int32)  # no agent's conversation begins with it
    rounds = []
    async with BenchReplica(write_agent_run(folder), folder / "run", messages=True) as replica:
        for number in range(repeats + 1):
            name = f"agent-{number}"
            texts = [
                "".join(NUMBERS[word] for word in rng.integers(len(NUMBERS), size=WORDS)) for _ in range(TURNS)
            ]
            fields = {"texts": texts, "out": str(folder / name)}
            engine = await replica.run(name, prompt, fields, vocab=VOCAB, max_tokens=MAX_LEN - PROMPT)
            total_s: list[float] = json.loads((folder / name).read_text())
            own_s = [first_s - asked_s for asked_s, first_s in engine]
            rounds.append(list(zip(total_s, own_s, strict=True)))
            log_line(f"conversation {number} of {repeats}: {1e3 * np.median(total_s):.2f} ms to the first event")
    return rounds[1:]


def write_agent_run(folder: Path) -> RunConfig:
    """Write a model of 25 million parameters with a chat template; return the config of a run on it."""
    ends = {"eos_token_id": SPECIAL.index(EOS), "pad_token_id": SPECIAL.index(PAD)}
    model = write_model(folder / "model", Qwen3Config.from_dict({**SMALL.to_dict(), **ends}))
    files = tiny_model((*MARKS, *NUMBERS), pattern=r"<\w+>|\d{4}", template=TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text(files[f"model/{name}"])
    return parse_config(
        {
            "name": "endpoint",
            "steps": 1,
            "model": {"path": str(model)},
            "data": {"train": "none.jsonl"},
            "environment": {"kind": "agent", "function": f"{timed_agent.__file__}:run", "max_turns": 100},
            "rollout": {
                "max_batch": 32,
                "max_len": MAX_LEN,
                "sampling": {"max_new_tokens": MAX_LEN - PROMPT},
            },
            "reward": {"use": ["environment"]},
        }
    )
