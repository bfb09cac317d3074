"""A relay node by hand: `laminar relay serve` on each host, with one file of keys for all.

Called by the command line. Bad input is a `ConfigError` of one line that names the option.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.relay.node.relay_node import RelayNode
from laminar_py.relay.store.pages import allow_many_files
from laminar_py.relay.wire.messages import ParentLost, RelayEvent, VersionComplete, VersionFailed, VersionPulled
from laminar_py.relay.wire.transport import RelayKeys


def write_keys(path: Path) -> None:
    """A new keypair in a file that only its owner reads. Raises `ConfigError` if the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"keys={path}: cannot be made ({error.strerror}); name a new file") from None
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(RelayKeys.generate()))


def read_keys(path: Path) -> RelayKeys:
    """The keypair of a tree. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RelayKeys)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys={path}: no keys in it ({error}); `laminar relay keys` makes them") from None


def serve(
    name: str,
    *,
    store: Path,
    keys: RelayKeys,
    parents: Sequence[str],
    host: str,
    port: int,
    keep_versions: int,
    chunk_bytes: int,
    max_bytes_per_s: float | None,
    tell: Callable[[str], None],
) -> None:
    """Relay until Ctrl-C; `tell` gets a line for whatever happens. Raises `ConfigError`."""

    async def run() -> None:
        node = RelayNode(
            name,
            store=store,
            keys=keys,
            parents=parents,
            host=host,
            port=port,
            keep_versions=keep_versions,
            chunk_bytes=chunk_bytes,
            max_bytes_per_s=max_bytes_per_s,
            emit=lambda event: tell(words(event)),
        )
        await node.start()
        tell(f"{name} at {node.endpoint}, versions in {store}")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: loop.create_task(node.close()))
        await node.run()

    allow_many_files()
    asyncio.run(run())


def words(event: RelayEvent) -> str:
    """Line of text about a report of a node."""
    match event:
        case VersionComplete(version=version, num_bytes=size, wire_bytes=wire, elapsed_s=elapsed_s):
            return f"version {version} complete: {size:,} bytes, {wire:,} over the wire, {elapsed_s:.3f} s"
        case VersionPulled(subscriber=subscriber, version=version, waited_s=waited_s):
            return f"version {version} pulled by {subscriber}, which waited {waited_s:.3f} s"
        case VersionFailed(version=version, reason=reason):
            return f"version {version} given up: {reason}"
        case ParentLost(old=old, new=new):
            return f"left {old}, turns to {new}"
