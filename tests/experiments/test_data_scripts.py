"""Data scripts of all experiments with a tiny model: their configs accept the data, and the bytes never change."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laminar_contrib.supervised.demonstrations import read_demonstrations
from laminar_lab.tiny_models import EOS, SPECIAL, UNKNOWN
from laminar_py.config.loading import load_config
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.problems import check_disjoint, read_prompts
from laminar_py.data.sources import source_at
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.engines.model_sizes import read_sizes

ROOT = Path(__file__).parents[2]
NAMES = ("quickstart", "countdown", "tiny_code", "tool_calculator", "tiny_agent", "self_play", "tba")
UNKNOWN_ID = SPECIAL.index(UNKNOWN)


class Made:
    """The data of an experiment in a new folder, and its config."""

    def __init__(self, name, out):
        folder = ROOT / "experiments" / name
        self.config = load_config((ROOT / "configs" if name == "quickstart" else folder) / f"{name}.yaml", [])
        self.script = folder / ("prepare.py" if name == "quickstart" else "make_data.py")
        self.out = out
        self.make(out)

    def make(self, out, **variables):
        command = [sys.executable, str(self.script), "--out", str(out)]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment)
        return done.stdout

    def files(self, out):
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory):
    return Made(request.param, tmp_path_factory.mktemp(request.param))


def test_the_config_takes_the_data_and_no_heldout_prompt_is_trained_on(made):
    config, out = made.config, made.out
    tokenizer, cap = load_tokenizer(out / "model"), config.rollout.sampling.max_new_tokens
    assert config.rollout.max_len <= read_sizes(out / "model").max_position_embeddings
    encoder = PromptEncoder(tokenizer, out / "model", config.data.chat)
    names = {Path(one.path).stem for one in config.eval.sets.values()}
    train, *heldout = (
        read_prompts(
            source_at(out / f"{name}.jsonl", name), encoder=encoder, max_prompt_tokens=config.rollout.max_len - cap
        )
        for name in ("train", *sorted(names))
    )
    for prompts in heldout:
        check_disjoint(prompts, [train])
    demonstrations = read_demonstrations(
        source_at(out / "warm_start.jsonl", "warm_start.data"),
        encoder=encoder,
    )
    assert max(row.num_tokens for row in demonstrations) <= config.warm_start.tokens_per_step
    assert max(len(row.response_ids) for row in demonstrations) <= cap
    assert all(UNKNOWN_ID not in ids for row in demonstrations[:500] for ids in (row.prompt_ids, row.response_ids))


def test_the_tokenizer_gives_the_text_of_demonstrations_back(made):
    tokenizer = load_tokenizer(made.out / "model")
    for line in (made.out / "warm_start.jsonl").read_text().splitlines()[:500]:
        row = json.loads(line)
        if "response" in row and EOS not in row["prompt"]:
            text = row["prompt"] + row["response"]
            assert tokenizer.decode(np.array([*tokenizer.encode(text), *tokenizer.eos_ids])) == text


@pytest.mark.slow
def test_the_same_bytes_are_written_every_time_and_only_a_damaged_file_again(made, tmp_path):
    made.make(tmp_path, PYTHONHASHSEED="7")
    assert made.files(tmp_path) == made.files(made.out)
    (tmp_path / "train.jsonl").write_bytes(b"{")
    assert made.make(tmp_path) == f"wrote {tmp_path / 'train.jsonl'}\n"
    assert made.files(tmp_path) == made.files(made.out)
