"""`laminar` for which all below a folder lies on NFS: `python -m tests.runs.over_network FOLDER train ...`."""

import sys
from pathlib import Path

from laminar_py.cli import main
from laminar_py.ledger import live


def pretend(network: Path) -> None:
    """Stand for the kernel's list of mounts."""
    live.network_kind = lambda folder: "nfs4" if folder.resolve().is_relative_to(network) else None


if __name__ == "__main__":
    pretend(Path(sys.argv.pop(1)).resolve())
    main()
