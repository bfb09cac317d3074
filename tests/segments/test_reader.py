"""Readers: bytes are given out where they have the digest of their reference, and what is lost is named."""

import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from laminar_py.ledger.segments import reader as reader_module
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter, tokens_ref
from laminar_py.records.columns import Dtype, TokenValues
from laminar_py.records.pieces import ColumnPiece, ColumnRef, PayloadLostError, TokensRef
from tests.segments.pieces import make_piece

COLUMN = ColumnPiece(trajectory_id="a", name="rewards", values=TokenValues(Dtype.FLOAT32, bytes(40)))


@pytest.fixture
def writer(tmp_path):
    return SegmentWriter(tmp_path, "replica-3")


@pytest.fixture
def reader(tmp_path):
    reader = PayloadReader(tmp_path)
    yield reader
    reader.close()


def tokens_of(writer, *pieces):
    return [tokens_ref(piece, writer.write(piece)) for piece in pieces]


def test_a_response_is_joined_from_its_pieces_beside_its_columns(writer, reader):
    tokens = tokens_of(writer, make_piece("a", tokens=5), make_piece("a", start=5, tokens=5, version=8))
    column = writer.write(COLUMN)
    loaded = reader.load([*(one.at for one in tokens), column])
    payload = loaded.response(tokens)
    assert payload.ids.tolist() == list(range(10))
    assert [(span.version, span.start, span.end) for span in payload.spans] == [(7, 0, 5), (8, 5, 10)]
    assert loaded.column(ColumnRef(Dtype.FLOAT32, column)) == COLUMN


def test_a_file_that_is_gone_is_named_and_costs_nothing_else(tmp_path, writer, reader):
    first = tokens_of(writer, make_piece("a"))
    second = tokens_of(SegmentWriter(tmp_path, "replica-4"), make_piece("b"))
    (tmp_path / f"{first[0].at.segment}.segment").unlink()
    loaded = reader.load([first[0].at, second[0].at])
    with pytest.raises(
        PayloadLostError, match=rf"{first[0].at.segment} from byte 0 on: No such file or directory"
    ):
        loaded.response(first)
    assert loaded.response(second).ids.tolist() == list(range(5))


def test_every_changed_byte_of_a_piece_is_noticed(tmp_path, writer, reader):
    before, ref = writer.write_all([make_piece("x"), make_piece("a")])
    path = tmp_path / f"{ref.segment}.segment"
    whole = path.read_bytes()
    for place in range(ref.offset, ref.offset + ref.num_bytes):
        changed = bytearray(whole)
        changed[place] ^= 64
        path.write_bytes(changed)
        loaded = reader.load([before, ref])
        assert loaded.piece(before) == make_piece("x")
        with pytest.raises(PayloadLostError, match=f"{ref.segment} from byte {ref.offset} on: "):
            loaded.piece(ref)


def test_a_file_that_is_too_short_is_named(tmp_path, writer, reader):
    refs = writer.write_all([make_piece("a"), make_piece("b")])
    os.truncate(tmp_path / f"{refs[1].segment}.segment", refs[1].offset + refs[1].num_bytes - 1)
    loaded = reader.load(refs)
    assert loaded.piece(refs[0]) == make_piece("a")
    with pytest.raises(PayloadLostError, match=f"ends before byte {refs[1].offset + refs[1].num_bytes}"):
        loaded.piece(refs[1])


def test_a_reference_to_something_else_is_a_loss_and_no_piece(writer, reader):
    tokens, column = writer.write(make_piece("a")), writer.write(COLUMN)
    elsewhere = msgspec.structs.replace(tokens, offset=tokens.offset + 1)
    wrong = msgspec.structs.replace(tokens, digest=bytes(16))
    loaded = reader.load([tokens, column, elsewhere, wrong])
    for ref in (elsewhere, wrong):
        with pytest.raises(PayloadLostError):
            loaded.piece(ref)
    with pytest.raises(PayloadLostError, match="a Piece instead of a ColumnPiece"):
        loaded.column(ColumnRef(Dtype.FLOAT32, tokens))
    with pytest.raises(PayloadLostError, match="a ColumnPiece instead of a Piece"):
        loaded.response([TokensRef(0, 5, column)])


def test_pieces_that_do_not_lie_end_to_end_are_no_response(writer, reader):
    first, third = tokens_of(writer, make_piece("a"), make_piece("a", start=10))
    with pytest.raises(PayloadLostError, match=r"tokens \[5, 10\) are missing or stored twice"):
        reader.load([first.at, third.at]).response([first, third])


def test_few_files_are_open_at_a_time_and_threads_share_them(tmp_path, reader, monkeypatch):
    monkeypatch.setattr(reader_module, "OPEN_FILES", 3)
    pieces = [make_piece(f"g{place}.0") for place in range(20)]
    refs = [SegmentWriter(tmp_path, "replica-3").write(piece) for piece in pieces]

    def read_all(turn):
        order = refs[turn:] + refs[:turn]
        loaded = reader.load(order)
        return [loaded.piece(ref) for ref in refs]

    with ThreadPoolExecutor(4) as pool:
        assert all(found == pieces for found in pool.map(read_all, range(20)))
    assert len(reader._files) == 3


def test_a_patient_reader_waits_until_it_sees_what_another_host_wrote(tmp_path, writer):
    first, second = writer.write_all([make_piece("a"), make_piece("b")])
    path = tmp_path / f"{first.segment}.segment"
    whole = path.read_bytes()
    path.write_bytes(whole[: second.offset])  # as a network file system shows it for a while
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(PayloadReader(tmp_path, patience_s=30.0).load, [first, second])
        path.write_bytes(whole)
        loaded = loading.result()
    assert [loaded.piece(ref) for ref in (first, second)] == [make_piece("a"), make_piece("b")]
