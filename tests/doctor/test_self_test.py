"""`laminar doctor --try`: sound machines, and planted faults in the right row."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from laminar_lab.doctor import probes, self_test
from laminar_lab.doctor.probes import NodeProbe, measured, probe_node, run_ranks
from laminar_lab.doctor.trial_rows import Verdict, rate_row
from laminar_lab.emulation.settings import read_profile
from laminar_py.cli.command import app
from laminar_py.config import ConfigError
from laminar_py.config.loading import load_config
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster import Needs, Placement, free_port, nodes, open_cluster
from tests.runs.runs import REPO

QUICKSTART, RECIPE = REPO / "configs/quickstart.yaml", REPO / "experiments/math_long_cot/7b_8gpu.yaml"
SHM_64_MB = 64 << 20


def tried(*arguments):
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--try", "--json"])
    return done.exit_code, {row["what"]: row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.slow
def test_a_laptop_s_config_is_tried_in_a_short_run(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    code, rows = tried(QUICKSTART, f"runs={tmp_path / 'runs'}", "--out", tmp_path / "profile.yaml")
    assert code == 0
    profile = read_profile(tmp_path / "profile.yaml")
    assert profile.relay_bytes_per_s == pytest.approx(rows["versions to nodes"]["value"], rel=1e-3)
    assert profile.learner.train_tokens_per_s == pytest.approx(rows["learner step"]["value"], rel=1e-3)
    assert all(row["verdict"] in (Verdict.OK, Verdict.SLOW) for row in rows.values())
    assert rows["learner start"]["measured"] == "sdpa"
    assert {"engines start", "first response", "learner step", "publish", "loads", "the run's laws"} <= set(rows)
    assert list((tmp_path / "runs").iterdir()) == []
    assert not list(Path("/dev/shm").glob("laminar-.trial-*"))


@pytest.mark.slow
def test_what_a_trial_does_not_reach_is_named_with_the_run_s_last_line(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    code, rows = tried(QUICKSTART, f"runs={tmp_path}", "data.train=/nowhere.jsonl")
    assert code == 2
    assert (rows["learner start"]["verdict"], rows["loads"]["verdict"]) == (Verdict.FAILED, Verdict.NOT_RUN)
    assert "data.train=/nowhere.jsonl" in rows["learner start"]["measured"]
    assert (tmp_path / "quickstart-trial/trial.log").is_file()


def test_an_imagined_node_lists_what_would_be_measured(monkeypatch):
    monkeypatch.chdir(REPO)
    code, rows = tried(RECIPE, "--pretend", "1x8xH100")
    assert code == 0
    assert rows.pop("placement and memory")["verdict"] == Verdict.OK
    assert {row["verdict"] for row in rows.values()} == {Verdict.NOT_RUN}
    assert {"host to GPU", "all-reduce", "learner step", "loads"} <= set(rows)


def test_a_trial_needs_a_config():
    done = CliRunner().invoke(app, ["doctor", "--try"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("--try=true: needs a config")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert str(done.exception) == "--json=true: is for --try; add it, or leave this out"


def node_rows(probe, *settings):
    config = load_config(QUICKSTART, settings)
    return {row.what: row for row in self_test._rows_of(config, probe, has_gpus=False)}


def test_a_machine_without_a_compiler_is_named_where_something_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    probe = decode(NodeProbe, probe_node(str(tmp_path), ""))
    assert node_rows(probe)["compilers"].verdict is Verdict.OK
    row = node_rows(probe, "learner.compile=true")["compilers"]
    assert (row.verdict, row.measured) == (Verdict.FAILED, "no C++ compiler")
    assert "apt-get install g++" in row.remedy


@contextmanager
def mounted(folder: Path, size: int):
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False)
    if done.returncode:
        pytest.skip("this user may not mount a file system in memory")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_shared_memory_of_64_mb_is_named(tmp_path):
    with mounted(tmp_path, SHM_64_MB):
        row = node_rows(decode(NodeProbe, probe_node(str(tmp_path), "")), f"relay.shm={tmp_path}")["shared memory"]
    assert (row.verdict, row.measured) == (Verdict.FAILED, "64 MiB free")
    assert "--shm-size" in row.remedy


def collectives(config):
    with open_cluster(None):
        placement = Placement(Needs.from_config(config), nodes)
        return {row.what: row for row in asyncio.run(self_test._collective_rows(config, placement))}


def test_collectives_of_two_ranks_have_rates():
    rows = collectives(load_config(QUICKSTART, ["learner.world_size=2"]))
    assert rows["all-reduce"].value > 0
    assert rows["reduce-scatter"].value > 0


SLOW_LINK = "tbf rate 320mbit burst 256kb latency 50ms"  # 0.04 GB/s


class NamespaceCalls:
    """Two network namespaces as nodes, linked by a slow link; a rank of the learner is on each."""

    def __init__(self, nodes):
        self.ips = nodes
        self.plan = SimpleNamespace(learner=[SimpleNamespace(node=node) for node in nodes])

    def ip(self, node):
        return self.ips[node]

    async def on_node(self, node, function, *arguments):
        code = (
            "import sys; from laminar_lab.doctor import probes; from laminar_py.runtime.cluster import free_port;"
        )
        code += f"sys.stdout.write({function.__name__ if function is free_port else 'probes.run_ranks'}"
        code += "(*sys.argv[1:]).hex())"
        words = ["ip", "netns", "exec", node, sys.executable, "-c", code, *arguments]
        return bytes.fromhex(await asyncio.to_thread(subprocess.check_output, words, text=True))


@contextmanager
def linked_namespaces(shape):
    """Two namespaces with a link between them, which carries what `tc` allows with these words."""
    names = [f"laminar-{os.getpid()}-{side}" for side in "ab"]
    ips, ends = (
        dict(zip(names, ("10.213.7.1", "10.213.7.2"), strict=True)),
        [f"ll{os.getpid() % 10**6}{s}" for s in "ab"],
    )
    lines = [f"ip netns add {name}" for name in names]
    lines.append(f"ip link add {ends[0]} netns {names[0]} type veth peer name {ends[1]} netns {names[1]}")
    for name, end in zip(names, ends, strict=True):
        lines += [f"ip -n {name} addr add {ips[name]}/24 dev {end}", f"ip -n {name} link set {end} up"]
        lines += [f"ip -n {name} link set lo up", f"tc -n {name} qdisc add dev {end} root {shape}"]
    try:
        for line in lines:
            try:
                subprocess.run(line.split(), check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no slow link here: {line}: {getattr(error, 'stderr', error)}")
        yield ips
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_slow_link_between_nodes_is_named_in_the_row_of_collectives_with_its_rate(monkeypatch):
    with linked_namespaces(SLOW_LINK) as ips:
        calls = NamespaceCalls(ips)
        monkeypatch.setattr(self_test, "on_node", calls.on_node)
        config = load_config(QUICKSTART, ["learner.world_size=2"])
        rows = {row.what: row for row in asyncio.run(self_test._collective_rows(config, calls))}
    assert rows["all-reduce"].verdict is Verdict.SLOW
    assert rows["all-reduce"].value == pytest.approx(0.04e9, rel=0.3)
    assert rows["all-reduce"].measured.endswith("GB/s (between 10.213.7.1, 10.213.7.2)")
    assert rows["all-reduce"].remedy.startswith("the link between these nodes")


def test_a_rank_that_never_joins_is_named(monkeypatch):
    start = subprocess.Popen

    def without_rank_1(words, **others):
        return start(["sleep", "60"] if words[-1] == "1" else words, **others)

    monkeypatch.setattr(probes, "JOIN_S", 15.0)
    monkeypatch.setattr(probes.subprocess, "Popen", without_rank_1)
    rows = collectives(load_config(QUICKSTART, ["learner.world_size=2"]))
    assert rows["all-reduce"].verdict is Verdict.FAILED
    assert rows["all-reduce"].measured == "rank 1: no end within 15 s; it said last: nothing"


def test_an_interrupted_probe_ends_its_ranks_at_once(tmp_path):
    ranks = []

    async def interrupted():
        waiting = asyncio.to_thread(run_ranks, str(tmp_path / "ranks"), "0", "2", "cpu")
        with suppress(TimeoutError):
            await asyncio.wait_for(waiting, timeout=2.0)
        ranks.extend(probes._children)
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        self_test._run(interrupted())
    assert time.monotonic() - began < 5.0
    assert [rank.poll() for rank in ranks] == [-signal.SIGKILL]


def test_a_rank_whose_parent_was_killed_during_its_imports_ends():
    words = [sys.executable, "-m", "laminar_lab.doctor.probes", "1", "tcp://127.0.0.1:1", "2", "cpu", "1"]
    assert subprocess.run(words, timeout=60, check=False).returncode == 128 + signal.SIGKILL


def test_a_closed_port_is_a_fault_of_the_ranks(monkeypatch):
    monkeypatch.setattr(probes, "JOIN_S", 15.0)
    (answer,) = decode(list[str], run_ranks("tcp://127.0.0.1:1", "1", "2", "cpu"))
    assert measured(answer) is None
    assert answer.startswith("rank 1: no end within 15 s")


def test_a_slow_rate_is_named_with_its_remedy_and_few_bytes_are_not_judged():
    slow = rate_row("versions to nodes", 1.2e9, 0.05e9, remedy="another network")
    assert (slow.verdict, slow.measured, slow.remedy) == (Verdict.SLOW, "0.05 GB/s", "another network")
    assert rate_row("versions to nodes", 1.2e9, 0.05e9, remedy="", weighty=False).verdict is Verdict.OK
