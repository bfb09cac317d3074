"""Rooms and imports: who may import whom, and where heavy libraries may live (docs/design.md has the table)."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "laminar_py"

RULES = {  # room: the rooms that it may import
    "records": "",
    "config": "records",
    "hardware": "config",
    "segments": "records",
    "data": "config records",
    "sandbox": "config",
    "reward": "config records sandbox segments",
    "environment": "config data records sandbox",
    "packing": "config records",
    "ledger": "config records segments",
    "control": "config ledger packing records segments",
    "repack": "config control records",
    "engines": "config records",
    "rollout": "config records repack segments",
    "relay": "config records",
    "link": "records relay",
    "learner": "config packing records",
    "telemetry": "config ledger records",
    "cluster": "config records relay",
    "preflight": "cluster config data engines hardware ledger records relay reward sandbox segments telemetry",
    "workers": "cluster config control data engines environment learner ledger link packing preflight records"
    " relay repack reward rollout sandbox segments telemetry",
    "orchestrator": "cluster config control engines learner ledger packing preflight records relay repack reward"
    " telemetry workers",
    "simulate": "config control engines learner ledger packing records relay repack rollout segments telemetry",
    "calibration": "config engines learner packing records relay rollout",
    "audit": "config ledger records segments",
    "samples": "audit config data ledger records",
    "analytics": "audit config ledger records samples",
    "plan": "analytics config hardware packing preflight records simulate",
    "launcher": "analytics cluster config ledger preflight records sandbox telemetry",
}
FLOORS = {  # room: its sub-rooms in order, each of which may import those before it
    "analytics": ("read", "measure", "triage", "show"),
}
TOP = {"bench", "cli"}  # these may import anything of the package, and nobody imports them
LIBRARIES = {  # heavy library: where it may be imported
    "ray": ("cluster/",),
    "zmq": ("relay/wire/",),
    "torch": (
        "engines/local/",
        "learner/",
        "calibration/learner.py",
        "relay/publisher.py",
        "relay/store/shards.py",
        "relay/store/device_copy.py",
        "workers/processes/",
        "preflight/doctor.py",
        "bench/",
    ),
    "transformers": ("data/chat.py", "learner/", "bench/"),
    "peft": ("learner/lora.py",),
    "bm25s": ("environment/tools/search.py",),
    "gymnasium": ("environment/gymnasium_kind.py",),
    "reasoning_gym": ("environment/reasoning_gym_tasks.py",),
    "aiohttp": (
        "engines/sglang/",
        "environment/agents/endpoint.py",
        "environment/agents/streamed.py",
        "environment/openenv_session.py",
        "reward/servers.py",
        "segments/store.py",
        "bench/",
        "analytics/show/dashboard.py",
    ),
    "plotly": ("analytics/show/html.py",),
    "prometheus_client": ("analytics/show/gauges.py",),
    "sqlite3": ("ledger/", "bench/", "audit/", "samples/reading.py", "analytics/read/", "telemetry/summary.py"),
    "tensorboard": ("telemetry/trackers.py",),
    "wandb": ("telemetry/trackers.py",),
    "mlflow": ("telemetry/trackers.py",),
    "pickle": (),
}
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def all_imports():
    """Path in the package, as text and parts, and each name that it imports."""
    for path in MODULES:
        where = path.relative_to(PACKAGE)
        for name in sorted(imports(path)):
            yield str(where), where.parts, name


def test_a_module_imports_only_rooms_that_its_own_may():
    wrong = []
    for where, parts, name in all_imports():
        own = parts[0].removesuffix(".py")
        if not name.startswith("laminar_py.") or own in TOP or own == "__init__":
            continue
        other = name.split(".")[1]
        if other != own and other not in RULES[own].split():
            wrong.append(f"{where} imports {name}")
    assert not wrong


def test_a_module_imports_only_sub_rooms_before_its_own():
    wrong = []
    for where, (own, *inner), name in all_imports():
        floors = FLOORS.get(own, ())
        if inner and inner[0] in floors:
            later = tuple(f"laminar_py.{own}.{floor}" for floor in floors[floors.index(inner[0]) + 1 :])
            if name.startswith(later):
                wrong.append(f"{where} imports {name}")
    assert not wrong


def test_nothing_in_the_package_imports_benchmarks_tests_or_experiments():
    outside = ("benchmarks", "tests", "experiments")
    assert not [f"{where} imports {name}" for where, _, name in all_imports() if name.split(".")[0] in outside]


def test_no_two_rooms_import_each_other():
    assert list(TopologicalSorter({own: may.split() for own, may in RULES.items()}).static_order())


def test_heavy_libraries_stay_in_their_rooms():
    wrong = []
    for where, _, name in all_imports():
        rooms = LIBRARIES.get(name.split(".")[0])
        if rooms is not None and not where.startswith(rooms):
            wrong.append(f"{where} imports {name}")
    assert not wrong


def test_there_is_no_import_cycle():
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    graph = {
        name: {other for other in imports(path) if other in names and other != name}
        for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_controller_process_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, laminar_py.orchestrator.controller; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
