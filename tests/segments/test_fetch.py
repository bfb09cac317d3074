"""The client over real sockets: what comes is what was written, and a store that is away is waited for."""

import random
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from laminar_py.ledger.segments import fetch, wire
from laminar_py.ledger.segments.fetch import StoreClient, split
from laminar_py.ledger.segments.frames import read_frame
from laminar_py.ledger.segments.reader import PayloadReader, StoreAwayError
from laminar_py.ledger.segments.store import StoreLimits
from laminar_py.ledger.segments.wire import AnswerStatus, leave_address
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.records.pieces import PayloadLostError, PieceRef
from tests.segments.pieces import KEY, PATIENCE_S, STORE, LocalStore, random_piece, served


@pytest.fixture
def client(tmp_path):
    client = StoreClient(KEY, tmp_path, retry_s=0.3)
    yield client
    client.close()


def written(folder, sizes, *, parts=3):
    """Pieces of so many tokens from several writers, and their references."""
    writers = [SegmentWriter(folder, f"replica-{index}") for index in range(parts)]
    pieces = [random_piece(f"g{index}.0", tokens=tokens) for index, tokens in enumerate(sizes)]
    return pieces, [writers[index % parts].write(piece) for index, piece in enumerate(pieces)]


def test_what_comes_is_what_was_written_in_the_order_of_the_asking(tmp_path, client):
    rng = random.Random(0)
    pieces, refs = written(tmp_path, [rng.choice((1, 7, 300, 3000, 40_000, 200_000)) for _ in range(60)])
    order = rng.sample(range(60), 60)
    with served(tmp_path):
        got = client(STORE, [refs[place] for place in order])
    assert [read_frame(memoryview(data), refs[i].digest) for data, i in zip(got, order, strict=True)] == [
        pieces[i] for i in order
    ]


def test_a_large_fetch_is_split_within_the_bounds():
    refs = [PieceRef(f"replica-{i % 50}.1.abcd", i, 50_000, b"") for i in range(5000)]
    parts = list(split(refs))
    assert [ref for part in parts for ref in part] == refs
    for part in parts:
        assert sum(ref.num_bytes for ref in part) <= fetch.PART_BYTES <= wire.ANSWER_BYTES
        assert len({ref.segment for ref in part}) <= wire.MOST_SEGMENTS
    tiny = [PieceRef("replica-0.1.abcd", i, 1, b"") for i in range(10_000)]
    assert [len(part) for part in split(tiny)] == [4096, 4096, 1808]
    assert list(split([])) == []
    huge = PieceRef("replica-0.1.abcd", 0, 2 * wire.ANSWER_BYTES, b"")
    assert list(split([tiny[0], huge, tiny[1]])) == [[tiny[0]], [huge], [tiny[1]]]


def test_one_piece_may_be_larger_than_any_bound_of_several(tmp_path, client, monkeypatch):
    monkeypatch.setattr(wire, "ANSWER_BYTES", 2**20)
    monkeypatch.setattr(fetch, "PART_BYTES", 2**20)
    pieces, refs = written(tmp_path, [10, 400_000, 10])
    with served(tmp_path):
        got = client(STORE, refs)
    assert [read_frame(memoryview(data), ref.digest) for data, ref in zip(got, refs, strict=True)] == pieces


def test_a_piece_that_is_lost_is_told_at_once_and_by_name(tmp_path, client):
    _, refs = written(tmp_path, [10, 10])
    (tmp_path / f"{refs[1].segment}.segment").unlink()
    with served(tmp_path), pytest.raises(PayloadLostError) as caught:
        StoreClient(KEY, tmp_path)(STORE, refs)
    assert not isinstance(caught.value, StoreAwayError)
    assert str(caught.value) == f"{refs[1].segment}: No such file or directory ({STORE})"


def test_a_store_that_stays_away_is_named_with_the_segment(client, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        leave_address(tmp_path, STORE, listener.getsockname())
    refs = [PieceRef(f"replica-{i}.1.abcd", 0, 1, b"") for i in range(3)]
    with pytest.raises(StoreAwayError, match=rf"replica-0\.1\.abcd and 2 more: {STORE} did not answer for"):
        client(STORE, refs)


def test_a_store_of_another_run_is_none(tmp_path, client):
    _, refs = written(tmp_path, [10])
    with (
        served(tmp_path, key=secrets.token_bytes(32)),
        pytest.raises(StoreAwayError, match=r"the answer was cut off"),
    ):
        client(STORE, refs)


@pytest.mark.parametrize("status", [*AnswerStatus, 7])
def test_a_stranger_at_the_port_declares_nothing_lost(client, tmp_path, status):
    """Whoever has the port of a store that died."""
    answer = wire.ANSWER_HEAD.pack(bytes(32), status, 4) + b"gone"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        leave_address(tmp_path, STORE, listener.getsockname())
        with pytest.raises(StoreAwayError, match="does not have the run's key"):
            client(STORE, [PieceRef("replica-0.1.abcd", 0, 4, b"")])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_store_that_restarts_in_the_middle_of_fetches_is_survived(tmp_path):
    pieces, refs = written(tmp_path, [100_000] * 24)
    client, store = StoreClient(KEY, tmp_path), LocalStore(tmp_path)
    stop = threading.Event()

    def fetching(number):
        rounds = 0
        while not stop.is_set() or rounds < 2:
            got = client(STORE, refs[number:])
            assert [read_frame(memoryview(d), r.digest) for d, r in zip(got, refs[number:], strict=True)] == (
                pieces[number:]
            )
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(fetching, number) for number in range(3)]
        for _ in range(3):
            time.sleep(0.3)
            store.close()
            store = LocalStore(tmp_path)
        stop.set()
        assert all(one.result(PATIENCE_S) >= 2 for one in running)
    store.close()
    client.close()


def test_a_store_that_is_busy_is_asked_again(tmp_path):
    pieces, refs = written(tmp_path, [1_000_000] * 4)
    client = StoreClient(KEY, tmp_path)
    limits = StoreLimits(answers=1, turn_s=0.01, connections=3)
    with served(tmp_path, limits=limits), ThreadPoolExecutor(4) as pool:
        for answer in [pool.submit(client, STORE, refs) for _ in range(4)]:
            got = answer.result(PATIENCE_S)
            assert [read_frame(memoryview(d), r.digest) for d, r in zip(got, refs, strict=True)] == pieces
    client.close()


def test_connections_are_kept_and_one_that_the_store_closed_is_made_anew(tmp_path, client):
    _, refs = written(tmp_path, [10])
    with served(tmp_path, limits=StoreLimits(idle_s=0.2)):
        client(STORE, refs)
        (kept,) = client._idle[STORE]
        client(STORE, refs)
        assert client._idle[STORE] == [kept]
        time.sleep(0.5)
        client(STORE, refs)


def test_closing_a_client_wakes_who_waits_for_a_store(tmp_path):
    client = StoreClient(KEY, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client, STORE, [PieceRef("replica-0.1.abcd", 0, 1, b"")])
        time.sleep(0.2)
        client.close()
        with pytest.raises(StoreAwayError):
            waiting.result(PATIENCE_S)


def test_a_reader_has_pieces_of_other_hosts_beside_its_own_and_names_those_that_are_lost(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    own, far = SegmentWriter(here, "replica-0"), SegmentWriter(there, "replica-1")
    pieces = [random_piece(f"g{i}.0", tokens=10) for i in range(4)]
    refs = [own.write(pieces[0]), far.write(pieces[1]), far.write(pieces[2])]
    lost = PieceRef("replica-9.1.abcd", 0, 10, bytes(16))
    client = StoreClient(KEY, there)
    with served(there):
        stores = {refs[1].segment: STORE, lost.segment: STORE}
        loaded = PayloadReader(here, fetch=client).load([*refs, lost], stores=stores)
    assert [loaded.piece(ref) for ref in refs] == pieces[:3]
    with pytest.raises(PayloadLostError, match=r"replica-9\.1\.abcd: No such file"):
        loaded.piece(lost)
    client.close()


def test_a_reader_waits_for_a_store_once_and_not_for_each_piece():
    asked = []

    def away(address, refs):
        asked.append(refs)
        raise StoreAwayError("store a is away")

    refs = [PieceRef("replica-0.1.abcd", place, 1, b"") for place in range(5)]
    loaded = PayloadReader(None, fetch=away).load(refs, stores={"replica-0.1.abcd": "a"})
    assert asked == [refs]
    for ref in refs:
        with pytest.raises(PayloadLostError, match="store a is away"):
            loaded.piece(ref)


def test_a_host_that_is_gone_is_waited_for_once_and_not_by_each_request_in_turn(tmp_path):
    ref = SegmentWriter(tmp_path, "replica-0-1-0").write(random_piece(tokens=5))
    with served(tmp_path):
        pass
    client = StoreClient(KEY, tmp_path, retry_s=1.0)
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(StoreAwayError, match="did not answer for"):
            client(STORE, [ref])
    assert time.monotonic() - began < 10, "twenty in turn would take 20 s"
    with served(tmp_path):
        assert client(STORE, [ref])
    began = time.monotonic()
    with pytest.raises(StoreAwayError):
        client(STORE, [ref])
    assert time.monotonic() - began >= 1, "it answered meanwhile, so it is waited for again"
    client.close()


def test_a_store_is_found_where_it_serves_now(tmp_path):
    pieces, refs = written(tmp_path, [500])
    client, got = StoreClient(KEY, tmp_path), []
    thread = threading.Thread(target=lambda: got.extend(client(STORE, refs)))
    thread.start()  # before there is any
    for _ in range(3):
        with served(tmp_path):
            thread.join(PATIENCE_S)
            assert read_frame(memoryview(client(STORE, refs)[0]), refs[0].digest) == pieces[0]
    assert read_frame(memoryview(got[0]), refs[0].digest) == pieces[0]
    client.close()
