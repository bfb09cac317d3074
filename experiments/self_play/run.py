"""Runs of self_play: `python experiments/self_play/run.py [--json] [--seeds N]`, minutes a seed.

Each run learns by games against itself. Then its model plays 800 games against the model before RL, half of them
on each side. A second start measures only the missing seeds.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from game import PILES
from play import Player, wins

from laminar_lab.bench.report import Row
from laminar_lab.bench.runs import LAMINAR, call, measure_seeds, train

HERE = Path(__file__).parent
CONFIG = HERE / "self_play.yaml"
GAMES = 50  # of each pile, on each side
LIMIT_S = 1200.0  # of a run that should take 400


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """A run: the share of games that its model wins against the model before RL."""

    folder: str
    wall_s: float
    as_first: float
    as_second: float

    @property
    def wins(self) -> float:
        """Share of all games."""
        return (self.as_first + self.as_second) / 2


def learn(seed: int) -> Learned:
    """Make one run with its warm start, and play the games after it."""
    began = time.monotonic()
    done = train(CONFIG, ["name=self_play", f"seed={seed}"], limit_s=LIMIT_S)
    wall_s = time.monotonic() - began
    checkpoints = {int(path.name.split("-")[1]): path for path in (done.folder / "checkpoints").iterdir()}
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    piles = [pile for pile in PILES for _ in range(GAMES)]
    with tempfile.TemporaryDirectory() as out:
        untrained = player(checkpoints[0], Path(out) / "untrained")
        trained = player(checkpoints[max(checkpoints)], Path(out) / "trained")
    as_first, as_second = wins(trained, untrained, piles), wins(untrained, trained, piles)
    return Learned(
        folder=str(done.folder), wall_s=wall_s, as_first=fmean(as_first), as_second=1 - fmean(as_second)
    )


def player(checkpoint: Path, out: Path) -> Player:
    """Export a checkpoint and load its model."""
    call([*LAMINAR, "export", str(checkpoint), str(out)])
    return Player(out)


def rows(runs: Sequence[Learned]) -> list[Row]:
    """Make the rows of the worst of the seeds, and of the time of all."""
    setting = f"self_play, {len(runs)} seeds, {2 * GAMES * len(PILES)} games each; " + ", ".join(
        f"{one.as_first:.3f} as first, {one.as_second:.3f} as second in {one.wall_s:.0f} s" for one in runs
    )
    return [
        Row("self_play_wins", min(one.wins for one in runs), "of games against the untrained", setting),
        Row("self_play_minutes", sum(one.wall_s for one in runs) / 60, "min", "all seeds, one after another"),
    ]


if __name__ == "__main__":
    measure_seeds(__doc__, HERE, learn=learn, kind=Learned, rows=rows)
