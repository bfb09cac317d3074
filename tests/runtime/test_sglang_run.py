"""`laminar train` with real SGLang servers: launched, killed, attached to. Each run takes most of a minute."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from laminar_py.audit.handovers import handovers
from laminar_py.audit.queries import accounting
from laminar_py.audit.verify import verify
from laminar_py.events import Assigned, Finished, Interrupted, PartStarted, VersionLoaded
from laminar_py.store.database import reading
from laminar_py.store.rows import decode_event
from tests.engines.sglang_rig import running_server, sglang_python
from tests.runtime.runs import REPO, TrainProcess

pytestmark = pytest.mark.sglang
PATIENCE_S = 60.0
CONFIG = REPO / "configs/quickstart_sglang.yaml"
# hardly warm-started, the model does not stop by itself: many long responses are under way at every moment
LONG = (
    "warm_start.steps=3",
    "rollout.sampling.max_new_tokens=344",
    "rollout.batch_per_replica=32",
    "steps=12",
    "data.heldout=null",  # whose answers would take minutes
)


def settings(*more: str) -> list[str]:
    return [*LONG, f"rollout.engine.python={sglang_python()}", "rollout.max_batch=64", *more]


def servers(run: TrainProcess) -> list[psutil.Process]:
    return [process for process in run.family() if "sglang.launch_server" in process.cmdline()[1:3]]


def busy_server(run: TrainProcess) -> psutil.Process:
    """A server whose replica took up its trajectories, and weights, a while ago: it is in the midst of them."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        pids, held, since = {}, Counter(), {}
        with reading(run.run) as connection:
            rows = connection.execute("SELECT mono, body FROM event ORDER BY seq").fetchall()
        owner = {}
        for mono, event in ((mono, decode_event(body)) for mono, body in rows):
            if isinstance(event, PartStarted):
                pids[event.part] = event.pid
            elif isinstance(event, Assigned):
                owner[event.trajectory_id] = event.replica
                held[event.replica] += 1
                since[event.replica] = mono
            elif isinstance(event, Interrupted | Finished):
                held[owner.pop(event.trajectory_id)] -= 1
            elif isinstance(event, VersionLoaded):
                since[event.replica] = mono
        for server in servers(run):
            above = {parent.pid for parent in server.parents()}
            for replica in (0, 1):
                busy = held[replica] >= 4 and 0.3 < time.monotonic() - since[replica] < 2.0
                if busy and pids.get(f"replica-{replica}") in above:
                    return server
        time.sleep(0.01)
    raise AssertionError("no server was ever busy")


@pytest.mark.parametrize("policy", ["resume", "drain"])
def test_trajectories_of_a_killed_server_go_on_from_what_they_have(tmp_path, policy):
    rarely = "learner.publish_every=4"  # new weights interrupt what is to be caught in its midst
    with TrainProcess(tmp_path, *settings(f"rollout.on_new_weights={policy}", rarely), config=CONFIG) as run:
        run.wait_for_step(2)
        os.kill(busy_server(run).pid, signal.SIGKILL)
        code, output = run.finish()
    assert code == 0, output
    found = handovers(run.run)
    assert any(one.length for one in found), "the server was killed under load"
    assert len({one.source for one in found}) == 1
    if policy == "resume":  # under `drain` the other replica may have outrun their version
        assert {one.target for one in found} == {1 - found[0].source}
    assert not verify(run.run)
    assert accounting(run.run).balanced


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
