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
from laminar_py.runtime.link import messages as m

UNSENT_S = 0.05  # before the first retry of a frame that the socket did not take
RESEND_S = 1.0  # before a report without an acknowledgement is first sent again


class ReplicaLink:
    """Sends the reports of a replica to the controller, and starts the controller's commands.

    The name of `peer` is the label of the replica's process. `attach` gets the endpoint of another relay. Without
    news the replica reports every `quiet_s`.
    """

    def __init__(
        self, peer: PeerClient, replica: Replica, *, attach: Callable[[str], None], quiet_s: float
    ) -> None:
        self._peer = peer
        self._replica = replica
        self._attach = attach
        self._quiet_s = quiet_s
        self._report_number = 0  # of the last report
        self._reports_received = 0
        self._commands_received = 0
        self._acknowledged_event = asyncio.Event()
        self._answers: list[m.Reply] = []

    async def run(self) -> None:
        """Send reports and start commands until cancelled; then close the connection.

        Raises the error that ended the replica, after its last report is acknowledged.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(tasks), name="commands")
                tasks.create_task(self._send_reports(), name="reports")
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise error from error.__cause__  # the process looks for a bug in the cause
        finally:
            self._peer.close()

    async def _send_reports(self) -> None:
        """Send the replica's reports until cancelled, each after the acknowledgement of the report before it."""
        quiet_s = 0.0  # the first report is sent at once: commands wait for it
        while True:
            report = await self._replica.next_report(quiet_s)
            quiet_s = self._quiet_s
            answers, self._answers = self._answers, []
            self._report_number += 1
            await self._send_report(report, tuple(answers))

    async def _send_report(self, report: ReplicaReport, answers: tuple[m.Reply, ...]) -> None:
        """Send a report, after ever longer waits, until acknowledged; each frame acknowledges all commands."""
        unsent_s, wait_s = UNSENT_S, RESEND_S
        while self._reports_received < self._report_number:
            self._acknowledged_event.clear()
            number, received = self._report_number, self._commands_received
            frame = m.ReportFrame(number=number, commands_received=received, report=report, answers=answers)
            if self._peer.send(encode(frame)):
                await self._wait_acknowledged(wait_s)
                wait_s = min(max(RESEND_S, self._quiet_s), 2 * wait_s)
            else:
                await self._wait_acknowledged(unsent_s)
                unsent_s = min(RESEND_S, 2 * unsent_s)

    async def _wait_acknowledged(self, timeout_s: float) -> None:
        """Wait until the newest report is acknowledged, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._acknowledged_event.wait()

    async def _listen(self, tasks: asyncio.TaskGroup) -> None:
        """Receive acknowledgements and commands until cancelled; start each command once, in order."""
        while True:
            frame = read_record(m.CommandFrame, await self._peer.receive(), "the controller")
            if frame is None:
                continue
            self._reports_received = max(self._reports_received, frame.reports_received)
            if self._reports_received >= self._report_number:
                self._acknowledged_event.set()
            for number, data in enumerate(frame.commands, frame.first):
                if number == self._commands_received + 1:
                    self._commands_received = number
                    await self._start_command(decode(m.Command, data), tasks)  # type: ignore[arg-type]

    async def _start_command(self, command: m.Command, tasks: asyncio.TaskGroup) -> None:
        """Start a command; a command that waits for the engine may still run when the next command starts."""
        replica = self._replica
        waits: Coroutine[object, object, None] | None = None
        match command:
            case m.Submit(assignments):
                replica.start_assignments(assignments)
            case m.CallOff(names):
                replica.call_off(names)
            case m.Follow(relay):
                self._attach(relay)
            case m.Expect(id, version, trajectory_ids):
                self._answer(m.Reply(id, promised=replica.expect(version, trajectory_ids)))
            case m.Abort(trajectory_ids):
                waits = replica.abort(trajectory_ids)
            case m.GiveUp(trajectory_ids):
                waits = replica.give_up(trajectory_ids)
            case m.Stop(evaluations):
                waits = replica.stop(evaluations=evaluations)
            case m.Look(id):
                waits = self._survey(id)
            case m.Hold(id, mode):
                waits = self._done(id, replica.hold(mode))
            case m.Unhold(id):
                waits = self._done(id, replica.unhold())
        if waits is not None:
            tasks.create_task(waits)
            await asyncio.sleep(0)  # the task starts before the next command

    async def _survey(self, id: int) -> None:
        self._answer(m.Reply(id, survey=await self._replica.survey()))

    async def _done(self, id: int, work: Coroutine[object, object, None]) -> None:
        """Answer once `work` is done."""
        await work
        self._answer(m.Reply(id))

    def _answer(self, answer: m.Reply) -> None:
        """Put an answer into the next report, and have that report leave at once."""
        self._answers.append(answer)
        self._replica.report_soon()
