"""A tree by hand: keys, a root and a leaf from the command line, a publisher of one's own; and all by a script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_lab.commands.relay import check_endpoints, read_keys, write_keys
from laminar_py.config.section import ConfigError
from laminar_py.relay.publisher import Publisher
from tests.relay.tree import folder_bytes, tensors

PAGE = Path(__file__).parents[2] / "docs" / "rooms" / "relay.md"
LAMINAR = str(Path(sys.executable).with_name("laminar"))


class Served:
    """`laminar relay serve`, ended with its test."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        command = [LAMINAR, "relay", "serve", name, "--keys", str(folder / "keys"), "--store", str(folder / name)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment)
        self.endpoint = self.line().split()[2].rstrip(",")

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def end(self) -> int:
        self._process.terminate()
        self._process.communicate(timeout=30)
        return self._process.returncode


def test_a_tree_by_hand_carries_a_version(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    root = Served("root", tmp_path)
    leaf = Served("leaf", tmp_path, "--parent", root.endpoint)
    publisher = Publisher(tmp_path / "root")
    publisher.publish(7, tensors(7))
    publisher.close()
    assert root.line().startswith("version 7 complete")
    assert leaf.line().startswith("version 7 complete")
    assert folder_bytes(tmp_path / "leaf/v7") == folder_bytes(tmp_path / "root/v7")
    assert (leaf.end(), root.end()) == (0, 0)


def test_the_example_of_the_page_pulls_what_it_publishes_and_leaves_nothing(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = example.replace("/dev/shm", str(tmp_path))
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.startswith("PulledVersion(version=1")
    assert re.search(rf"{tmp_path}/\w+/v1\b", told.stdout)
    assert list(tmp_path.iterdir()) == []


def test_keys_are_for_their_owner_and_never_written_over(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="name a new file"):
        write_keys(tmp_path / "keys")


@pytest.mark.parametrize("option", ["parent", "source"])
@pytest.mark.parametrize("endpoint", ["10.0.0.4:7000", "tcp://10.0.0.4", "tcp://10.0.0.4:x", "http://b:7000", ""])
def test_an_address_that_is_none_is_named(option: str, endpoint: str) -> None:
    assert check_endpoints(option, ["tcp://b.example:7000", "tcp://[::1]:7000", "ipc:///tmp/a"])
    with pytest.raises(ConfigError, match=f"^{option}={endpoint}: is no address of a node; give it as"):
        check_endpoints(option, [endpoint])


@pytest.mark.parametrize("data", [b"{}", b'{"public": "\xff"}'])
def test_a_file_without_keys_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "keys").write_bytes(data)
    with pytest.raises(ConfigError, match=f"keys={tmp_path / 'keys'}: cannot be read as keys"):
        read_keys(tmp_path / "keys")
