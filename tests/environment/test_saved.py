"""Files of environments: what a death leaves is what goes on."""

import pytest

from laminar_py.environment.host import KEPT_BYTES, SavedTurn, SavedTurns, TurnsOnFile
from laminar_py.records.environment import EnvironmentTurn

TOLD, OTHER = b"a" * 16, b"b" * 16
SAVED = SavedTurn(response_digest=OTHER, answer=EnvironmentTurn(ends=True, reward=0.5), state=b"state")


def written(folder):
    turns = SavedTurns(folder)
    turns.attempt("g0.0", OTHER)
    turns.save("g0.0", SAVED)
    turns.attempt("g0.0", TOLD)
    turns.attempt("g0.0", TOLD)
    return turns, folder / "g0.0.environment"


def test_attempts_count_since_the_last_turn_that_was_answered(tmp_path):
    turns, _ = written(tmp_path)
    assert turns.load("g0.0", TOLD) == TurnsOnFile(SAVED, 2)
    assert turns.load("g0.0", OTHER) == TurnsOnFile(SAVED, 0)
    assert turns.load("g1.0", TOLD) == TurnsOnFile()


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_what_a_death_has_cut_off_is_taken_off_and_others_follow(tmp_path, cut):
    turns, path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert turns.load("g0.0", TOLD) == TurnsOnFile(SAVED, 1)
    later = SavedTurn(response_digest=TOLD, answer=EnvironmentTurn(is_cut=True))
    turns.save("g0.0", later)
    assert SavedTurns(tmp_path).load("g0.0", TOLD) == TurnsOnFile(later)


def test_bytes_that_were_changed_are_not_believed(tmp_path):
    turns, path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert turns.load("g0.0", TOLD) == TurnsOnFile(SAVED, 1)


def test_a_file_stays_small_however_many_turns_there_are(tmp_path):
    turns, path = written(tmp_path)
    large = SavedTurn(response_digest=TOLD, answer=EnvironmentTurn(is_cut=True), state=bytes(1000))
    for _ in range(200):
        turns.attempt("g0.0", TOLD)
        turns.save("g0.0", large)
    assert path.stat().st_size <= KEPT_BYTES + 2000
    assert turns.load("g0.0", TOLD) == TurnsOnFile(large)
    turns.forget(turns.names())
    assert not list(tmp_path.iterdir())
