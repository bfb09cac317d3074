"""Ray's start on one host: waited for on a machine that is busy, and one line where it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_py.runtime.cluster import ray_cluster
from laminar_py.runtime.cluster.backend import open_cluster
from laminar_py.runtime.cluster.errors import RunFailedError
from laminar_py.runtime.cluster.ray_cluster import _patient_on_loopback

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
