"""Files of saved turns: another process continues from what a crashed process has left."""

from laminar_py.environment.saved_turns import SavedTurn, SavedTurns
from laminar_py.records.environment import EnvironmentTurn

TURN, OTHER = b"a" * 16, b"b" * 16
SAVED = SavedTurn(response_digest=OTHER, answer=EnvironmentTurn(ends=True, reward=0.5), state=b"state")


def written(folder):
    turns = SavedTurns(folder)
    turns.count_attempt("g0.0", OTHER)
    turns.save("g0.0", SAVED)
    turns.count_attempt("g0.0", TURN)
    turns.count_attempt("g0.0", TURN)
    return turns, folder / "g0.0.environment"


def test_attempts_count_since_the_last_turn_that_was_answered_and_files_go_with_their_trajectory(tmp_path):
    written(tmp_path)
    turns = SavedTurns(tmp_path)
    assert turns.load("g0.0", TURN) == (SAVED, 2)
    assert turns.load("g0.0", OTHER) == (SAVED, 0)
    assert turns.load("g1.0", TURN) == (None, 0)
    turns.forget(turns.names())
    assert not list(tmp_path.iterdir())


def test_a_crash_in_the_middle_of_a_write_leaves_the_last_saved_turn_and_damage_counts_as_missing(tmp_path):
    turns, path = written(tmp_path)
    path.with_name(f"{path.name}.new").write_bytes(path.read_bytes()[:-9])
    assert turns.load("g0.0", TURN) == (SAVED, 2)
    data = path.read_bytes()
    changed = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    for damaged in (data[:-9], b"", changed):
        path.write_bytes(damaged)
        assert turns.load("g0.0", TURN) == (None, 2)
    later = SavedTurn(response_digest=TURN, answer=EnvironmentTurn(is_cut=True))
    turns.save("g0.0", later)
    assert turns.load("g0.0", TURN) == (later, 0)
