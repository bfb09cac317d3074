"""`laminar relay`: run nodes of the relay tree by hand, without a run."""

from pathlib import Path
from typing import Annotated

import typer

from laminar_py.cli.main import print_line

relay = typer.Typer(help="Run nodes of the relay tree, which carries weights, by hand.", no_args_is_help=True)


@relay.command("keys", epilog="Example: laminar relay keys relay.keys")
def relay_keys(
    path: Annotated[Path, typer.Argument(help="New file, to be copied to all hosts of the tree")],
) -> None:
    """Make the keys of a tree; every node that has the file may join."""
    from laminar_py.relay.serve import write_keys

    write_keys(path)


@relay.command("serve", epilog="Example: laminar relay serve b --keys relay.keys --parent tcp://10.0.0.4:7000")
def relay_serve(
    name: Annotated[str, typer.Argument(help="Name of the node in the tree")],
    keys: Annotated[Path, typer.Option(help="File of `laminar relay keys`")],
    parent: Annotated[
        list[str] | None,
        typer.Option(help="Address of an ancestor: nearest first, root last. Default: this node is the root"),
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
) -> None:
    """Run one node of a tree, until Ctrl-C."""
    from laminar_py.relay.node import RelayNode
    from laminar_py.relay.serve import event_line, read_keys, run_node

    node = RelayNode(
        name,
        store=store,
        keys=read_keys(keys),
        parents=parent or [],
        host=host,
        port=port,
        keep_versions=keep_versions,
        chunk_bytes=chunk_bytes,
        emit=lambda event: print_line(event_line(event)),
    )
    run_node(node, print_line=print_line)
