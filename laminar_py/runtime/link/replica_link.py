"""A replica's end of the link: it sends reports, one at a time, and receives commands.

Owned by the replica's process. A report is resent, after ever longer waits, until the controller acknowledges it.
News gathers at the same time for the next report, so reports become fewer when the controller has more to do.
Commands start once, in the order in which the controller sent them (`tests/link/test_replica_link.py`).
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from laminar_py.records.codec import decode, encode
from laminar_py.records.replica import ReplicaReport
from laminar_py.relay.sockets import PeerClient, read_record
from laminar_py.rollout.replica import Replica
from laminar_py.runtime.link.messages import (
    Abort,
    CallOff,
    Command,
    CommandFrame,
    Expect,
    Follow,
    GiveUp,
    Look,
    Reply,
    ReportFrame,
    Stop,
    Submit,
)

UNSENT_S = 0.05  # before the first retry of a frame that could not be sent
RESEND_S = 1.0  # before a report without an acknowledgement is first sent again


class ReplicaLink:
    """Connects one life of a replica with the controller; `peer` has the label of its segments as its name."""

    def __init__(
        self,
        peer: PeerClient,
        replica: Replica,
        *,
        attach: Callable[[str], None],
        quiet_s: float,
    ) -> None:
        self._peer = peer
        self._replica = replica
        self._attach = attach
        self._quiet_s = quiet_s
        self._number = 0  # of the last report
        self._reports_received = 0
        self._commands_received = 0
        self._acknowledged_event = asyncio.Event()
        self._answers: list[Reply] = []

    async def run(self) -> None:
        """Serve until cancelled.

        Raises the error that ended the replica, after its last report is acknowledged.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(tasks), name="commands")
                tasks.create_task(self._send_reports(), name="reports")
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise error from error.__cause__  # which says whether it is a mistake of ours
        finally:
            self._peer.close()

    async def _send_reports(self) -> None:
        """Send one report after the other, each after the acknowledgement of the last."""
        quiet_s = 0.0  # the first report is sent at once: commands wait for it
        while True:
            report = await self._replica.next_report(quiet_s)
            quiet_s = self._quiet_s
            answers, self._answers = self._answers, []
            self._number += 1
            await self._send_report(report, tuple(answers))

    async def _send_report(self, report: ReplicaReport, answers: tuple[Reply, ...]) -> None:
        """Send a report until the controller acknowledges it; each frame acknowledges the received commands."""
        unsent_s, wait_s = UNSENT_S, RESEND_S
        while self._reports_received < self._number:
            self._acknowledged_event.clear()
            up = ReportFrame(
                number=self._number,
                commands_received=self._commands_received,
                report=report,
                answers=answers,
            )
            if self._peer.send(encode(up)):
                await self._wait_acknowledged(wait_s)
                wait_s = min(max(RESEND_S, self._quiet_s), 2 * wait_s)
            else:
                await self._wait_acknowledged(unsent_s)
                unsent_s = min(RESEND_S, 2 * unsent_s)

    async def _wait_acknowledged(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._acknowledged_event.wait()

    async def _listen(self, tasks: asyncio.TaskGroup) -> None:
        """Receive frames of the controller until cancelled, and start each command once, in order."""
        while True:
            down = read_record(CommandFrame, await self._peer.receive())
            if down is None:
                continue
            self._reports_received = max(self._reports_received, down.reports_received)
            if self._reports_received >= self._number:
                self._acknowledged_event.set()
            for number, data in enumerate(down.commands, down.first):
                if number == self._commands_received + 1:
                    self._commands_received = number
                    await self._start_command(decode(Command, data), tasks)  # type: ignore[arg-type]

    async def _start_command(self, command: Command, tasks: asyncio.TaskGroup) -> None:
        """Start a command; a command that waits for the engine may still run when the next command starts."""
        replica = self._replica
        waits: Coroutine[object, object, None] | None = None
        match command:
            case Submit(assignments):
                replica.start_assignments(assignments)
            case CallOff(names):
                replica.call_off(names)
            case Follow(relay):
                self._attach(relay)
            case Expect(id, version, trajectory_ids):
                self._answer(Reply(id, promised=replica.expect(version, trajectory_ids)))
            case Abort(trajectory_ids):
                waits = replica.abort(trajectory_ids)
            case GiveUp(trajectory_ids):
                waits = replica.give_up(trajectory_ids)
            case Stop(evaluations):
                waits = replica.stop(evaluations=evaluations)
            case Look(id):
                waits = self._survey(id)
        if waits is not None:
            tasks.create_task(waits)
            await asyncio.sleep(0)  # it starts now

    async def _survey(self, id: int) -> None:
        self._answer(Reply(id, survey=await self._replica.survey()))

    def _answer(self, answer: Reply) -> None:
        self._answers.append(answer)
        self._replica.report_soon()
