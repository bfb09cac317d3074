"""A version through eight hosts on slow links, by sealed lanes, beside the links' own bound.

Each host is a network namespace of this machine, with `tc tbf` both ways. The bound is the version's bytes over
the rate of a bare socket between two of them, measured in the same run. Needs root, iproute2 and 8 GB of shared
memory.

    python experiments/relay_hosts/run.py --rounds 3

With `--join`, hosts with a version send at most `--rate-mbit` each, and a late host takes the version from one of
them, or from three.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import torch

from laminar_py.relay import Publisher, Topology, choose_chunk_bytes, folder_name, grow_tree

HOSTS, RATE_MBIT = 8, 400
JOIN_RATE_MBIT = 200
VERSION_BYTES = 256 * 2**20
PORT, PATIENCE_S, OVERHEAD_S = 7000, 240.0, 2e-4
SHM = Path("/dev/shm")
LAMINAR = Path(sys.executable).with_name("laminar")

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7001))
print("ready", flush=True)
peer, _ = server.accept()
left, began = int(sys.argv[2]), None
while left:
    data = peer.recv(min(left, 1 << 20))
    began = began or time.monotonic()
    left -= len(data)
print(time.monotonic() - began, flush=True)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7001))
data, left = bytes(1 << 20), int(sys.argv[2])
while left:
    left -= peer.send(data[: min(left, 1 << 20)])
"""


def name_of(host: int) -> str:
    return f"laminar-{os.getpid()}-{host}"


def ip_of(host: int) -> str:
    return f"10.214.8.{host + 1}"


def inside(host: int, *words: str) -> list[str]:
    return ["ip", "netns", "exec", name_of(host), *words]


@contextmanager
def hosts(count: int, rate_mbit: int, *, downwards: bool = True) -> Iterator[None]:
    """Namespaces on one bridge, which has a namespace of its own; each link is shaped, upwards and `downwards`."""
    bridge = name_of(99)
    shape = f"tbf rate {rate_mbit}mbit burst 256kb latency 50ms"
    lines = [f"ip netns add {bridge}", f"ip -n {bridge} link add bridge type bridge"]
    lines.append(f"ip -n {bridge} link set bridge up")
    for host in range(count):
        name, port = name_of(host), f"p{host}"
        lines += [
            f"ip netns add {name}",
            f"ip link add eth0 netns {name} type veth peer name {port} netns {bridge}",
            f"ip -n {name} addr add {ip_of(host)}/24 dev eth0",
            f"ip -n {name} link set lo up",
            f"ip -n {bridge} link set {port} master bridge",
        ]
        lines += [f"ip -n {name} link set eth0 up", f"ip -n {bridge} link set {port} up"]
        lines.append(f"tc -n {name} qdisc add dev eth0 root {shape}")
        if downwards:
            lines.append(f"tc -n {bridge} qdisc add dev {port} root {shape}")
    try:
        for line in lines:
            subprocess.run(line.split(), check=True, capture_output=True)
        yield
    finally:
        for name in (*map(name_of, range(count)), bridge):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def bare_bytes_per_s() -> float:
    """Rate of a bare socket from one host to another."""
    size = str(VERSION_BYTES // 4)
    receiver = subprocess.Popen(
        inside(1, sys.executable, "-c", RECEIVE, ip_of(1), size), stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    receiver.stdout.readline()
    subprocess.run(inside(0, sys.executable, "-c", SEND, ip_of(1), size), check=True, timeout=PATIENCE_S)
    seconds = float(receiver.stdout.readline())
    receiver.wait(timeout=PATIENCE_S)
    return int(size) / seconds


@contextmanager
def nodes(folder: Path, tree: Topology, seal: str) -> Iterator[list[Path]]:
    """A relay node on each host, as `laminar relay serve`; yields their stores."""
    keys = folder / "relay.keys"
    subprocess.run([LAMINAR, "relay", "keys", keys], check=True, capture_output=True)
    stores = [folder / f"host-{host}" for host in range(tree.num_nodes)]
    with ExitStack() as stack:
        for host, store in enumerate(stores):
            parents = [word for one in tree.ancestors(host) for word in ("--parent", f"tcp://{ip_of(one)}:{PORT}")]
            words = ["--keys", str(keys), "--store", str(store), "--host", ip_of(host), "--port", str(PORT)]
            process = subprocess.Popen(
                inside(host, str(LAMINAR), "relay", "serve", f"host-{host}", *words, "--seal", seal, *parents),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(end, process)
        yield stores


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=30)


def wait_for(stores: Sequence[Path], version: int) -> float:
    """Wait until every host has the version; returns the moment."""
    deadline = time.monotonic() + PATIENCE_S
    while not all((store / folder_name(version)).is_dir() for store in stores):
        assert time.monotonic() < deadline, f"version {version} did not arrive everywhere in {PATIENCE_S:g} s"
        time.sleep(0.005)
    return time.monotonic()


def measure(folder: Path, tree: Topology, *, seal: str, chunk_bytes: int, rounds: int) -> list[float]:
    """Seconds from complete at the root until verified at the last host; the first version warms up."""
    weights = torch.randint(0, 256, (VERSION_BYTES + 4096,), dtype=torch.uint8)
    found = []
    with nodes(folder, tree, seal) as stores:
        publisher = Publisher(stores[0], chunk_bytes=chunk_bytes)
        for version in range(1 + rounds):  # sizes that differ, so that no delta travels
            publisher.publish(version, [("weights", weights[: VERSION_BYTES + 4096 * (version % 2)])])
            publisher.completed(version)
            began = time.monotonic()
            found.append(wait_for(stores, version) - began)
        publisher.close()
    return found[1:]


def join(folder: Path, host: int, parents: Sequence[int], sources: Sequence[int]) -> subprocess.Popen[str]:
    """Start a late node, which prints a line once it has the version."""
    above = [word for one in parents for word in ("--parent", f"tcp://{ip_of(one)}:{PORT}")]
    beside = [word for one in sources for word in ("--source", f"tcp://{ip_of(one)}:{PORT}")]
    store = folder / f"late-{host}"
    shutil.rmtree(store, ignore_errors=True)  # of an earlier round
    words = ["--keys", str(folder / "relay.keys"), "--store", str(store)]
    return subprocess.Popen(
        inside(
            host, str(LAMINAR), "relay", "serve", f"host-{host}", *words, "--host", ip_of(host), *above, *beside
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def joined_s(folder: Path, late: Sequence[int], sources: Sequence[int]) -> float:
    """Let these hosts join at once, all below host 1; returns the seconds of the slowest."""
    processes = [join(folder, host, [1], sources) for host in late]
    try:
        lines = [next(line for line in process.stdout or () if "complete" in line) for process in processes]
        print(*lines, sep="", end="", flush=True)
        return max(float(re.findall(r"([\d.]+) s$", line)[0]) for line in lines)
    finally:
        for process in processes:
            end(process)


def measure_joins(folder: Path, rounds: int) -> None:
    """Print how much sooner late hosts have a version from hosts 1, 2 and 3 than from host 1 alone."""
    with nodes(folder, grow_tree(4, fanout=1), "aead") as stores:
        publisher = Publisher(stores[0], chunk_bytes=4 * 2**20)
        publisher.publish(0, [("weights", torch.randint(0, 256, (VERSION_BYTES,), dtype=torch.uint8))])
        publisher.completed(0)
        wait_for(stores, 0)
        for late in ([4], [4, 5]):
            pairs = [[joined_s(folder, late, sources) for sources in ((), (2, 3))] for _ in range(rounds)]
            ratio = median(alone / several for alone, several in pairs)
            print(json.dumps({"late_hosts": len(late), "seconds": pairs, "one_over_three": ratio}), flush=True)
        publisher.close()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seals", nargs="+", default=["aead", "curve"])
    options.add_argument("--join", action="store_true", help="late hosts in place of versions that travel")
    options.add_argument("--rate-mbit", type=int, default=JOIN_RATE_MBIT, help="with --join: what a host may send")
    chosen = options.parse_args()
    if chosen.join:
        with (
            hosts(6, chosen.rate_mbit, downwards=False),
            tempfile.TemporaryDirectory(prefix="laminar-hosts-", dir=SHM) as place,
        ):
            measure_joins(Path(place), chosen.rounds)
        return
    with hosts(HOSTS, RATE_MBIT):
        bare = median(bare_bytes_per_s() for _ in range(3))
        bound_s = VERSION_BYTES / bare
        print(json.dumps({"bare_MBps": bare / 1e6, "bound_s": bound_s}), flush=True)
        tree = grow_tree(HOSTS, fanout=1)  # what `relay.fanout` is by default
        link = RATE_MBIT * 1e6 / 8
        chunk_bytes = choose_chunk_bytes(tree, VERSION_BYTES, bytes_per_s=link, overhead_s=OVERHEAD_S)
        for seal in chosen.seals:
            with tempfile.TemporaryDirectory(prefix="laminar-hosts-", dir=SHM) as place:
                times = measure(Path(place), tree, seal=seal, chunk_bytes=chunk_bytes, rounds=chosen.rounds)
            row = {"seal": seal, "seconds": times, "auto_over_bound": median(times) / bound_s}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
