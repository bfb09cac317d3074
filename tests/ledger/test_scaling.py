"""The wanted number of replicas, as a command leaves it in a run's folder."""

from laminar_py.ledger.scaling import WANTED, take_wanted, write_wanted


def test_the_last_wanted_number_is_taken_once_and_a_damaged_file_is_none(tmp_path):
    assert take_wanted(tmp_path) is None
    write_wanted(tmp_path, 6)
    write_wanted(tmp_path, 3)
    assert (take_wanted(tmp_path), take_wanted(tmp_path)) == (3, None)
    (tmp_path / WANTED).write_text("{")
    assert take_wanted(tmp_path) is None
