"""Runs of self_play: `python experiments/self_play/run.py [--json] [--seeds N]`, minutes a seed.

Each run learns by games against itself; then its model plays 800 games against the model that it was before RL,
half of them on each side. Started again, it goes on with the seeds that are missing.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from game import PILES
from play import Player, wins

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import LAMINAR, KeptResults, call, train

HERE = Path(__file__).parent
CONFIG = HERE / "self_play.yaml"
KEPT = Path(".cache/self_play")
SEEDS = 3
GAMES = 50  # of each pile, on each side
LIMIT_S = 1200.0  # of a run that should take 400


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """A run: the share of games that its model wins of what it was before RL."""

    folder: str
    wall_s: float
    as_first: float
    as_second: float

    @property
    def wins(self) -> float:
        """Of all games."""
        return (self.as_first + self.as_second) / 2


def learn(seed: int) -> Learned:
    """One run with its warm start, and the games after it."""
    began = time.monotonic()
    done = train(CONFIG, ["name=self_play", f"seed={seed}"], limit_s=LIMIT_S)
    wall_s = time.monotonic() - began
    checkpoints = {int(path.name.split("-")[1]): path for path in (done.folder / "checkpoints").iterdir()}
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    piles = [pile for pile in PILES for _ in range(GAMES)]
    with tempfile.TemporaryDirectory() as out:
        untrained, trained = (
            player(path, Path(out) / path.name) for path in (checkpoints[0], checkpoints[max(checkpoints)])
        )
    as_first, as_second = wins(trained, untrained, piles), wins(untrained, trained, piles)
    return Learned(
        folder=str(done.folder), wall_s=wall_s, as_first=fmean(as_first), as_second=1 - fmean(as_second)
    )


def player(checkpoint: Path, out: Path) -> Player:
    """The model of a checkpoint."""
    call([*LAMINAR, "export", str(checkpoint), str(out)])
    return Player(out)


def rows(runs: Sequence[Learned]) -> list[Row]:
    """The worst of the seeds, and the time of all."""
    setting = f"self_play, {len(runs)} seeds, {2 * GAMES * len(PILES)} games each; " + ", ".join(
        f"{one.as_first:.3f} as first, {one.as_second:.3f} as second in {one.wall_s:.0f} s" for one in runs
    )
    return [
        Row("self_play_wins", min(one.wins for one in runs), "of games against the untrained", setting),
        Row("self_play_minutes", sum(one.wall_s for one in runs) / 60, "min", "all seeds, one after another"),
    ]


def main() -> None:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs, with seeds 0, 1, ...")
    args = parser.parse_args()
    kept = KeptResults(KEPT, sources=[HERE, CONFIG], settings="games against the untrained")
    runs = [kept.get(f"seed-{seed}", Learned, partial(learn, seed)) for seed in range(args.seeds)]
    show("self_play", rows(runs), as_json=args.json)


if __name__ == "__main__":
    main()
