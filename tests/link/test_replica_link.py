"""A replica's end of the link: against a hub that a test moves by hand, and against the real one."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from laminar_py.records.codec import decode, encode
from laminar_py.records.engine import EngineLostError
from laminar_py.relay.sockets import PeerServer
from laminar_py.runtime.link import replica_link
from laminar_py.runtime.link.messages import (
    Abort,
    CallOff,
    CommandFrame,
    Expect,
    Follow,
    GiveUp,
    Look,
    ReportFrame,
    Stop,
    Submit,
)
from tests.link.ends import KEYS, LOOPBACK, PATIENCE_S, Commands, linked, make_assignment, make_report, serving

A = "replica-0-1-0"


class ByHand:
    """A hub whose every frame a test sends and reads itself."""

    def __init__(self, post):
        self.post = post

    async def up(self):
        """The next word of the replica."""
        await self.post.wait()
        ((sender, frame),) = self.post.drain(1)
        assert sender == A.encode()
        return decode(ReportFrame, frame)

    async def report(self):
        """The next report that comes, and its number."""
        while (up := await self.up()).report is None:
            pass
        return up

    def say(self, told, first=0, *commands):
        data = encode(CommandFrame(told, first, tuple(msgspec.Raw(encode(command)) for command in commands)))
        assert self.post.send(A.encode(), data)


@asynccontextmanager
async def hand_in_hand(monkeypatch):
    """A hub by hand, and a replica at the other end, whose first report was told."""
    monkeypatch.setattr(replica_link, "RESEND_S", 0.1)
    post, replica = PeerServer(KEYS, LOOPBACK), Commands()
    try:
        async with asyncio.timeout(PATIENCE_S), linked(post.endpoint, A, replica) as task:
            hand = ByHand(post)
            assert (await hand.report()).number == 1
            hand.say(1)
            yield hand, replica, task
    finally:
        post.close()


async def done(replica, number):
    """Once it did so much."""
    while len(replica.did) < number:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_report_is_sent_until_it_is_told_and_the_next_one_only_then(monkeypatch):
    async with hand_in_hand(monkeypatch) as (hand, replica, _):
        for number in (2, 3):
            replica.reports.put_nowait(make_report(number))
        for _ in range(3):
            up = await hand.report()
            assert (up.number, up.report.generated) == (2, 2)
        hand.say(1)
        assert (await hand.report()).number == 2
        hand.say(2)
        while (up := await hand.report()).number == 2:
            pass
        assert (up.number, up.report.generated) == (3, 3)


async def test_orders_that_come_twice_or_out_of_order_are_obeyed_once_and_in_order(monkeypatch):
    async with hand_in_hand(monkeypatch) as (hand, replica, _):
        commands = [CallOff([str(number)]) for number in range(1, 7)]
        for first, last in ((1, 2), (1, 2), (4, 5), (2, 3), (6, 6), (1, 3), (4, 6), (4, 6), (1, 6)):
            hand.say(1, first, *commands[first - 1 : last])
        await done(replica, 6)
        assert replica.did == [("call_off", str(number)) for number in range(1, 7)]
        replica.reports.put_nowait(make_report(2))
        assert (await hand.report()).commands_received == 6


async def test_what_goes_on_meanwhile_begins_before_the_order_after_it(monkeypatch):
    async with hand_in_hand(monkeypatch) as (hand, replica, _):
        submit = Submit([make_assignment("c")])
        hand.say(1, 1, Abort(["a"]), GiveUp(["b"]), submit, Stop(True), CallOff(["d"]), Abort(["e"]), submit)
        await done(replica, 7)
        names = [name for name, _ in replica.did]
        assert names == ["abort", "give_up", "submit", "stop", "call_off", "abort", "submit"]


async def test_answers_go_with_a_report_that_goes_at_once(monkeypatch):
    async with hand_in_hand(monkeypatch) as (hand, _, _):
        hand.say(1, 1, Expect(5, 0, ["g0.0"]), Expect(6, 1, []), Look(7))
        answers = []
        while len(answers) < 3:
            up = await hand.report()
            hand.say(up.number)
            if up.number > len({number for number, _ in answers}):
                answers += [(up.number, answer) for answer in up.answers]
        assert [(answer.id, answer.promised) for _, answer in answers] == [(5, True), (6, False), (7, False)]
        assert answers[2][1].survey.replica == 0


async def test_what_ended_the_replica_is_raised_once_its_last_report_was_told(monkeypatch):
    async with hand_in_hand(monkeypatch) as (hand, replica, task):
        replica.end = EngineLostError("gone")
        replica.reports.put_nowait(make_report(2))
        for _ in range(3):
            assert (await hand.report()).number == 2
            assert not task.done()
        hand.say(2)
        with pytest.raises(EngineLostError, match="gone"):
            await task


async def test_frames_that_are_no_words_of_a_hub_cost_nothing_but_themselves(monkeypatch):
    async with hand_in_hand(monkeypatch) as (hand, replica, task):
        for frame in (b"", b"\xc1", b"\x93\x01", b"\x91\xff", b"\x91" * 5000, bytes(1000)):
            assert hand.post.send(A.encode(), frame)
        hand.say(1, 1, CallOff(["x"]))
        await done(replica, 1)
        assert not task.done()


async def test_a_replica_whose_hub_is_gone_tries_on_and_ends_when_it_is_told_to(monkeypatch):
    async with hand_in_hand(monkeypatch) as (hand, replica, task):
        hand.post.close()
        replica.reports.put_nowait(make_report(2))
        await asyncio.sleep(0.5)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


# ---- against the real hub


async def test_it_follows_the_relay_that_it_is_told_of():
    async with serving() as desk:
        relays = asyncio.Queue()
        connection = desk.hub.open(A, 0)
        async with linked(desk.hub.endpoint, A, Commands(), attach=relays.put_nowait, quiet_s=0.05):
            connection.send_command(Follow("tcp://there"))
            assert await relays.get() == "tcp://there"


async def test_orders_of_many_megabytes_arrive_whole_and_in_order():
    size = 2**20  # tokens, of 4 bytes
    async with serving() as desk:
        connection, replica = desk.hub.open(A, 0), Commands()
        for number in range(12):
            connection.send_command(Submit([make_assignment(str(number), prompt=[number] * size)]))
        async with linked(desk.hub.endpoint, A, replica, quiet_s=0.05):
            await done(replica, 12)
            while connection._unacknowledged:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert replica.did == [("submit", str(number)) for number in range(12)]


async def test_one_order_that_needs_most_of_a_frame_arrives():
    async with serving() as desk:
        connection, replica = desk.hub.open(A, 0), Commands()
        connection.send_command(Abort(["x" * (60 * 2**20)]))
        connection.send_command(CallOff(["y"]))
        async with linked(desk.hub.endpoint, A, replica, quiet_s=0.05):
            await done(replica, 2)
    assert [name for name, _ in replica.did] == ["abort", "call_off"]
