"""Stores that came back at another address are found by who was told the old one."""

import threading

import pytest

from laminar_py.ledger.segments.fetch import StoreClient
from laminar_py.ledger.segments.frames import read_frame
from laminar_py.ledger.segments.moves import forget_moves, note_move, present_address
from laminar_py.ledger.segments.reader import StoreAwayError
from laminar_py.ledger.segments.writer import SegmentWriter
from tests.segments.pieces import KEY, random_piece, served


@pytest.fixture
def notes(tmp_path):
    return tmp_path / "stores"


def test_notes_are_followed_to_the_last_one_and_a_store_is_never_led_away_from(notes):
    assert present_address(notes, "10.0.0.4:1") == "10.0.0.4:1"
    note_move(notes, before=None, address="10.0.0.4:1")
    assert not notes.exists(), "nothing is noted where nothing moved"
    note_move(notes, before="10.0.0.4:1", address="10.0.0.4:2")
    note_move(notes, before="10.0.0.4:2", address="10.0.0.4:3")
    assert [present_address(notes, f"10.0.0.4:{port}") for port in (1, 2, 3)] == ["10.0.0.4:3"] * 3
    note_move(notes, before="10.0.0.4:3", address="10.0.0.4:1")  # it has its first port again
    assert [present_address(notes, f"10.0.0.4:{port}") for port in (1, 2, 3)] == ["10.0.0.4:1"] * 3
    forget_moves(notes)
    assert present_address(notes, "10.0.0.4:2") == "10.0.0.4:2"


def test_notes_that_lead_in_a_circle_end_somewhere(notes):
    notes.mkdir()
    for before, address in (("a:1", "a:2"), ("a:2", "a:1")):
        (notes / before).write_text(address)
    assert present_address(notes, "a:1") in ("a:1", "a:2")


def test_who_waits_for_a_store_gets_its_pieces_once_it_serves_elsewhere(tmp_path, notes):
    piece = random_piece(tokens=500)
    ref = SegmentWriter(tmp_path, "replica-0-1-0").write(piece)
    with served(tmp_path) as store:
        before = store.address
    client, got = StoreClient(KEY, moves=notes), []
    thread = threading.Thread(target=lambda: got.extend(client(before, [ref])))
    thread.start()
    with served(tmp_path) as store:
        note_move(notes, before=before, address=store.address)
        thread.join(30)
    client.close()
    assert read_frame(memoryview(got[0]), ref.digest) == piece


def test_a_note_that_leads_to_nobody_does_not_keep_a_reader_for_longer(tmp_path, notes):
    ref = SegmentWriter(tmp_path, "replica-0-1-0").write(random_piece(tokens=5))
    with served(tmp_path) as store:
        gone = store.address
    note_move(notes, before="127.0.0.1:9", address=gone)
    client = StoreClient(KEY, retry_s=0.3, moves=notes)
    with pytest.raises(StoreAwayError, match="is away"):
        client("127.0.0.1:9", [ref])
    client.close()
