"""Journals: what running trajectories have, until they leave."""

from laminar_py.ledger.segments.writer import Journal
from tests.segments.pieces import make_piece
from tests.segments.test_writer import frames_in


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_entries_are_there_as_soon_as_they_are_written(tmp_path):
    journal = Journal(tmp_path / "new", "replica-3")
    journal.write([])
    assert not (tmp_path / "new").exists(), "the first file is made with the first entry"
    entries = [make_piece("a"), make_piece("b"), make_piece("a", start=5)]
    journal.write(entries[:2])
    journal.write(entries[2:])
    assert frames_in(tmp_path / "new") == entries
    assert len(files(tmp_path / "new")) == 1


def test_a_file_goes_when_all_trajectories_in_it_have_left(tmp_path):
    journal = Journal(tmp_path, "replica-3", roll_bytes=1)
    journal.write([make_piece("a"), make_piece("b")])
    journal.write([make_piece("b", start=5)])
    journal.write([make_piece("c")])
    first, second, third = files(tmp_path)
    journal.forget("a")
    assert files(tmp_path) == [first, second, third]
    journal.forget("unknown")
    journal.forget("b")
    assert files(tmp_path) == [third]
    journal.forget("c")
    assert files(tmp_path) == [third], "the present one stays"
    journal.write([make_piece("d")])
    journal.forget("none")
    assert len(files(tmp_path)) == 1, "and goes when there is another"
    assert frames_in(tmp_path) == [make_piece("d")]


def test_the_end_of_a_part_in_peace_leaves_no_file(tmp_path):
    journal = Journal(tmp_path, "replica-3", roll_bytes=1)
    for id in "abc":
        journal.write([make_piece(id)])
    journal.close()
    assert files(tmp_path) == []
    journal.close()
    journal.write([make_piece("d")])
    assert frames_in(tmp_path) == [make_piece("d")]
