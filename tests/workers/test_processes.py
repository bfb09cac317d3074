"""Processes of parts by themselves: threads, and the start of a relay."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from laminar_py.children import hosted
from laminar_py.config.loading import load_config
from laminar_py.ledger.run_folder import run_of
from laminar_py.relay.sockets import generate_keys
from laminar_py.runtime.workers.processes import base, replica
from laminar_py.runtime.workers.processes.base import ComputingActor, learner_threads, on_compute_thread
from laminar_py.runtime.workers.processes.relay import RelayActor
from laminar_py.runtime.workers.processes.replica import speed_key
from laminar_py.runtime.workers.specs import RelaySpec
from tests.runs.runs import REPO

GPUS, LAPTOP = "experiments/math_long_cot/7b_8gpu", "configs/quickstart"


@pytest.mark.parametrize(
    ("name", "settings", "threads"),
    [
        (GPUS, ["learner.offload=true"], 32),
        (GPUS, [], 1),
        (LAPTOP, [], 1),
        (LAPTOP, ["cluster.learner_device=cuda", "learner.offload=true"], 1),  # beside engines on the cores
    ],
)
def test_a_rank_that_updates_weights_on_the_host_has_its_share_of_the_cores(name, settings, threads):
    config = load_config(REPO / f"{name}.yaml", settings)
    assert learner_threads(config, num_cores=96, ranks_here=3) == threads
    assert learner_threads(config, num_cores=1, ranks_here=3) == 1


def test_a_stored_speed_is_of_the_same_model_settings_code_and_torch(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")

    def key(*settings):
        return speed_key(load_config(REPO / f"{LAPTOP}.yaml", [f"model.path={tmp_path}", *settings]))

    known = key()
    assert key("steps=9", "rollout.sampling.max_new_tokens=7") == known
    found = {known, key("rollout.max_batch=9"), key("learner.lora={}")}
    monkeypatch.setattr(replica, "version", lambda package: "9.9.9")
    found.add(key())
    (tmp_path / "calibration.py").write_text("MOST_S = 1.0")
    monkeypatch.setattr(replica.calibration, "__file__", str(tmp_path / "calibration.py"))
    found.add(key())
    (tmp_path / "config.json").write_text('{"vocab_size": 2}')
    assert len({*found, key()}) == 6


def test_the_threads_of_a_part_are_its_own_choice_whatever_its_environment_says():
    code = (
        "import torch; from laminar_py.runtime.workers.processes.base import compute_on\n"
        "before = torch.get_num_threads(); compute_on(3); print(before, torch.get_num_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "3"]


class Counting(ComputingActor):
    """Sees on which threads it computes."""

    def __init__(self):
        super().__init__()
        self.busy, self.threads = threading.Lock(), set()

    @on_compute_thread
    def work(self, number):
        assert self.busy.acquire(blocking=False), "another one computes"
        self.threads.add(threading.get_ident())
        self.busy.release()
        return 60 // number


def test_calls_of_many_threads_compute_on_one_thread_one_after_the_other():
    part = Counting()
    with ThreadPoolExecutor(6) as callers:
        ready = threading.Barrier(6, timeout=30)  # so that there are six callers
        callers_ids = {
            ident for ident, _ in callers.map(lambda _: (threading.get_ident(), ready.wait()), range(6))
        }
        assert list(callers.map(part.work, range(1, 61))) == [60 // number for number in range(1, 61)]
    assert len(callers_ids) == 6
    assert len(part.threads) == 1
    assert not part.threads & callers_ids


def test_an_error_of_the_compute_thread_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        Counting().work(0)


async def test_a_started_relay_answers_and_its_folder_in_shared_memory_names_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "log_to", lambda log, force: None)
    actor = RelayActor()
    spec = RelaySpec(
        config=load_config(REPO / "configs/quickstart.yaml", []).model_dump_json(),
        run_dir=str(tmp_path),
        node=1,
        store=str(tmp_path / "node-1"),
        host="127.0.0.1",
        parents=(),
        sources=(),
        chunk_bytes=4096,
        keys=generate_keys(),
    )
    await actor.start(spec)
    assert await actor.ping((), ()) == []
    assert run_of(tmp_path).path == tmp_path, "its folder in shared memory names the run"
    await actor._node.close()


def test_a_process_that_logs_much_keeps_its_newest_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(hosted, "LOG_BYTES", 10_000)
    log, root = tmp_path / "replica-0.log", logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    hosted.log_to(log, force=True)
    for number in range(1000):
        root.warning("line %d", number)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 20_000
    assert log.read_text().endswith("line 999\n")
