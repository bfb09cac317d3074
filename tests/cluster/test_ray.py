"""A Ray cluster that the run starts, and the thread that calls Ray."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from laminar_py.runtime.cluster import ray_cluster
from laminar_py.runtime.cluster.backend import open_cluster
from laminar_py.runtime.cluster.errors import PartDiedError, RunFailedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.ray_cluster import _patient_on_loopback, call_soon
from tests.cluster.test_part import PATIENCE_S, Faulty

SERVICES = ray_cluster.ray._private.services


def test_a_first_process_that_dies_is_one_line(monkeypatch):
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "1")
    monkeypatch.setattr(SERVICES, "GCS_SERVER_EXECUTABLE", "/bin/false")
    told = r"^Ray does not start on this machine \(.*set cluster.address=auto$"
    with pytest.raises(RunFailedError, match=told), open_cluster("local"):
        pass
    assert not ray_cluster.ray.is_initialized()


def test_a_node_that_registers_late_is_waited_for(monkeypatch):
    failures = [RuntimeError("not yet")] * 3

    def get_node(gcs_address, node_id):
        if failures:
            raise failures.pop()
        return {"node_id": node_id}

    monkeypatch.setattr(SERVICES, "get_node", get_node)
    monkeypatch.setattr(ray_cluster, "LOOK_S", 0.01)
    with _patient_on_loopback():
        assert SERVICES.get_node("address", "id") == {"node_id": "id"}
        failures += [RuntimeError("never")] * 3
        monkeypatch.setattr(ray_cluster, "START_S", 0.0)
    assert SERVICES.get_node is get_node
    with _patient_on_loopback(), pytest.raises(RuntimeError, match="never"):
        SERVICES.get_node("address", "id")


TAKEN = """
import os
{first}
from laminar_py.runtime.cluster.variables import use_token_of_cluster
use_token_of_cluster()
print(os.environ.get("RAY_AUTH_TOKEN", "that of the file"))
"""


@pytest.mark.parametrize(("first", "from_file"), [("import tests.conftest", False), ("", True)])
def test_a_token_in_the_users_home_is_a_cluster_s_and_reaches_no_test(tmp_path, first, from_file):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("0123456789abcdef" * 4)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", TAKEN.format(first=first)],
        env=clean | {"HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip() == "that of the file") == from_file


@pytest.fixture(scope="module")
def cluster():
    with open_cluster("local"):
        yield


async def test_a_part_is_not_blamed_for_what_ray_takes(cluster):
    busy = threading.Event()
    part = Part("part-0", Faulty, concurrency=1, timeout_s=5.0)
    assert await part.call("answer") == 1
    call_soon(busy.wait, PATIENCE_S)
    asyncio.get_running_loop().call_later(6.0, busy.set)
    assert await part.call("answer") == 1


async def test_nobody_waits_for_ray_and_it_hears_all_in_order(cluster):
    busy = threading.Event()
    call_soon(busy.wait, PATIENCE_S)
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    before = asyncio.create_task(part.call("answer"))
    await asyncio.sleep(0)
    part.kill()
    after = asyncio.create_task(part.call("answer"))
    await asyncio.sleep(0.1)
    assert not before.done()
    busy.set()
    with pytest.raises(PartDiedError):
        await after
    await asyncio.wait([before])


async def test_a_call_that_nobody_waits_for_any_more_is_not_made(cluster):
    busy = threading.Event()
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    assert await part.call("answer") == 1
    call_soon(busy.wait, PATIENCE_S)
    vanishing = asyncio.create_task(part.call("vanish"))
    await asyncio.sleep(0)
    vanishing.cancel()
    await asyncio.wait([vanishing])
    busy.set()
    assert await part.call("answer") == 1
