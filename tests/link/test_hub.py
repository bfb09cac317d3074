"""The controller's end, with peers that a test moves by hand: reports once, in order; commands until heard."""

import asyncio
from contextlib import ExitStack

import pytest

from laminar_py.records.replica import Survey
from laminar_py.relay import sockets
from laminar_py.relay.messages import RelayKeys
from laminar_py.relay.sockets import generate_keys
from laminar_py.runtime.link import hub as hub_module
from laminar_py.runtime.link.messages import Abort, Follow, Reply, ReportFrame
from tests.link.ends import KEYS, Commands, by_hand, linked, make_report, serving

A, B = "replica-0-1-0", "replica-1-1-1"


async def test_each_report_is_taken_in_once_and_in_order_however_often_it_comes():
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            for number in (1, 1, 3, 2, 1, 3, 3, 5, 2, 4):
                await hand.report(number)
            await hand.told(4)
    assert desk.of(A) == [1, 2, 3, 4]
    assert connection.reports_received == 4


async def test_a_report_is_told_only_when_it_was_taken_in_and_so_are_answers_beside_it():
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            await hand.report(1)
            await hand.told(1)
            promised = asyncio.create_task(connection.expect(0, ["g0.0"]))
            assert await hand.commands() == [1]
            desk.may_take.clear()
            await hand.report(2, commands_received=1, answers=(Reply(0, promised=True),))
            await hand.report(2, commands_received=1)
            await hand.hears_nothing(0.3)
            assert not promised.done()
            desk.may_take.set()
            await hand.told(2)
            assert await promised
    assert desk.of(A) == [1, 2]


async def test_a_report_whose_answer_was_lost_is_told_again():
    async with serving() as desk:
        desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            for _ in range(3):
                await hand.report(1)
                await hand.told(1)
    assert desk.of(A) == [1]


async def test_orders_are_sent_again_until_they_are_heard(monkeypatch):
    monkeypatch.setattr(hub_module, "RESEND_S", 0.1)
    async with serving(heartbeat_timeout_s=2.0) as desk:
        connection = desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            await hand.report(1)
            await hand.told(1)
            for name in ("x", "y", "z"):
                connection.send_command(Abort([name]))
            assert [await hand.commands(), await hand.commands()] == [[1, 2, 3], [1, 2, 3]]
            await hand.report(1, commands_received=2)
            while (commands := await hand.commands()) != [3]:
                assert commands == [1, 2, 3]
            await hand.report(1, commands_received=3)
            while connection._unacknowledged:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_lost_orders_are_not_put_off_by_those_that_follow(monkeypatch):
    monkeypatch.setattr(hub_module, "RESEND_S", 0.3)
    async with serving(heartbeat_timeout_s=2.0) as desk:
        connection = desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            await hand.report(1)
            await hand.told(1)
            connection.send_command(Follow("first"))
            assert await hand.commands() == [1]
            following = asyncio.create_task(_put_often(connection))
            while 1 not in await hand.commands():
                pass
            following.cancel()


async def _put_often(connection):
    while True:
        connection.send_command(Follow("next"))
        await asyncio.sleep(0.05)


async def test_orders_for_a_replica_that_starts_come_with_the_answer_to_its_first_word(monkeypatch):
    monkeypatch.setattr(hub_module, "RESEND_S", 1e9)
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        for name in ("x", "y"):
            connection.send_command(Abort([name]))
            await asyncio.sleep(0.05)
        with by_hand(desk.hub.endpoint, A) as hand:
            await hand.report(0, commands_received=0)
            assert await hand.commands() == [1, 2]


async def test_orders_that_a_broken_connection_lost_come_with_the_answer_to_its_next_word(monkeypatch):
    monkeypatch.setattr(hub_module, "RESEND_S", 1e9)
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            await hand.report(1)
            await hand.told(1)
            connection.send_command(Follow("x"))
            assert await hand.commands() == [1]
            desk.may_take.clear()
            await hand.report(2)
            await came(connection, 2)
        while desk.post.send(A.encode(), b""):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        desk.may_take.set()
        await desk.until(lambda: connection.reports_received == 2)
        await asyncio.sleep(0.1)
        with by_hand(desk.hub.endpoint, A) as hand:
            await hand.report(2, commands_received=0)
            assert await hand.commands() == [1]


async def came(connection, number):
    """Once a report came, whether it may be taken in or not."""
    while connection._last_arrived < number:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_replica_that_claims_to_have_heard_what_was_never_said_hears_what_comes_then():
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            await hand.report(1, commands_received=77)
            await hand.told(1)
            connection.send_command(Follow("x"))
            assert await hand.commands() == [1]


async def test_an_order_for_which_there_is_no_frame_is_refused_where_it_is_put(monkeypatch):
    monkeypatch.setattr(hub_module, "MOST_COMMAND_BYTES", 100)
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        with pytest.raises(AssertionError, match=r"Abort of \d+ bytes for replica-0-1-0: split it"):
            connection.send_command(Abort(["g0.0"] * 50))
        assert not connection._unacknowledged


async def test_a_label_that_no_peer_can_have_is_refused():
    async with serving() as desk:
        for label in ("", "x" * 101):
            with pytest.raises(AssertionError, match="label"):
                desk.hub.open(label, 0)
        desk.hub.open("x" * 100, 0)
        with by_hand(desk.hub.endpoint, "x" * 100) as hand:
            await hand.report(1)
            await hand.told(1)


# ---- lost and closed


async def test_a_line_that_falls_silent_is_lost_and_one_that_speaks_is_not():
    async with serving(heartbeat_timeout_s=0.8) as desk:
        silent, speaks = desk.hub.open(A, 0), desk.hub.open(B, 1)
        with by_hand(desk.hub.endpoint, A, B) as (first, second):
            await first.report(1)
            speaking = asyncio.create_task(_speak(second))
            assert await silent.lost == "no report in supervisor.heartbeat_timeout_s=0.8 s"
            await asyncio.sleep(0.4)
            assert not speaks.lost.done()
            speaking.cancel()
            assert await speaks.lost


async def _speak(hand):
    while True:
        await hand.report(0, commands_received=0)
        await asyncio.sleep(0.1)


async def test_a_line_that_never_spoke_is_lost_once_its_process_runs_and_not_while_it_starts():
    async with serving(heartbeat_timeout_s=0.5) as desk:
        runs, starts = desk.hub.open(A, 0), desk.hub.open(B, 1)
        desk.hub.mark_started(runs)
        assert await runs.lost == "no report in supervisor.heartbeat_timeout_s=0.5 s"
        assert not starts.lost.done()


async def test_whoever_asks_gets_nothing_once_the_line_is_closed():
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        survey, promise = (
            asyncio.create_task(connection.request_survey()),
            asyncio.create_task(connection.expect(0, ["g0.0"])),
        )
        await asyncio.sleep(0)
        await desk.hub.close(connection)
        assert (await survey, await promise) == (None, False)
        assert (await connection.request_survey(), await connection.expect(0, [])) == (None, False)
        connection.send_command(Follow("x"))
        desk.hub.mark_started(connection)
        assert not connection._unacknowledged


async def test_whoever_asks_a_silent_replica_goes_on_in_time_and_calls_off_what_that_may_promise_late():
    replica = Commands()
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        assert (
            await connection.request_survey(within_s=0.1),
            await connection.expect(0, ["g0.0"], within_s=0.1),
        ) == (
            None,
            False,
        )
        async with linked(desk.hub.endpoint, A, replica):
            async with asyncio.timeout(10):
                while connection._unacknowledged or not replica.did:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            survey = await connection.request_survey(within_s=10)
            assert survey is not None
            assert survey.version == 0
    assert replica.did == [("expect", "g0.0"), ("call_off", "g0.0")]


async def test_closing_waits_for_what_came_and_takes_in_no_more():
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            desk.may_take.clear()
            await hand.report(1)
            await came(connection, 1)
            closing = asyncio.create_task(desk.hub.close(connection))
            await asyncio.sleep(0.05)
            assert not closing.done()
            desk.may_take.set()
            await closing
            assert desk.of(A) == [1]
            await hand.report(2)
            await hand.hears_nothing(0.3)
    assert desk.of(A) == [1]


# ---- who counts for nothing


async def test_words_of_an_old_label_count_for_nothing():
    async with serving() as desk:
        old = desk.hub.open(A, 0)
        await desk.hub.close(old)
        new = desk.hub.open(B, 0)
        with by_hand(desk.hub.endpoint, A, B) as (late, fresh):
            await late.report(1)
            await fresh.report(1)
            await fresh.told(1)
            await late.hears_nothing(0.2)
    assert desk.taken == [(B, 1)]
    assert new.reports_received == 1


@pytest.mark.parametrize("keys", [generate_keys(), RelayKeys(KEYS.public, generate_keys().secret)])
async def test_a_peer_with_other_keys_gets_nowhere(keys):
    async with serving() as desk:
        desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A, keys=keys) as stranger, by_hand(desk.hub.endpoint, A) as hand:
            pushing = asyncio.create_task(stranger.report(7))
            for number in (1, 2, 3):
                await hand.report(number)
                await hand.told(number)
                await asyncio.sleep(0.1)
            assert not pushing.done(), "there is no connection"
            pushing.cancel()
    assert desk.of(A) == [1, 2, 3]


async def test_a_frame_that_is_no_word_costs_nothing_but_itself():
    async with serving() as desk:
        desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A, "stranger") as (hand, stranger):
            for frame in (b"", b"\xc1", b"\x93\x01", b"\x94\xa1\xff\x00\x00\xc0", b"\x91" * 5000, bytes(1000)):
                await hand.send(frame)
                await stranger.send(frame)
            await hand.peer._async_socket.send_multipart([b"two", b"frames"])
            await hand.say(
                ReportFrame(
                    number=1,
                    commands_received=0,
                    report=make_report(1),
                    answers=(Reply(99, promised=True),),
                )
            )
            await hand.told(1)
    assert desk.of(A) == [1]


async def test_a_frame_above_the_bound_ends_its_connection_and_nothing_else(monkeypatch):
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 10_000)
    async with serving() as desk:
        connections = [desk.hub.open(A, 0), desk.hub.open(B, 1)]
        with by_hand(desk.hub.endpoint, A, B) as (careless, other):
            await other.report(1)
            await other.told(1)
            await careless.peer._async_socket.send(bytes(20_000))
            await other.report(2)
            await other.told(2)
            await careless.report(1)
            async with asyncio.timeout(10):
                while not connections[0].reports_received:
                    await careless.report(1)
                    await asyncio.sleep(0.1)
    assert (desk.of(A), desk.of(B)) == ([1], [1, 2])


async def test_an_answer_carries_the_survey_that_was_asked_for():
    survey = Survey(replica=0, version=3, slots=1, kv_used=0, kv_capacity=1, running=())
    async with serving() as desk:
        connection = desk.hub.open(A, 0)
        with by_hand(desk.hub.endpoint, A) as hand:
            await hand.report(1)
            first, second = (
                asyncio.create_task(connection.request_survey()),
                asyncio.create_task(connection.request_survey()),
            )
            assert await hand.commands() == [1, 2]
            first.cancel()
            await hand.report(2, commands_received=2, answers=(Reply(1, survey=survey), Reply(0)))
            assert await second == survey


async def test_what_was_heard_is_taken_in_a_part_at_a_time_before_a_line_closes(monkeypatch):
    monkeypatch.setattr(hub_module, "MOST_REPORTS", 2)
    async with serving() as desk:
        labels = [f"replica-{index}-1-0" for index in range(5)]
        connections = [desk.hub.open(label, index) for index, label in enumerate(labels)]
        with ExitStack() as stack:
            hands = [stack.enter_context(by_hand(desk.hub.endpoint, label)) for label in labels]
            for number in (1, 2):
                desk.may_take.clear()
                for hand in hands:
                    await hand.report(number)
                await asyncio.sleep(0.3)  # all have come, and the first are being taken in
                closing = asyncio.create_task(desk.hub.close(connections[-1])) if number == 2 else None
                await asyncio.sleep(0)
                desk.may_take.set()
                for hand in hands[:4]:
                    await hand.told(number)
            assert closing is not None
            await closing
            await hands[-1].report(3)
            await hands[0].report(3)
            await hands[0].told(3)
    assert desk.of(labels[0]) == [1, 2, 3]
    assert [desk.of(label) for label in labels[1:4]] == [[1, 2]] * 3
    assert 3 not in desk.of(labels[-1])
