"""What a run tells its trackers, and the processes that they are in. Owned by the controller.

Invariant: nothing in a run waits for a tracker, and none can end it. What is told waits in a bounded queue; a
tracker that is slow or gone costs its own messages, which are counted. A tracker's process that dies is started
anew, and goes on with the tracker's run.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import msgspec

from laminar_py.config.run import RunConfig
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import TokenMetrics
from laminar_py.telemetry.stats import StepRow
from laminar_py.telemetry.summary import Summary
from laminar_py.telemetry.tracker_process import ANSWER, Closing, Message, Undone, Values, frame
from laminar_py.telemetry.trackers import Opening, Setting

log = logging.getLogger(__name__)

QUEUED = 1000  # messages of some 5 kB; when it is full the newest is dropped, so nobody ever waits to put one in
RETRY_S = 60.0  # after a death
CLOSE_S = 30.0  # for all that is queued and the tracker's own end
FAILED_CLOSE_S = 5.0


class TrackerLink:
    """One tracker in a process of its own; messages go one by one, each is answered."""

    def __init__(self, opening: Opening, *, errors: Path, queued: int = QUEUED, retry_s: float = RETRY_S) -> None:
        self._opening = opening
        self._errors = errors
        self._retry_s = retry_s
        self._queue: asyncio.Queue[Message] = asyncio.Queue(queued)
        self._told = self._delivered = 0  # messages
        self._warned = False
        self._closing = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def undelivered(self) -> int:
        """Messages that were dropped, or wait."""
        return self._told - self._delivered

    def start(self) -> None:
        """Begin to deliver. Not a task of the run's group: its fate must not be the run's."""
        self._task = asyncio.create_task(self._run(), name=f"tracker-{self._opening.kind}")

    def tell(self, message: Message) -> None:
        """Never waits."""
        self._told += 1
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._warn(f"{self._queue.qsize()} wait for it")

    async def close(self, summary: dict[str, float] | None, *, limit_s: float) -> None:
        """Deliver what is queued and the summary, in this time at most; then its process is gone."""
        assert self._task is not None, "a tracker is started before it is closed"
        self._closing.set()
        self._told += 1
        try:
            async with asyncio.timeout(limit_s):
                await self._queue.put(Closing(summary))
                await asyncio.wait([self._task])
        except TimeoutError:
            self._warn(f"it was not done {limit_s:g} s after the run")
        finally:
            self._task.cancel()
            await self._end()
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.warning("tracker %s: %s: %s", self._opening.kind, type(error).__name__, error)
        if self.undelivered:
            log.warning("tracker %s: %d messages did not arrive", self._opening.kind, self.undelivered)

    async def _run(self) -> None:
        message: Message | None = None
        while not isinstance(message, Closing):
            message = await self._queue.get()
            try:
                await self._deliver(message)
                self._delivered += 1
            except (OSError, EOFError):  # its process is gone
                await self._end()
                self._warn(self._last_words())
            finally:
                self._queue.task_done()
            if self._process is None and not await self._may_retry():
                return

        if self._process is not None:
            await self._process.wait()

    async def _may_retry(self) -> bool:
        """After a while; not once the run is over."""
        if self._closing.is_set():
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._retry_s):
                await self._closing.wait()
        return True

    async def _deliver(self, message: Message) -> None:
        if self._process is None:
            with self._errors.open("ab") as errors:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "laminar_py.telemetry.tracker_process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for the controller
                )
            await self._exchange(frame(self._opening))
        await self._exchange(frame(message))

    async def _exchange(self, data: bytes) -> None:
        process = self._process
        assert process is not None, "messages go to a process"
        assert process.stdin is not None, "which has pipes"
        assert process.stdout is not None, "both ways"
        process.stdin.write(data)
        await process.stdin.drain()
        await process.stdout.readexactly(len(ANSWER))

    async def _end(self) -> None:
        """End its process, which has nothing more to say."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _warn(self, reason: str) -> None:
        if not self._warned:
            log.warning("tracker %s: messages are dropped: %s", self._opening.kind, reason)
        self._warned = True

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").splitlines() if self._errors.is_file() else []
        return f"its process died ({lines[-1] if lines else 'without a word'}), see {self._errors}"


class Tracking:
    """All trackers of a run."""

    def __init__(self, config: RunConfig, run: RunFolder, *, resumed: bool) -> None:
        project = config.tracking.project or config.name
        settings = flat_settings(config.model_dump(mode="json"))
        self._links = [
            TrackerLink(
                Opening(kind=kind, folder=str(run.path), name=run.name, project=project, settings=settings),
                errors=run.logs / f"tracker-{kind}.log",
            )
            for kind in config.tracking.kinds
        ]
        self._next = 0 if resumed else 1  # the step that comes if nothing is undone; 0: none does

    def start(self) -> None:
        """Begin to deliver."""
        for link in self._links:
            link.start()

    def step(self, row: StepRow) -> None:
        """A committed step. One that is not the next was rolled back to, or resumed from."""
        if row.step != self._next:
            self._tell(Undone(row.step - 1))
        self._next = row.step + 1
        self._tell(Values(row.step, flat_row(row)))

    def evaluated(self, result: Evaluated) -> None:
        """A held-out accuracy; at the step of its version, which may be long past."""
        values = {"eval/accuracy": result.accuracy, "eval/version": result.version, "eval/rl_s": result.rl_s}
        self._tell(Values(result.step, values))

    async def close(self, summary: Summary | None) -> None:
        """The run is over; without a summary it failed."""
        values = None if summary is None else flat_summary(summary)
        limit_s = FAILED_CLOSE_S if summary is None else CLOSE_S
        await asyncio.gather(*(link.close(values, limit_s=limit_s) for link in self._links))

    def _tell(self, message: Message) -> None:
        for link in self._links:
            link.tell(message)


# ---- names


def flat_row(row: StepRow) -> dict[str, float]:
    """A row of `metrics.jsonl` under the names of docs/metrics.md, e.g. `staleness_3-4/kl_behaviour_k3`."""
    values: dict[str, float] = {}
    for name, value in asdict(row).items():
        if name == "by_staleness":
            for bucket, metrics in value.items():
                place = f"staleness_{bucket.replace('+', '_up')}"  # MLflow takes no plus sign
                values |= {f"{place}/{key}": one for key, one in metrics.items()}
        elif value is not None:
            values[f"{_group(name)}{name}"] = value
    return values


def _group(name: str) -> str:
    return "tokens/" if name in TokenMetrics.__struct_fields__ else "run/"


def flat_summary(summary: Summary) -> dict[str, float]:
    """Its numbers, e.g. `summary/trajectories/consumed`; evaluations have been told."""
    leaves = _leaves(msgspec.to_builtins(summary), "/")
    return {f"summary/{name}": float(value) for name, value in leaves.items() if isinstance(value, int | float)}


def flat_settings(tree: Mapping[str, object]) -> dict[str, Setting]:
    """A config with dotted names; lists as text, and nothing for what is null."""
    leaves = {name: value for name, value in _leaves(tree, ".").items() if value is not None}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in leaves.items()
    }


def _leaves(tree: Mapping[str, object], separator: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{below}": leaf for below, leaf in _leaves(value, separator).items()}
        else:
            found[name] = value
    return found
