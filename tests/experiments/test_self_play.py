"""Both sides of self_play have rewards and advantages of their own, and who has won is counted right."""

import importlib
import sqlite3
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from laminar_lab.audit.verify import verify
from laminar_py.ledger.rows import decode_event
from tests.runs.runs import TrainProcess

FOLDER = Path(__file__).parents[2] / "experiments/self_play"


@pytest.fixture
def play(monkeypatch):
    """The module of the games, which finds its neighbours in its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("play")
    for name in ("play", "game"):
        del sys.modules[name]


class Scripted:
    """A player with a move for each pile."""

    def __init__(self, move):
        self.move = move

    def moves(self, piles):
        return [str(self.move(pile)) for pile in piles]


def test_who_takes_the_last_or_sees_no_move_of_the_other_has_won(play):
    perfect, greedy, mad = (
        Scripted(move) for move in (lambda pile: pile % 4 or 1, lambda pile: min(3, pile), str)
    )
    assert play.wins(perfect, greedy, [5, 6, 7, 9]) == [True] * 4
    assert play.wins(greedy, perfect, [9, 12]) == [False] * 2, "what is left of 9 is 6, of 12 is 9"
    assert play.wins(mad, perfect, [5, 2]) == [False, True], "5 are too many"
    assert play.wins(greedy, mad, [8, 9]) == [True] * 2


@pytest.mark.slow
def test_each_role_has_its_own_reward_and_is_compared_with_its_like(tmp_path):
    given = "steps=2", "warm_start.steps=100", f"warm_start.cache={tmp_path / 'warm'}"
    with TrainProcess(tmp_path, *given, config=FOLDER / "self_play.yaml", small=()) as train:
        train.end_with(0)
    assert not verify(train.run)
    with closing(sqlite3.connect(train.run / "ledger.sqlite")) as ledger:
        bodies = ledger.execute("SELECT CAST(body AS BLOB) FROM event WHERE kind = 'ready'").fetchall()
    groups = defaultdict(list)
    for event in (decode_event(body) for (body,) in bodies):
        if event.trajectory_id.startswith("e"):
            continue  # the run's look at the end, which trains nobody
        first, second = sorted(event.roles, key=lambda credit: credit.role)
        assert first.turns == tuple(range(1, 2 * len(first.turns), 2))
        assert second.turns == tuple(range(2, 2 * len(second.turns) + 1, 2))
        assert {first.reward, second.reward} == {0.0, 1.0}
        log = (train.run / "environments/agents" / event.trajectory_id / "agent.log").read_text()
        assert log.count("first:") == len(first.turns)
        groups[event.trajectory_id.split(".")[0]].append((first, second))
    assert groups
    for episodes in groups.values():
        for side in range(2):
            played = [roles[side] for roles in episodes if roles[side].turns]
            assert len(played) > 1, "hardly any first move ends a game"
            rewards = np.array([credit.reward for credit in played])
            expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            assert [credit.advantage for credit in played] == pytest.approx(expected.tolist(), abs=1e-5)
            assert not any(roles[side].advantage for roles in episodes if not roles[side].turns)
