"""`laminar relay`: run nodes of the relay tree by hand, without a run, with one file of keys for all hosts."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError
from laminar_py.config.cluster import Seal

if TYPE_CHECKING:
    from laminar_py.relay import RelayEvent, RelayKeys, RelayNode

app = typer.Typer(help="Run nodes of the relay tree, which carries weights, by hand.", no_args_is_help=True)


@app.command("keys", epilog="Example: laminar relay keys relay.keys")
def relay_keys(
    path: Annotated[Path, typer.Argument(help="New file, to be copied to all hosts of the tree")],
) -> None:
    """Make the keys of a tree; every node that has the file may join."""
    write_keys(path)


@app.command("plan", epilog="Example: laminar relay plan 72B --gpus 128x8xH100 --network-gbit 400")
def relay_plan(
    model: Annotated[str, typer.Argument(help="Size such as 7B, name, or folder of a model")],
    gpus: Annotated[str, typer.Option(help="Fleet: nodes x GPUs of each x kind; half of the nodes generate")],
    network_gbit: Annotated[float, typer.Option(min=0.1, help="Gbit/s from a node to others")] = 400.0,
    fanout: Annotated[int, typer.Option(min=1, help="Children of a relay, as relay.fanout")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object")] = False,
) -> None:
    """Show how long a version takes to the last host, by formula from measured rates."""
    from laminar_lab.commands.plan import GBIT
    from laminar_lab.plan.inputs import read_fleet
    from laminar_lab.plan.known_models import model_named
    from laminar_lab.relay_plan import describe, ways
    from laminar_lab.step_time import version_bytes

    fleet, (name, shape) = read_fleet(gpus, network_bytes_per_s=network_gbit * GBIT), model_named(model)
    if fleet.nodes == 1:
        raise ConfigError(f"gpus={gpus}: replicas beside the learner map its files; name a fleet of several nodes")
    hosts = 1 + fleet.nodes // 2  # the learner's host is the root
    found = ways(
        version_bytes(shape.total), hosts=hosts, fanout=fanout, network_bytes_per_s=fleet.network_bytes_per_s
    )
    if as_json:
        print_line(msgspec.json.encode(found).decode())
    else:
        console.print(describe(found, name=name, num_bytes=version_bytes(shape.total), hosts=hosts))


@app.command("serve", epilog="Example: laminar relay serve b --keys relay.keys --parent tcp://10.0.0.4:7000")
def relay_serve(
    name: Annotated[str, typer.Argument(help="Name of the node in the tree")],
    keys: Annotated[Path, typer.Option(help="File of `laminar relay keys`")],
    parent: Annotated[
        list[str] | None,
        typer.Option(help="Address of an ancestor: nearest first, root last. Default: this node is the root"),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Address of any other node: a late node takes chunks of its first version from it too"),
    ] = None,
    store: Annotated[Path, typer.Option(help="Folder in shared memory for its versions")] = Path(
        "/dev/shm/laminar-relay"
    ),
    host: Annotated[str, typer.Option(help="Interface, or an ipc:// address")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one")] = 0,
    keep_versions: Annotated[int, typer.Option(min=1, help="Number of newest versions to keep")] = 2,
    chunk_bytes: Annotated[
        int, typer.Option(min=4096, help="Largest chunk that a publisher may cut a version into")
    ] = 16 * 2**20,
    seal: Annotated[Seal, typer.Option(help="Protection of chunks; none: for private addresses only")] = Seal.AEAD,
    lanes: Annotated[
        int | None, typer.Option(min=1, max=16, help="Lanes from the parent. Default: half the cores, at most 4")
    ] = None,
) -> None:
    """Run one node of a tree, until Ctrl-C."""
    from laminar_py.relay import RelayNode

    node = RelayNode(
        name,
        store=store,
        keys=read_keys(keys),
        parents=check_endpoints("parent", parent or []),
        sources=check_endpoints("source", source or []),
        host=host,
        port=port,
        keep_versions=keep_versions,
        chunk_bytes=chunk_bytes,
        seal=seal,
        lanes=lanes,
        emit=lambda event: print_line(event_line(event)),
    )
    asyncio.run(run_node(node))


def write_keys(path: Path) -> None:
    """Write a new keypair to a file that only its owner can read. Raises `ConfigError` if the file exists."""
    from laminar_py.relay import generate_keys

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"keys={path}: cannot be made ({error.strerror}); name a new file") from None
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(generate_keys()))


def read_keys(path: Path) -> "RelayKeys":
    """Read the keypair of a tree. Raises `ConfigError` if the file holds none."""
    from laminar_py.relay import RelayKeys

    try:
        return msgspec.json.decode(path.read_bytes(), type=RelayKeys)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"keys={path}: cannot be read as keys ({error}); make a file with `laminar relay keys`"
        ) from None


def check_endpoints(option: str, endpoints: list[str]) -> list[str]:
    """Return the endpoints. Raises `ConfigError` that names the option where one is no address."""
    for endpoint in endpoints:
        if re.fullmatch(r"tcp://.+:\d{1,5}|ipc://.+", endpoint) is None:
            raise ConfigError(
                f"{option}={endpoint}: is no address of a node; give it as `serve` prints it, e.g. tcp://10.0.0.4:7000"
            )
    return endpoints


async def run_node(node: "RelayNode") -> None:
    """Print a node's address and run it until Ctrl-C. Raises `ConfigError` if it cannot listen there."""
    from laminar_py.relay import allow_many_files

    allow_many_files()
    await node.start()
    print_line(f"{node.name} at {node.endpoint}")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: loop.create_task(node.close()))
    await node.run()


def event_line(event: "RelayEvent") -> str:
    """One line of text about an event of a node."""
    from laminar_py.relay import ParentLost, VersionComplete, VersionFailed, VersionPulled

    match event:
        case VersionComplete(version=version, num_bytes=size, wire_bytes=wire, elapsed_s=elapsed_s):
            others = f" ({event.other_bytes:,} from other nodes than the parent)" if event.other_bytes else ""
            return f"version {version} complete: {size:,} bytes, {wire:,} over the wire{others}, {elapsed_s:.3f} s"
        case VersionPulled(subscriber=subscriber, version=version, waited_s=waited_s):
            return f"version {version} pulled by {subscriber}, which waited {waited_s:.3f} s"
        case VersionFailed(version=version, reason=reason):
            return f"version {version} given up: {reason}"
        case ParentLost(old=old, new=new):
            return f"left the parent {old}, connects to {new}"
