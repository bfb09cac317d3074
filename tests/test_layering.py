"""Rooms and imports: who may import whom, and where heavy libraries may live (docs/map.md has a picture)."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from laminar_py._lazy import names_of

ROOT = Path(__file__).parent.parent
CORE, SATELLITES = "laminar_py", ("laminar_lab", "laminar_contrib")
FOR_THEIR_EFFECT = ("laminar_py.runtime.cluster",)  # sets what processes read when they start

RULES = {  # room of the core: the rooms that it may import
    "records": "",
    "config": "records",
    "data": "config records",
    "ledger": "config records",
    "children": "",
    "reward": "children config ledger records",
    "environment": "children config data records",
    "control": "config ledger learner records",
    "repack": "config control records",
    "engines": "children config records",
    "rollout": "config ledger records repack",
    "relay": "config records",
    "learner": "config records",
    "observe": "config ledger records",
    "runtime": "config control data engines environment learner ledger observe records relay repack reward rollout"
    " children",
}
FLOORS = {  # room: its sub-rooms in order, each of which may import those before it
    "ledger": ("segments", ""),
    "runtime": ("cluster", "link", "preflight", "workers", "orchestrator"),
}
TOP = {"cli"}  # it may import anything of the core, and nobody imports it
LIBRARIES = {  # heavy library: where it may be imported
    "ray": ("runtime/cluster/",),
    "zmq": ("relay/sockets.py",),
    "torch": (
        "engines/local/",
        "engines/sglang/plugin/",
        "learner/",
        "relay/publisher.py",
        "relay/device_copy.py",
        "relay/remote_writers.py",
        "runtime/workers/processes/",
    ),
    "transformers": ("data/chat.py", "learner/"),
    "peft": ("learner/lora.py",),
    "aiohttp": ("engines/sglang/",),
    "plotly": (),
    "prometheus_client": (),
    "sqlite3": ("ledger/", "observe/summary.py"),
    "tensorboard": (),
    "wandb": (),
    "mlflow": (),
}
MODULES = sorted((ROOT / CORE).rglob("*.py"))


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def all_imports(package: str = CORE):
    """Path in a package, as text and parts, and each name that it imports."""
    for path in sorted((ROOT / package).rglob("*.py")):
        where = path.relative_to(ROOT / package)
        for name in sorted(imports(path)):
            yield str(where), where.parts, name


def test_a_module_imports_only_rooms_that_its_own_may():
    wrong = []
    for where, parts, name in all_imports():
        own = parts[0].removesuffix(".py")
        if not name.startswith("laminar_py.") or own in TOP or own in ("__init__", "_lazy"):
            continue
        other = name.split(".")[1]
        if other != "_lazy" and other != own and other not in RULES[own].split():
            wrong.append(f"{where} imports {name}")
    assert not wrong


@pytest.mark.parametrize("room", FLOORS)
def test_a_module_imports_only_sub_rooms_before_its_own(room):
    floors, inside = FLOORS[room], room.count("/") + 1
    wrong = []
    for where, parts, name in all_imports():
        prefix = f"laminar_py.{room.replace('/', '.')}."
        if "/".join(parts[:inside]) != room or not name.startswith(prefix):
            continue
        own = parts[inside] if parts[inside] in floors else ""
        other = name.removeprefix(prefix).split(".")[0]
        other = other if other in floors else ""
        if own in floors and other in floors and floors.index(other) > floors.index(own):
            wrong.append(f"{where} imports {name}")
    assert not wrong


def test_the_core_imports_no_satellite():
    assert not [f"{where} imports {name}" for where, _, name in all_imports() if name.split(".")[0] in SATELLITES]


def test_satellites_do_not_import_each_other():
    for own, other in (SATELLITES, SATELLITES[::-1]):
        assert not [where for where, _, name in all_imports(own) if name.split(".")[0] == other]


VOCABULARY = ("laminar_py.records.", "laminar_py.config.")  # rooms whose modules are public: records and settings


@cache
def public_names(room: str) -> set[str]:
    """Names that a room, of one level or two below the core, offers to other packages."""
    if room == f"{CORE}._lazy":
        return {"public_names"}
    if room.startswith(VOCABULARY):
        return {name for name in vars(importlib.import_module(room)) if not name.startswith("_")}
    init = ROOT.joinpath(*room.split("."), "__init__.py")
    if room.count(".") > 2 or not init.is_file():
        return set()
    return {*names_of(str(init)), *getattr(importlib.import_module(room), "__all__", ())}


@pytest.mark.parametrize("satellite", SATELLITES)
def test_a_satellite_uses_public_names_of_rooms_alone(satellite):
    wrong = []
    for path in sorted((ROOT / satellite).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                rooms = [alias.name for alias in node.names if alias.name.split(".")[0] == CORE]
                wrong += [f"{where} imports {room}" for room in rooms if room not in FOR_THEIR_EFFECT]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == CORE:
                private = {alias.name for alias in node.names} - public_names(str(node.module))
                wrong += [f"{where} imports {node.module}.{name}" for name in sorted(private)]
    assert not wrong


def test_each_public_name_is_there_and_hides_no_module():
    for init in sorted((ROOT / CORE).rglob("__init__.py")):
        room = ".".join(init.parent.relative_to(ROOT).parts)
        for name in names_of(str(init)):
            assert not (init.parent / f"{name}.py").exists(), f"{room}.{name} is a module, too"
            getattr(importlib.import_module(room), name)


def test_a_name_that_a_room_has_not_is_refused():
    with pytest.raises(ImportError, match=r"cannot import name 'Publishers' from 'laminar_py\.relay'"):
        exec("from laminar_py.relay import Publishers")


def test_importing_rooms_is_free_of_heavy_libraries():
    rooms = [".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / CORE).rglob("__init__.py")]
    listed = ", ".join(room for room in rooms if room != "laminar_py.cli")
    code = f"import sys, {listed}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"torch", "transformers", "ray", "zmq", "numpy", "pydantic", "msgspec", "asyncio", "ast"}
    assert not heavy & set(done.stdout.split())


def test_nothing_in_the_package_imports_tests_or_experiments():
    outside = ("tests", "experiments")
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


def test_nothing_imports_pickle():
    for package in (CORE, *SATELLITES):
        assert not [where for where, _, name in all_imports(package) if name.split(".")[0] == "pickle"]


def test_there_is_no_import_cycle():
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
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
    code = "import sys, laminar_py.runtime.orchestrator.controller; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
