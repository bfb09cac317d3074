"""`laminar relay serve` and `laminar relay keys`: run relay nodes by hand, with one file of keys for all hosts.

The command line calls it. Bad input raises a `ConfigError` of one line that names the option.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.relay.mapped_file import allow_many_files
from laminar_py.relay.messages import ParentLost, RelayEvent, VersionComplete, VersionFailed, VersionPulled
from laminar_py.relay.node import RelayNode
from laminar_py.relay.sockets import RelayKeys


def write_keys(path: Path) -> None:
    """Write a new keypair to a file that only its owner can read. Raises `ConfigError` if the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"keys={path}: cannot be made ({error.strerror}); name a new file") from None
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(RelayKeys.generate()))


def read_keys(path: Path) -> RelayKeys:
    """Read the keypair of a tree. Raises `ConfigError` if the file holds none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RelayKeys)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"keys={path}: cannot be read as keys ({error}); make a file with `laminar relay keys`"
        ) from None


def run_node(node: RelayNode, *, print_line: Callable[[str], None]) -> None:
    """Run a node until Ctrl-C; `print_line` gets its address. Raises `ConfigError` if it cannot listen there."""

    async def run() -> None:
        await node.start()
        print_line(f"{node.name} at {node.endpoint}")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: loop.create_task(node.close()))
        await node.run()

    allow_many_files()
    asyncio.run(run())


def event_line(event: RelayEvent) -> str:
    """One line of text about an event of a node."""
    match event:
        case VersionComplete(version=version, num_bytes=size, wire_bytes=wire, elapsed_s=elapsed_s):
            return f"version {version} complete: {size:,} bytes, {wire:,} over the wire, {elapsed_s:.3f} s"
        case VersionPulled(subscriber=subscriber, version=version, waited_s=waited_s):
            return f"version {version} pulled by {subscriber}, which waited {waited_s:.3f} s"
        case VersionFailed(version=version, reason=reason):
            return f"version {version} given up: {reason}"
        case ParentLost(old=old, new=new):
            return f"left the parent {old}, connects to {new}"
