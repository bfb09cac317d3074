"""The store over real sockets: who is let in, what is given, and what each may take of it."""

import os
import socket
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.ledger.segments import wire
from laminar_py.ledger.segments.store import BadRequestError, PieceStore, StoreLimits, check_request
from laminar_py.ledger.segments.wire import AnswerStatus
from laminar_py.ledger.segments.writer import SegmentWriter, new_name
from laminar_py.records.codec import encode
from laminar_py.records.pieces import PieceRef
from tests.segments.pieces import KEY, PATIENCE_S, random_piece, served

NAME = "replica-3.18f2a4c1b.9e41"


def want(*pieces):
    """Request for pieces, each of a segment's name, an offset, and a size."""
    return wire.make_request([PieceRef(*piece, b"") for piece in pieces])


def signed(body, *, key=KEY, signature=None):
    """Bytes of a request; a body that is no bytes is encoded."""
    data = body if isinstance(body, bytes) else encode(body)
    return wire.REQUEST_HEAD.pack(signature or wire.request_signature(key, data), len(data)) + data


def connect(store):
    return socket.create_connection(store.address, PATIENCE_S)


def answer_of(connection, request):
    """Status and body of the answer, which has the key."""
    received = connection.makefile("rb")
    signature, status, size = wire.ANSWER_HEAD.unpack(received.read(wire.ANSWER_HEAD.size))
    answer = received.read(size)
    line = b"" if status == AnswerStatus.PIECES else answer
    assert signature == wire.answer_signature(KEY, request[:32], status, size, line)
    return status, answer


def ask(store, body):
    """Status and body of an answer."""
    with connect(store) as connection:
        connection.sendall(signed(body))
        return answer_of(connection, signed(body))


@pytest.fixture
def folder(tmp_path):
    """A segment that is there, by name, beside what nobody may have."""
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / f"{NAME}.segment").write_bytes(bytes(range(100)))
    (tmp_path / "segments" / f"{NAME}.journal").write_bytes(b"secret")
    (tmp_path / "secret.1.abcd.segment").write_bytes(b"secret")
    return tmp_path / "segments"


@pytest.fixture
def store(folder):
    with served(folder) as store:
        yield store


def test_bytes_come_in_the_order_in_which_they_are_asked_for(store):
    wanted = want((NAME, 90, 10), (NAME, 0, 3), (NAME, 1, 1))
    assert ask(store, wanted) == (AnswerStatus.PIECES, bytes([*range(90, 100), 0, 1, 2, 1]))


def test_names_that_writers_give_are_names_that_stores_know():
    for part in ("replica-3", "scorer-0", "reference-0", "replica-3-1-17"):
        assert check_request(encode(want((new_name(part), 0, 1))))


@pytest.mark.parametrize(
    "request_bytes",
    [
        signed(want((NAME, 0, 3)), key=bytes(32)),
        signed(want((NAME, 0, 3)), signature=KEY),
        signed(want((NAME, 0, 4)), signature=wire.request_signature(KEY, encode(want((NAME, 0, 3))))),
        wire.REQUEST_HEAD.pack(bytes(32), 2**32 - 1),
        b"POST /pieces HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\xfc\r\n\r\n" * 10,
    ],
    ids=["another-key", "the-key-itself", "another-request", "too-large", "http", "tls"],
)
def test_who_does_not_sign_gets_no_word(store, request_bytes):
    with connect(store) as stranger:
        stranger.sendall(request_bytes)
        assert is_closed(stranger)
    assert ask(store, want((NAME, 0, 1)))[0] == AnswerStatus.PIECES, "it serves on"


@pytest.mark.parametrize("key", [b"", b"guess", bytes(31)])
def test_a_key_that_can_be_guessed_is_refused_at_construction(tmp_path, key):
    with pytest.raises(ValueError, match=f"key: {len(key)} bytes"):
        PieceStore(tmp_path, key=key)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xff" * 1000,
        b"\x91" * 100_000,
        b"{}",
        [],
        {"segments": [NAME], "pieces": [[0, 0, 1]]},
        [[NAME], []],
        [[], [[0, 0, 1]]],
        [[NAME], [[0, 0]]],
        [[NAME], [[0, 0, 1]] * (wire.MOST_PIECES + 1)],
        [[NAME] * (wire.MOST_SEGMENTS + 1), [[0, 0, 1]]],
        *([[NAME], [piece]] for piece in ([1, 0, 1], [-1, 0, 1], [0, -1, 1], [0, 0, -1], [0, 0, 0], [0, 0.5, 1])),
        *([[NAME], [piece]] for piece in ([0, 2**63, 1], [0, 2**64 - 1, 2**64 - 1], [0, 0, None])),
        *([[name], [[0, 0, 1]]] for name in (f"../{NAME}", "../secret.1.abcd", "/etc/passwd", "..", "", 7)),
        *([[name], [[0, 0, 1]]] for name in (f"{NAME}\n", f"{NAME}\0", f"{NAME}.journal", f"{NAME}.segment")),
        *([[name], [[0, 0, 1]]] for name in ("REPLICA.1.abcd", "é.1.abcd", f"{'a' * 65}.1.abcd")),
    ],
)
def test_a_bad_request_is_answered_with_one_line(store, body):
    status, answer = ask(store, body)
    assert status == AnswerStatus.REFUSED
    assert answer.startswith(b"not a request: ")
    assert b"\n" not in answer
    assert len(answer) < 300
    assert ask(store, want((NAME, 0, 1)))[0] == AnswerStatus.PIECES, "it serves on"


@given(data=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(data):
    with suppress(BadRequestError):
        assert check_request(data)


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        (want((NAME, 100, 1)), "ends before byte 101"),
        (want((NAME, 0, 3), (NAME, 0, 101)), "ends before byte 101"),
        (want((NAME, 2**62, 2**62)), "ends before byte 9223372036854775808"),
        (want(("replica-4.1.abcd", 0, 1)), "No such file or directory"),
        (want(("link.1.abcd", 0, 1)), "Too many levels of symbolic links"),
        (want(("folder.1.abcd", 0, 1)), "not a regular file"),
        (want(("pipe.1.abcd", 0, 1)), "not a regular file"),
    ],
)
def test_what_is_not_there_is_told_from_all_else(store, folder, wanted, line):
    (folder / "link.1.abcd.segment").symlink_to(folder.parent / "secret.1.abcd.segment")
    (folder / "folder.1.abcd.segment").mkdir()
    os.mkfifo(folder / "pipe.1.abcd.segment")
    status, answer = ask(store, wanted)
    assert (status, answer.decode()) == (AnswerStatus.LOST, f"{wanted.segments[0]}: {line}")


def test_several_pieces_have_a_bound_and_one_has_none(store):
    many = want((NAME, 0, wire.ANSWER_BYTES), (NAME, 0, 1))
    assert ask(store, many)[0] == AnswerStatus.REFUSED
    assert ask(store, want((NAME, 0, 2 * wire.ANSWER_BYTES)))[0] == AnswerStatus.LOST, "it would be read"


def is_closed(connection):
    """True once the other side has ended it."""
    connection.settimeout(PATIENCE_S)
    with suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def test_connections_that_do_not_show_the_key_in_time_are_closed(folder):
    with served(folder, limits=StoreLimits(hello_s=0.2)) as store:
        request = signed(want((NAME, 0, 1)))
        for sent in (0, 1, wire.REQUEST_HEAD.size, len(request) - 1):
            with connect(store) as stranger:
                stranger.sendall(request[:sent])
                assert is_closed(stranger)
        assert ask(store, want((NAME, 0, 1)))[0] == AnswerStatus.PIECES


def test_connections_beyond_the_bound_are_closed_and_others_served_on(folder):
    request = signed(want((NAME, 0, 1)))
    with served(folder, limits=StoreLimits(connections=3)) as store, connect(store) as kept:
        kept.sendall(request)
        assert answer_of(kept, request) == (AnswerStatus.PIECES, b"\0")
        strangers = [connect(store) for _ in range(6)]
        assert all(is_closed(one) for one in strangers[2:])
        kept.sendall(request)
        assert answer_of(kept, request) == (AnswerStatus.PIECES, b"\0")
        for one in strangers:
            one.close()


def test_a_client_that_does_not_read_loses_its_turn_and_others_get_theirs(tmp_path):
    ref = SegmentWriter(tmp_path, "replica-0").write(random_piece(tokens=2_000_000))
    with (
        served(tmp_path, limits=StoreLimits(answers=1, turn_s=PATIENCE_S, answer_s=0.5)) as store,
        connect(store) as slow,
    ):
        slow.sendall(signed(want((ref.segment, ref.offset, ref.num_bytes))))
        time.sleep(0.1)  # so that it is the first
        status, answer = ask(store, want((ref.segment, 0, 100)))
        assert (status, len(answer)) == (AnswerStatus.PIECES, 100)
        assert is_closed(slow)


def test_when_all_turns_are_taken_others_are_told_to_ask_again(tmp_path):
    ref = SegmentWriter(tmp_path, "replica-0").write(random_piece(tokens=2_000_000))
    wanted = want((ref.segment, ref.offset, ref.num_bytes))
    with (
        served(tmp_path, limits=StoreLimits(answers=1, turn_s=0.1, answer_s=PATIENCE_S)) as store,
        connect(store) as slow,
    ):
        slow.sendall(signed(wanted))
        time.sleep(0.1)
        assert ask(store, wanted) == (AnswerStatus.REFUSED, b"1 answers are being sent; try again")


def test_a_store_listens_on_loopback_unless_told_otherwise(store):
    assert store.address[0] == "127.0.0.1"


def test_a_segment_that_is_deleted_under_way_comes_to_its_end(tmp_path):
    ref = SegmentWriter(tmp_path, "replica-0").write(random_piece(tokens=1_000_000))
    path = tmp_path / f"{ref.segment}.segment"
    data, request = path.read_bytes(), signed(want((ref.segment, ref.offset, ref.num_bytes)))
    with served(tmp_path) as store, connect(store) as connection:
        connection.sendall(request)
        begin = connection.recv(100)
        path.unlink()
        rest = connection.makefile("rb").read(wire.ANSWER_HEAD.size + len(data) - len(begin))
        assert (begin + rest)[wire.ANSWER_HEAD.size :] == data
        assert ask(store, want((ref.segment, ref.offset, ref.num_bytes)))[0] == AnswerStatus.LOST


def test_a_segment_that_becomes_shorter_under_way_ends_its_answer_and_nothing_else(tmp_path, caplog):
    ref = SegmentWriter(tmp_path, "replica-0").write(random_piece(tokens=4_000_000))
    with served(tmp_path) as store, connect(store) as connection:
        connection.sendall(signed(want((ref.segment, ref.offset, ref.num_bytes))))
        connection.recv(100)
        os.truncate(tmp_path / f"{ref.segment}.segment", 1000)
        assert is_closed(connection)
        assert ask(store, want((ref.segment, 0, 1000)))[0] == AnswerStatus.PIECES
    assert "an answer was cut off: [Errno 14] Bad address" in caplog.text


def test_the_longest_request_that_a_client_makes_is_one_that_stores_take():
    names = [f"{'a' * 64}.{'f' * 16}.{index:04x}" for index in range(wire.MOST_SEGMENTS)]
    pieces = [(names[index % len(names)], 2**40, 2**13) for index in range(wire.MOST_PIECES)]
    body = encode(want(*pieces))
    assert len(body) <= wire.BODY_BYTES
    assert check_request(body) == want(*pieces)
