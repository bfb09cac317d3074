"""A whole run that trains adapters: their versions alone travel, and a run that was killed goes on with them."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress

import peft
import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from laminar_lab.audit.queries import Filters, accounting, listing
from laminar_lab.audit.stored import StoredResponses
from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import evaluations_on_record
from laminar_py.ledger.rows import read_prompt, trajectory_rows
from laminar_py.records.trajectory import Kind
from tests.runs.runs import ALONE, LAMINAR, REPO, TrainProcess, wait_until_gone


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def version_bytes(run):
    """Of all versions published."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        return [row[0] for row in ledger.execute("SELECT num_bytes FROM version")]


@pytest.mark.slow
def test_a_run_of_adapters_on_two_ranks_that_was_killed_resumes_and_keeps_the_laws(tmp_path):
    """The base is the warm start's result and the reference of the KL term; engines merge each version with it.

    Every process is killed at once, and responses go on under new weights.
    """
    (tmp_path / "reward.py").write_text("def score(request): return float(len(request.response_ids) % 3)")
    settings = [
        "relay.nodes=1",
        "steps=6",
        "learner.lora.rank=4",
        "learner.lr=3e-3",
        "learner.world_size=2",
        "rollout.on_new_weights=resume",
        "rollout.partial_interval_s=0.1",
        "rollout.sampling.max_new_tokens=200",  # longer than a learner step
        "algorithm.kl_coef=0.1",
        f"reward.use=[{tmp_path / 'reward.py'}:score]",
    ]
    with TrainProcess(tmp_path, *settings) as train:
        train.wait_for_step(3)
        family = train.family()
        for process in family:
            with suppress(psutil.NoSuchProcess):  # it went with another
                process.kill()
        train.process.wait()
        assert accounting(train.run).balanced
    with TrainProcess(tmp_path, *settings, resume=True) as again:
        again.end_with(0)
        assert wait_until_gone(family) == []
    assert verify(again.run) == []
    training = listing(
        again.run, Filters(kind=Kind.TRAIN)
    )  # all of it: on a busy machine none may be consumed yet
    assert any(row.oldest_version != row.newest_version for row in training), "no response spans versions"
    rows = metrics_of(again.run)
    assert rows[-1]["step"] == 6
    assert max(row["mismatch_max"] or 0.0 for row in rows) < 1e-3
    assert rows[-1]["kl_reference_k3"] > 0, "the policy has left its base"
    (base,) = (tmp_path / "warm").glob("*/model.safetensors")
    assert max(version_bytes(again.run)) < base.stat().st_size / 5


def greedy_answers(run):
    """(prompt, response) ids of the last evaluation, which is at temperature 0, as the ledger has them."""
    with reading(run) as connection:
        last = evaluations_on_record(connection)[-1]
        stored = StoredResponses(run, connection)
        rows = trajectory_rows(connection, "group_id = ?", (last.pass_id,))
        answers = [(read_prompt(connection, row.prompt_id).ids.tolist(), stored.response(row).ids) for row in rows]
    return last.step, [(prompt, ids.tolist()) for prompt, ids in answers]


@pytest.mark.slow
def test_an_adapter_that_leaves_gives_the_greedy_tokens_of_the_ledger_as_the_merged_model_does(tmp_path):
    prepare = [sys.executable, str(REPO / "experiments/quickstart/prepare.py"), "--out", str(tmp_path / "data")]
    subprocess.run(prepare, check=True, timeout=60)
    base = tmp_path / "data/model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(base)
    (tmp_path / "reward.py").write_text("def score(request): return float(len(request.response_ids) % 3)")
    settings = [
        f"model.path={base}",
        "model.from_scratch=false",
        "warm_start=null",
        "steps=2",
        "learner.lora.rank=4",
        "learner.lr=1e-2",
        "eval.every_steps=null",
        f"reward.use=[{tmp_path / 'reward.py'}:score]",
    ]
    with TrainProcess(tmp_path, *ALONE, *settings) as train:
        train.end_with(0)
    for out, flags in (("adapter", ["--adapter"]), ("whole", [])):
        command = [LAMINAR, "export", str(train.run), str(tmp_path / out), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert (f"adapters for the base {base}" in done.stdout) == bool(flags), done.stdout
    step, answers = greedy_answers(train.run)
    assert step == 2
    assert len(answers) > 4

    def greedy(model):
        return [greedy_tokens(model, prompt, len(response)) for prompt, response in answers]

    plain = AutoModelForCausalLM.from_pretrained(base)
    told = [response for _, response in answers]
    assert greedy(plain) != told, "the adapters change what the base says"
    assert greedy(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")) == told
    assert greedy(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")) == told
    assert greedy(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")) == told


def greedy_tokens(model, prompt, length):
    """The tokens that transformers' own generation adds."""
    ids = torch.tensor([prompt])
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length
    )
    return made[0, len(prompt) :].tolist()
