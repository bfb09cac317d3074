"""Rooms and imports: who may import whom, and where heavy libraries may live (docs/design.md has the table)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "laminar_py"

LAYERS = {
    "codec": 0,
    "types": 0,
    "adapter": 0,
    "interfaces": 0,
    "section": 0,
    "algorithm": 0,
    "config": 0,
    "config_file": 0,
    "events": 0,
    "data": 1,
    "control": 1,
    "repack": 1,
    "reward": 1,
    "store": 1,
    "engines": 2,
    "rollout": 2,
    "relay": 2,
    "learner": 2,
    "runtime": 3,
    "audit": 3,
    "analytics": 3,
    "bench": 4,
    "cli": 4,
}
APART = (
    {"rollout", "relay"},
    {"rollout", "learner"},
    {"relay", "learner"},
    {"audit", "runtime"},
    {"analytics", "runtime"},
)
ROOMS = {
    "ray": ("runtime/", "bench/relay_ray.py"),
    "zmq": ("relay/transport.py",),
    "torch": (
        "engines/local",
        "learner/",
        "relay/publisher.py",
        "relay/shards.py",
        "relay/device_copy.py",
        "runtime/actors.py",
        "runtime/learner_part.py",
        "runtime/doctor.py",
        "bench/",
    ),
    "transformers": ("learner/", "bench/"),
    "peft": ("learner/lora.py",),
    "aiohttp": ("engines/sglang", "bench/", "analytics/dashboard.py"),
    "plotly": ("analytics/page.py",),
    "prometheus_client": ("analytics/gauges.py",),
    "sqlite3": ("store/", "audit/", "analytics/", "runtime/summary.py"),
    "tensorboard": ("runtime/trackers.py",),
    "wandb": ("runtime/trackers.py",),
    "mlflow": ("runtime/trackers.py",),
    "pickle": (),
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_its_own_layer_and_lower_ones(path):
    own = room(path.relative_to(PACKAGE).parts)
    for name in imports(path):
        if not name.startswith("laminar_py.") or own == "__init__":
            continue
        other = name.split(".")[1]
        assert LAYERS[other] <= LAYERS[own], f"{own} imports {name} of a higher layer"
        assert {own, other} not in APART, f"{own} and {other} stay apart"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_stay_in_their_rooms(path):
    where = str(path.relative_to(PACKAGE))
    for library, rooms in ROOMS.items():
        if any(name == library or name.startswith(f"{library}.") for name in imports(path)):
            assert where.startswith(rooms), f"{where} imports {library}"


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

    code = "import sys, laminar_py.runtime.controller; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
