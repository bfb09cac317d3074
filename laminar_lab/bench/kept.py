"""Results that an experiment keeps on disk, so that a second start measures only what is missing.

Used by experiments that take longer than a machine may stay idle. Invariant: a result is taken up again only on
the same machine, with the same settings, and by the same source of this package and of the experiment.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_lab.bench.catalog import tell
from laminar_lab.bench.report import machine
from laminar_lab.bench.runs import FinishedRun, read_run

PACKAGE = Path(__file__).parents[1]
KEY_BYTES = 8

Result = TypeVar("Result")


class KeptResults:
    """Results of an experiment by name, e.g. `KeptResults(out, sources=[HERE], settings="120 steps")`.

    `sources` are files, and folders whose Python files count.
    """

    def __init__(self, out: Path, *, sources: Sequence[Path], settings: str) -> None:
        self._folder = out / _key([PACKAGE, *sources], f"{machine()}\n{settings}")

    def run(self, name: str, begin: Callable[[], FinishedRun]) -> FinishedRun:
        """Training run of that name; its folder is what is kept, and read anew, unless it was deleted."""
        path = self._folder / f"{name}.json"
        if path.exists() and not Path(msgspec.json.decode(path.read_bytes(), type=str)).is_dir():
            path.unlink()
        return read_run(Path(self.get(name, str, lambda: str(begin().folder.absolute()))))

    def get(self, name: str, kind: type[Result], measure: Callable[[], Result]) -> Result:
        """Result of that name, measured if there is none; what `measure` raises leaves none."""
        path = self._folder / f"{name}.json"
        if path.exists():
            tell(f"{name} was measured before: {path}")
            return msgspec.json.decode(path.read_bytes(), type=kind)
        found = measure()
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".new")
        part.write_bytes(msgspec.json.encode(found))
        part.rename(path)
        return found


def _key(sources: Sequence[Path], settings: str) -> str:
    digest = blake2b(settings.encode(), digest_size=KEY_BYTES)
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
