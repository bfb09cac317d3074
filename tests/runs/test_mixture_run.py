"""A whole run of a mixture: the learner trains with the experts that the embedded engine recorded."""

import json
import subprocess
import sys
from pathlib import Path

from laminar_lab.audit.queries import Filters, listing
from laminar_lab.audit.stored import StoredResponses
from laminar_py.ledger.database import reading
from laminar_py.records.trajectory import Kind, Status
from tests.runs.runs import ALONE, REPO, TrainProcess, assert_laws


def make_mixture(data: Path) -> Path:
    """The quickstart's model with eight experts in the place of its MLPs."""
    prepare = [sys.executable, str(REPO / "experiments/quickstart/prepare.py"), "--out", str(data)]
    subprocess.run(prepare, check=True, timeout=60)
    path = data / "model/config.json"
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **experts}
    path.write_text(json.dumps({**json.loads(path.read_text()), **mixture}))
    return path.parent


def test_a_mixture_learns_with_the_experts_that_its_tokens_were_routed_to(tmp_path):
    model = make_mixture(tmp_path / "data")
    settings = (f"model.path={model}", "rollout.record=[routed_experts]", "eval.every_steps=null")
    with TrainProcess(tmp_path, *ALONE, "eval.sets={}", *settings) as train:
        train.end_with(0)
    assert_laws(train.run)
    rows = [json.loads(line) for line in (train.run / "metrics.jsonl").read_text().splitlines()]
    fresh = [row for row in rows if "0" in row["by_staleness"]]
    assert fresh, "the first step is on policy"
    assert max(row["mismatch_max"] for row in fresh) < 1e-4
    consumed = list(listing(train.run, Filters(status=Status.CONSUMED, kind=Kind.TRAIN)))
    assert consumed
    with reading(train.run) as connection:
        responses = StoredResponses(train.run, connection)
        for row in consumed:
            assert responses.response(row).routed_experts is not None, row.id
