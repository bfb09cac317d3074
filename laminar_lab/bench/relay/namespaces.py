"""Hosts with narrow links on one machine: network namespaces joined by a bridge, limited in both directions.

Used by the measurements `hosts`. Needs root and iproute2, and never touches the machine's own interfaces. Every
name holds the process id of its owner, so the next benchmark removes the leftovers of a killed one (`tests/bench/t
est_rivals.py::test_a_killed_benchmark_leaves_no_process_and_its_network_goes_when_the_next_starts`).
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

from laminar_lab.bench.processes import Work, Worker
from laminar_lab.bench.workplace import SHARED_MEMORY
from laminar_py.config import ConfigError

PREFIX = "laminar-hosts-"
NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"  # of every host
BURST_BYTES = 128 * 2**10  # two of the largest segments: less drops them, more lets a version start early
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of `setns`
QUEUE_BYTES = 2**20  # 20 ms at 400 Mbit/s: room for the windows of several connections, as a switch port has
CONGESTION = "cubic"  # the kernel's default, named so that figures do not depend on how a machine is set


class Network:
    """Namespaces `hosts`, each with `INTERFACE` at `address(i)`; a context that removes them at its end."""

    def __init__(self, num_hosts: int, *, mbit_per_s: int) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._mbit_per_s = mbit_per_s
        self.hosts = [NAMESPACES / f"{self._prefix}{number}" for number in range(num_hosts)]

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.0.0.{host + 1}"

    def entry(self, host: int) -> Callable[[], None]:
        """A function that moves a process into a host."""
        return partial(_enter, self.hosts[host])

    def start(self, host: int, work: Work) -> Worker:
        """Start a process on a host."""
        return Worker(work, within=self.entry(host))

    def __enter__(self) -> Self:
        remove_leftovers()
        switch = f"{self._prefix}switch"
        try:
            _run(f"ip netns add {switch}")
            _run(f"ip -n {switch} link add bridge type bridge")
            _run(f"ip -n {switch} link set bridge up")
            for number, path in enumerate(self.hosts):
                self._join(path.name, switch, number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def _join(self, host: str, switch: str, number: int) -> None:
        """Add a host and its cable, limited at its own end where it sends, at the bridge's where it receives."""
        port, address = f"port{number}", self.address(number)
        _run(f"ip netns add {host}")
        _run(f"ip -n {switch} link add {port} type veth peer name {INTERFACE} netns {host}")
        _run(f"ip -n {switch} link set {port} master bridge up")
        _run(f"ip -n {host} address add {address}/24 dev {INTERFACE}")
        _run(f"ip -n {host} link set lo up")
        _run(f"ip -n {host} link set {INTERFACE} up")
        _run(f"ip -n {host} route change 10.0.0.0/24 dev {INTERFACE} src {address} congctl {CONGESTION}")
        limit = f"tbf rate {self._mbit_per_s}mbit burst {BURST_BYTES}b limit {QUEUE_BYTES}b"
        for namespace, interface in ((host, INTERFACE), (switch, port)):
            _run(f"tc -n {namespace} qdisc add dev {interface} root {limit}")

    def _remove(self) -> None:
        for path in NAMESPACES.glob(f"{self._prefix}*"):
            _run(f"ip netns delete {path.name}")


def _enter(namespace: Path) -> None:
    """Move this thread, and the threads that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open("rb") as file:
        if libc.setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def require(num_bytes: int) -> None:
    """Raise a `ConfigError` of one line if there can be no such network here, or not so much shared memory."""
    if os.geteuid() != 0:
        raise ConfigError("many hosts: network namespaces need root; run this as root")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise ConfigError(f"many hosts: there is no `{command}` here; install iproute2")
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < num_bytes:
        raise ConfigError(
            f"many hosts: {SHARED_MEMORY} has {free} bytes free and {num_bytes} are needed; make room"
        )
    try:
        with Network(1, mbit_per_s=1):
            pass
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())
        raise ConfigError(f"many hosts: `{' '.join(error.cmd)}` fails here ({said}); run where it may") from None


def remove_leftovers() -> None:
    """Delete namespaces and folders of benchmarks that have ended."""
    for path in (*NAMESPACES.glob(f"{PREFIX}*"), *SHARED_MEMORY.glob(f"{PREFIX}*")):
        owner = re.fullmatch(rf"{PREFIX}(\d+)(-\w+)?", path.name)
        if owner is None or (owner[1] != str(os.getpid()) and Path("/proc", owner[1]).exists()):
            continue
        if path.parent == NAMESPACES:
            _run(f"ip netns delete {path.name}")
        else:
            shutil.rmtree(path)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of this process in shared memory; use it within a `Network`, which removes leftovers there."""
    folder = SHARED_MEMORY / f"{PREFIX}{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _run(command: str) -> None:
    """Run a command of words without spaces; raises `CalledProcessError`."""
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
