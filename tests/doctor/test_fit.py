"""`laminar doctor CONFIG` against the cluster that Ray sees: the plan, warnings, and what is missing."""

import json
import re
import subprocess
from collections import Counter
from contextlib import nullcontext

import pytest

from laminar_lab.doctor.checks import _rows, fit
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster.backend import nodes
from laminar_py.runtime.cluster.errors import PartBugError
from laminar_py.runtime.cluster.placement import Needs, Node, Placement, make_plan
from laminar_py.runtime.preflight import node_checks
from laminar_py.runtime.preflight.node_checks import NodeReport, inspect_node, node_faults
from tests.runs.fake_cluster import FakeCluster, joined
from tests.runs.runs import LAMINAR, REPO


def doctor(*arguments):
    """Exit code, output, lines on standard error."""
    done = subprocess.run(
        [LAMINAR, "doctor", *arguments], cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr.strip().splitlines()


def with_model(folder, name, *settings):
    """A shipped config whose model, of 7 GB in words, is in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 150000}')
    where = [f"model.path={folder}", f"runs={folder / 'runs'}", *settings]
    return load_config(REPO / f"{name}.yaml", where)


@pytest.mark.slow
def test_a_config_is_placed_on_the_cluster_that_it_names_and_every_node_looked_at(tmp_path):
    with FakeCluster(8, 8, 8) as cluster:
        address = f"cluster.address={cluster.address}"
        shape = fit(
            with_model(tmp_path, "experiments/math_long_cot/7b_24gpu", address, "relay.keep_versions=1000000")
        )
        assert [(parts, gpus) for parts, _, gpus in shape.rows] == [
            ("learner-0 to 7", "1 each"),
            ("learner-8 to 13", "1 each"),
            ("replica-0 to 1", "1 each"),
            ("replica-2 to 9", "1 each"),
            ("relay-0", "-"),
            ("relay-1", "-"),
            ("relay-2", "-"),
        ]
        assert [node.gpus for node in shape.nodes] == [8, 8, 8]
        assert shape.warnings == []
        faults = Counter(line.split(":")[0] for line in shape.faults)
        assert faults == {"relay.shm=/dev/shm": 3, "rollout.engine.python=sglang-env/bin/python": 2}
        few = ("rollout.replicas=1", "learner.world_size=5", "relay.nodes=1")
        shape = fit(with_model(tmp_path, "experiments/math_long_cot/32b_64gpu", address, *few))
        assert "15 GPUs idle" in shape.warnings[0]


async def test_what_a_node_lacks_is_named_with_the_node():
    with joined(FakeCluster(8)):
        config = load_config(REPO / "experiments/math_long_cot/7b_8gpu.yaml", ["relay.shm=/nowhere"])
        placement = Placement(Needs.from_config(config), nodes)
        lines = await node_faults(config, placement)
        assert [line.split(":")[0] for line in lines] == [
            "model.path=models/Qwen2.5-7B",
            "rollout.engine.python=sglang-env/bin/python",
            "relay.shm=/nowhere",
        ]
        assert all(placement.ip(placement.plan.relays[0]) in line for line in lines)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("rollout", {"engine": {"kind": "far"}}),
        ("algorithm", {"name": "far"}),
        ("repack", {"planner": "far"}),
    ],
)
def test_a_node_that_lacks_the_package_of_a_backend_an_algorithm_or_a_planner_says_so(section, named, tmp_path):
    settings = json.loads(with_model(tmp_path, "configs/quickstart").model_dump_json())
    told = json.dumps({**settings, section: {**settings[section], **named}})
    report = decode(NodeReport, inspect_node("", told, "replica"))
    assert re.match(r"(rollout\.engine\.kind|algorithm\.name|repack\.planner)=far: unknown; choose", report.fault)
    assert report.model


def test_a_config_that_does_not_fit_this_machine_is_one_line_and_exit_code_2():
    code, _, lines = doctor("experiments/math_long_cot/7b_8gpu.yaml", "rollout.replicas=600")
    assert code == 2
    assert len(lines) == 1
    assert "GPUs" in lines[0]


def test_what_the_engines_lack_is_found_where_the_run_starts_them_too(tmp_path):
    shape = fit(with_model(tmp_path, "configs/quickstart", "rollout.record=[routed_experts]"))
    assert "rollout.record=routed_experts: the model in model.path has no experts; leave it out" in shape.faults


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (
            node_checks.RemoteCallError("TypeError: planted", is_bug=True),
            pytest.raises(PartBugError, match="planted"),
        ),
        (
            node_checks.RemoteCallError("No module named laminar_py", is_bug=False),
            nullcontext("cannot run laminar_py"),
        ),
        (node_checks.NoAnswerError("gone"), nullcontext("cannot run laminar_py")),
    ],
    ids=["bug", "environment", "node"],
)
async def test_a_mistake_of_ours_on_a_node_is_no_complaint_about_the_node(monkeypatch, tmp_path, error, outcome):
    async def on_node(*arguments):
        raise error

    monkeypatch.setattr(node_checks, "on_node", on_node)
    plan = make_plan(Needs(ranks=1, rank_gpus=0, replicas=1, replica_gpus=0), [Node(id="a", ip="10.0.0.4")])
    with outcome as words:
        (line,) = await node_checks._faults_of_node(
            with_model(tmp_path, "configs/quickstart"), plan, "a", "10.0.0.4", "witness"
        )
        assert f"node 10.0.0.4 {words}" in line


def test_servers_of_the_reward_are_shown_with_their_gpus():
    servers = (("prm", 2), ("prm", 2), ("judge", 1))
    needs = Needs(ranks=1, rank_gpus=1, replicas=1, replica_gpus=1, servers=servers)
    rows = _rows(needs, make_plan(needs, [Node(id="a", ip="10.0.0.4", gpus=8)]))
    assert [row for row in rows if "server" in row[0]] == [
        ("server-prm-0 to 1", "a", "2 each"),
        ("server-judge-0", "a", "1"),
    ]


def test_the_laptops_config_fits_and_is_shown():
    refers = ("algorithm.kl_coef=0.1", "algorithm.reference_pass=stage")
    code, output, lines = doctor("configs/quickstart.yaml", *refers)
    assert (code, lines) == (0, [])
    for part in ("learner-0", "reference-0", "replica-0 to 1", "relay-0 to 2"):
        assert part in output
    assert output.splitlines()[-1].startswith("every part has a place, and no node lacks software; ")


def test_a_cluster_that_cannot_be_joined_is_a_fault_of_the_config():
    config = load_config(REPO / "configs" / "quickstart.yaml", ["cluster.address=127.0.0.1:9"])
    with pytest.raises(ConfigError, match=r"cluster\.address=127\.0\.0\.1:9: no Ray cluster to join there"):
        fit(config)
