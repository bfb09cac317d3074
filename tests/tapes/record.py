"""Tapes on disk, and `python -m tests.tapes.record`, which writes them anew; seeds may be named."""

import gzip
import sys
import tempfile
from pathlib import Path

from tests.tapes.fleet import play
from tests.tapes.plans import PLANS

FOLDER = Path(__file__).parent / "tapes"


def tape_path(seed: int, folder: Path = FOLDER) -> Path:
    """Path of the tape of a fleet."""
    return folder / f"fleet-{seed:02}.jsonl.gz"


def record(seed: int) -> list[str]:
    """Play a fleet anew."""
    with tempfile.TemporaryDirectory() as run:
        return play(PLANS[seed], Path(run))


def read(seed: int) -> list[str]:
    """Lines of a tape."""
    return gzip.decompress(tape_path(seed).read_bytes()).decode().splitlines()


def main(arguments: list[str]) -> None:
    """Write tapes to `--to FOLDER`, else to their place."""
    folder = FOLDER
    if arguments[:1] == ["--to"]:
        folder, arguments = Path(arguments[1]), arguments[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for seed in map(int, arguments) if arguments else range(len(PLANS)):
        text = "".join(f"{line}\n" for line in record(seed))
        path = tape_path(seed, folder)
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        sys.stdout.write(f"{path.name}: {text.count(chr(10))} lines, {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
