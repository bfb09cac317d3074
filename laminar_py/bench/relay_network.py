"""Hosts with narrow links on one machine: network namespaces joined by a bridge, limited in both directions.

Used by the many-hosts benchmark of the relay. Needs root and iproute2. Invariant: the machine's own interfaces are
never touched, and whatever a benchmark leaves when it is killed goes when the next one starts: every name holds
the process id of its owner.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from laminar_py.config.section import ConfigError

PREFIX = "laminar-hosts-"
NAMESPACES = Path("/run/netns")
SHARED_MEMORY = Path("/dev/shm")
INTERFACE = "eth0"  # of every host
BURST_BYTES = (
    128 * 2**10
)  # two of the largest segments: less would drop them, more would let a version start early
QUEUE_BYTES = 2**20  # 20 ms at 400 Mbit/s: room for the windows of several connections, as a switch port has
CONGESTION = "cubic"  # the kernel's default, named so that figures do not depend on how a machine is set


class Network:
    """Namespaces `hosts`, each with `INTERFACE` at `address(i)`; a context that takes them away again."""

    def __init__(self, num_hosts: int, *, mbit_per_s: int) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._mbit_per_s = mbit_per_s
        self.hosts = [NAMESPACES / f"{self._prefix}{number}" for number in range(num_hosts)]

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.0.0.{host + 1}"

    def __enter__(self) -> Self:
        remove_leftovers()
        switch = f"{self._prefix}switch"
        try:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for number, path in enumerate(self.hosts):
                self._join(path.name, switch, number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def _join(self, host: str, switch: str, number: int) -> None:
        """A host and its cable: what it sends is limited at its own end, what it gets at the bridge's."""
        port = f"port{number}"
        _run("ip", "netns", "add", host)
        peer = ("type", "veth", "peer", "name", INTERFACE, "netns", host)
        _run("ip", "-n", switch, "link", "add", port, *peer)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", INTERFACE)
        _run("ip", "-n", host, "link", "set", "lo", "up")
        _run("ip", "-n", host, "link", "set", INTERFACE, "up")
        route = ("10.0.0.0/24", "dev", INTERFACE, "src", self.address(number), "congctl", CONGESTION)
        _run("ip", "-n", host, "route", "change", *route)
        for namespace, interface in ((host, INTERFACE), (switch, port)):
            self._limit(namespace, interface)

    def _limit(self, namespace: str, interface: str) -> None:
        rate = ("rate", f"{self._mbit_per_s}mbit", "burst", f"{BURST_BYTES}b", "limit", f"{QUEUE_BYTES}b")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *rate)

    def _remove(self) -> None:
        for path in NAMESPACES.glob(f"{self._prefix}*"):
            _run("ip", "netns", "delete", path.name)


def require(num_bytes: int) -> None:
    """Raises `ConfigError` of one line if there can be no such network here, or not so much shared memory."""
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
    """Namespaces and folders of benchmarks that are no more."""
    for path in (*NAMESPACES.glob(f"{PREFIX}*"), *SHARED_MEMORY.glob(f"{PREFIX}*")):
        owner = re.fullmatch(rf"{PREFIX}(\d+)(-\w+)?", path.name)
        if owner is None or (owner[1] != str(os.getpid()) and Path("/proc", owner[1]).exists()):
            continue
        if path.parent == NAMESPACES:
            _run("ip", "netns", "delete", path.name)
        else:
            shutil.rmtree(path)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of this process in shared memory; call it within a `Network`, which removes what was left there."""
    folder = SHARED_MEMORY / f"{PREFIX}{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _run(*command: str) -> None:
    """Raises `CalledProcessError`."""
    subprocess.run(command, check=True, capture_output=True, text=True)
