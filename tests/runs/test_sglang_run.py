"""`laminar train` with real SGLang servers: launched, killed, attached to. Each run takes most of a minute."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict

import psutil
import pytest
import torch

from experiments.kill_test.handovers import handovers
from laminar_lab.audit.verify import verify
from laminar_py.config.data import ModelConfig
from laminar_py.learner.export import export_hf
from laminar_py.learner.model import load_policy
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from laminar_py.records.spans import decode_spans, num_turns
from tests.engines.sglang.rig import running_server, sglang_python
from tests.runs.runs import ALONE, REPO, TrainProcess, assert_laws, forget_versions, wait_until_gone

pytestmark = pytest.mark.sglang
PATIENCE_S = 60.0
CONFIG = REPO / "configs/quickstart_sglang.yaml"
# hardly warm-started, the model does not stop by itself: many long responses are under way at every moment
LONG = (
    "warm_start.steps=3",
    "rollout.sampling.max_new_tokens=344",
    "rollout.batch_per_replica=32",
    "steps=6",
    "staleness.max_staleness=2",  # with a wider bound all steps are generated before the second is trained
    "eval.sets={}",  # whose answers would take minutes
)

ADAPTED = ("rollout.sampling.max_new_tokens=48", "steps=4", "schedule=sync", "rollout.max_batch=16")


def settings(*more: str) -> list[str]:
    return [*LONG, f"rollout.engine.python={sglang_python()}", "rollout.max_batch=64", *more]


def servers(run: TrainProcess) -> list[psutil.Process]:
    return [process for process in run.family() if "sglang.launch_server" in process.cmdline()[1:3]]


def events_of(run: TrainProcess, kind: str) -> list:
    with reading(run.run) as connection:
        found = connection.execute("SELECT body FROM event WHERE kind = ? ORDER BY seq", (kind,))
        return [decode_event(body) for (body,) in found]


def busy_server(run: TrainProcess) -> psutil.Process:
    """A server that is in the midst of several responses, as the ledger has it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        before = running(run)
        time.sleep(1.0)  # what runs has tokens, and its journals have them
        still = running(run)
        pids = {event.part: event.pid for event in events_of(run, "partstarted")}
        replicas = {
            pids[f"replica-{replica}"] for replica, names in still.items() if len(names & before[replica]) >= 4
        }
        with contextlib.suppress(psutil.NoSuchProcess):  # or one that has just ended
            for server in servers(run):
                if any(parent.pid in replicas for parent in server.parents()):
                    return server
    raise AssertionError("no server was ever busy")


def running(run: TrainProcess) -> dict[int, set[str]]:
    """Trajectories that each replica has."""
    found: dict[int, set[str]] = defaultdict(set)
    with reading(run.run) as connection:
        for replica, name in connection.execute("SELECT replica, id FROM trajectory WHERE status = 'running'"):
            found[replica].add(name)
    return found


@pytest.mark.parametrize("policy", ["resume", "drain"])
def test_trajectories_of_a_killed_server_go_on_from_what_they_have(tmp_path, policy):
    chosen = [f"rollout.on_new_weights={policy}", "rollout.partial_interval_s=0.3"]
    with TrainProcess(tmp_path, *settings(*chosen), config=CONFIG) as run:
        run.wait_for_step(2)
        os.kill(busy_server(run).pid, signal.SIGKILL)
        run.end_with(0)
    found = handovers(run.run)
    assert any(one.length for one in found), "the server was killed under load"
    assert len({one.source for one in found}) == 1
    taken = {one.target for one in found} - {None}  # some still waited for a slot when the run ended
    if policy == "resume":  # under `drain` the other replica may have outrun their version
        assert taken == {1 - found[0].source}
    assert_laws(run.run)


async def test_a_run_on_a_server_that_runs_already_leaves_it_there(tmp_path, monkeypatch):
    prepare = [sys.executable, str(REPO / "experiments/quickstart/prepare.py"), "--out", str(tmp_path / "data")]
    await asyncio.to_thread(subprocess.run, prepare, check=True, timeout=60)
    spec = {"max_len": 456, "max_batch": 64, "kv_capacity": 65536}
    async with running_server(tmp_path / "data/model", tmp_path, **spec) as server:
        monkeypatch.setenv("SGLANG_API_KEY", server.api_key)
        attached = settings(f"rollout.engine.urls=[{server.url}]", "rollout.replicas=1", "steps=3")
        with TrainProcess(tmp_path / "runs", *attached, config=CONFIG) as run:
            code, output = await asyncio.to_thread(run.finish)
        assert code == 0, output
        assert psutil.pid_exists(server.pid)
    assert not verify(run.run)


async def test_a_run_of_adapters_loads_them_by_their_versions(tmp_path):
    prepare = [sys.executable, str(REPO / "experiments/quickstart/prepare.py"), "--out", str(tmp_path / "data")]
    await asyncio.to_thread(subprocess.run, prepare, check=True, timeout=60)
    source, base = tmp_path / "data/model", tmp_path / "base"
    drawn = ModelConfig(path=source, from_scratch=True)
    policy = load_policy(drawn, seed=0, temperature=1.0, device=torch.device("cpu"))
    export_hf(policy, base, source=source, dtype=torch.float32)
    (tmp_path / "reward.py").write_text("def score(request): return float(len(set(request.response_ids)) % 3)")
    python = f"rollout.engine.python={sglang_python()}"
    chosen = [f"model={{path: {base}}}", "warm_start=null", "eval.sets={}", python, "rollout.replicas=1"]
    learns = ["learner.lora.rank=4", "learner.lr=3e-3", f"reward.use=[{tmp_path / 'reward.py'}:score]"]
    with TrainProcess(tmp_path / "runs", *ADAPTED, *chosen, *learns, config=CONFIG) as run:
        code, output = await asyncio.to_thread(run.finish)
    assert code == 0, output
    assert not verify(run.run)
    rows = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["version"] for row in rows) > 0, "not all was drawn by the base"
    assert max(row["mismatch_max"] or 0.0 for row in rows) < 1e-3
    assert all(row["grad_norm"] > 0 for row in rows)


def test_servers_of_the_reward_are_launched_and_one_that_is_killed_comes_back(tmp_path):
    flags = "{load-format: dummy, max-total-tokens: 8192}"
    pool = f"{{model: experiments/quickstart/data/model, gpus: 0, python: {sglang_python()}, flags: {flags}}}"
    term = "{kind: steps, servers: prm, separator_id: 7, labels: [5, 6], ends: ';'}"
    reward = f"reward={{servers: {{prm: {pool}}}, use: [{term}], timeout_s: 60}}"
    with TrainProcess(tmp_path, *ALONE, "eval.sets={}", "steps=40", reward) as run:
        run.wait_for_step(2)
        (server,) = servers(run)
        os.kill(server.pid, signal.SIGKILL)
        family = run.family()
        run.end_with(0)
    assert not wait_until_gone(family), "nothing is left running"
    starts, deaths = (events_of(run, kind) for kind in ("partstarted", "partcrashed"))
    assert [event.part for event in starts].count("server-prm-0") == 2
    assert [event.part for event in deaths] == ["server-prm-0"]
    assert_laws(run.run)


def tokens_of(run: TrainProcess, replica: int) -> int:
    """Tokens of finished responses that a replica had last."""
    with reading(run.run) as connection:
        found = "SELECT coalesce(sum(length), 0) FROM trajectory WHERE replica = ? AND status != 'running'"
        return connection.execute(found, (replica,)).fetchone()[0]


def ten_steps(folder, name):
    """Turns of each response that ten steps of an experiment trained on; the run is over, and all laws hold."""
    engine = f"rollout.engine={{kind: sglang, python: {sglang_python()}, device: cpu}}"
    small = (
        "steps=10",
        "warm_start.steps=300",
        "eval.sets={}",
        "rollout.prompts_per_step=4",
        "rollout.group_size=4",
    )
    batches = ("rollout.batch_per_replica=32", "rollout.max_batch=32", "rollout.without_signal=train")
    warm = f"warm_start.cache={folder / 'warm'}"
    config = REPO / f"experiments/{name}/{name}.yaml"
    with TrainProcess(folder, engine, *ALONE, config=config, small=(*small, *batches, warm)) as run:
        run.end_with(0)
    assert not verify(run.run)
    with reading(run.run) as connection:
        rows = connection.execute(
            "SELECT spans FROM trajectory WHERE status = 'consumed' AND kind = 'train'"
        ).fetchall()
    forget_versions(run.run)
    turns = [num_turns(decode_spans(spans)) for (spans,) in rows]
    assert len(turns) == 160
    return turns


def test_ten_steps_of_turns_with_a_calculator(tmp_path):
    turns = ten_steps(tmp_path, "tool_calculator")
    assert sum(count == 2 for count in turns) > 20, "it asks, and goes on with the result"


def test_ten_steps_of_an_agent_that_knows_the_openai_package(tmp_path):
    turns = ten_steps(tmp_path, "tiny_agent")
    assert sum(count == 4 for count in turns) > 60, "most games take all guesses"
