"""A replica's end of the link: its reports go out, one at a time, and orders come in.

Owned by the replica's process. A report is sent until the controller says that it was told, after ever longer
waits; what happens meanwhile gathers for the next, so reports become fewer as the controller has more to do.
Invariant: orders are obeyed once, in the order in which they were given, by calls that begin in that order.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from laminar_py.records.codec import decode, encode
from laminar_py.records.replica import Assignment, ReplicaReport, Survey
from laminar_py.relay.sockets import PeerClient, read_record
from laminar_py.runtime.link.messages import (
    Abort,
    CallOff,
    Down,
    Expect,
    Follow,
    GiveUp,
    Look,
    Order,
    Reply,
    Stop,
    Submit,
    Up,
)

UNSENT_S = 0.05  # after which what could not be sent is tried again, at first
RESEND_S = 1.0  # after which a report that was not told is sent again, at first
ACKNOWLEDGE_S = 0.5  # in which a report may say that orders were heard, before a word of its own does


class Commanded(Protocol):
    """A replica, as the link needs it (`rollout.replica.Replica`)."""

    def start_assignments(self, assignments: Sequence[Assignment]) -> None:
        """Start these."""
        ...

    async def abort(self, trajectory_ids: Sequence[str]) -> None:
        """End these."""
        ...

    async def give_up(self, trajectory_ids: Sequence[str]) -> None:
        """End these, and report them at once."""
        ...

    def call_off(self, names: Sequence[str]) -> None:
        """Expect these no more."""
        ...

    async def stop(self, *, evaluations: bool) -> None:
        """Interrupt all training, and evaluations too."""
        ...

    async def survey(self) -> Survey:
        """Tell all that it has now."""
        ...

    def expect(self, version: int, trajectory_ids: Sequence[str]) -> bool:
        """Promise to keep a version, or not."""
        ...

    def report_soon(self) -> None:
        """Have the next report go out at once."""
        ...

    async def next_report(self, timeout_s: float) -> ReplicaReport:
        """The next report."""
        ...


class ReplicaLink:
    """Carries one life of a replica, under the label of its segments."""

    def __init__(
        self,
        peer: PeerClient,
        label: str,
        replica: Commanded,
        *,
        attach: Callable[[str], None],
        quiet_s: float,
    ) -> None:
        self._peer = peer
        self._label = label
        self._replica = replica
        self._attach = attach
        self._quiet_s = quiet_s
        self._number = 0  # of the last report
        self._told = 0
        self._heard = 0  # orders
        self._acknowledged = 0  # orders of which the controller knows that they were heard, unless a word was lost
        self._was_told = asyncio.Event()
        self._answers: list[Reply] = []

    async def run(self) -> None:
        """Serve until cancelled. Raises what ended the replica, after its last report was told."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(tasks), name="orders")
                tasks.create_task(self._tell(), name="reports")
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise error from error.__cause__  # which says whether it is a mistake of ours
        finally:
            self._peer.close()

    async def _tell(self) -> None:
        await self._greet()
        while True:
            report = await self._replica.next_report(self._quiet_s)
            answers, self._answers = self._answers, []
            self._number += 1
            await self._tell_one(report, tuple(answers))

    async def _greet(self) -> None:
        """Say that it is there, for orders wait for that."""
        while not self._peer.send(self._word()):  # noqa: ASYNC110 (nobody tells when the connection is there)
            await asyncio.sleep(UNSENT_S)

    async def _tell_one(self, report: ReplicaReport, answers: tuple[Reply, ...]) -> None:
        """Send a report until it is told."""
        unsent_s, wait_s = UNSENT_S, RESEND_S
        while self._told < self._number:
            self._was_told.clear()
            if self._peer.send(self._word(report, answers)):
                await self._until_told(wait_s)
                wait_s = min(max(RESEND_S, self._quiet_s), 2 * wait_s)
            else:
                await self._until_told(unsent_s)
                unsent_s = min(RESEND_S, 2 * unsent_s)

    async def _until_told(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._was_told.wait()

    def _word(self, report: ReplicaReport | None = None, answers: tuple[Reply, ...] = ()) -> bytes:
        self._acknowledged = self._heard
        up = Up(label=self._label, number=self._number, heard=self._heard, report=report, answers=answers)
        return encode(up)

    def _acknowledge(self) -> None:
        """Tell of orders that no report has told of."""
        if self._acknowledged < self._heard and not self._peer.closed:
            self._peer.send(self._word())

    async def _listen(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            down = read_record(Down, await self._peer.receive())
            if down is None:
                continue
            self._told = max(self._told, down.told)
            if self._told >= self._number:
                self._was_told.set()
            if down.orders:
                self._acknowledged = min(self._acknowledged, down.first - 1)  # what comes again was not told of
            for number, order in enumerate(down.orders, down.first):
                if number == self._heard + 1:
                    self._heard = number
                    await self._obey(decode(Order, order), tasks)  # type: ignore[arg-type]
            if down.orders:
                asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._acknowledge)

    async def _obey(self, order: Order, tasks: asyncio.TaskGroup) -> None:
        """Begin what is ordered; it may go on beside what comes next."""
        replica = self._replica
        match order:
            case Submit(assignments):
                replica.start_assignments(assignments)
            case CallOff(names):
                replica.call_off(names)
            case Follow(relay):
                self._attach(relay)
            case Expect(id, version, trajectory_ids):
                self._answer(Reply(id, promised=replica.expect(version, trajectory_ids)))
            case Abort() | GiveUp() | Stop() | Look():
                tasks.create_task(self._carry_out(order))
                await asyncio.sleep(0)  # it begins now

    async def _carry_out(self, order: Abort | GiveUp | Stop | Look) -> None:
        match order:
            case Abort(trajectory_ids):
                await self._replica.abort(trajectory_ids)
            case GiveUp(trajectory_ids):
                await self._replica.give_up(trajectory_ids)
            case Stop(evaluations):
                await self._replica.stop(evaluations=evaluations)
            case Look(id):
                self._answer(Reply(id, survey=await self._replica.survey()))

    def _answer(self, answer: Reply) -> None:
        self._answers.append(answer)
        self._replica.report_soon()
