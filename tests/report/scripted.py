"""Runs written by hand: events at chosen seconds, so that what the analytics say can be computed on paper."""

from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from laminar_py.config.loading import dump_config, load_config
from laminar_py.ledger.database import LEDGER_NAME
from laminar_py.ledger.ledger import Ledger
from laminar_py.records.events import (
    Assigned,
    Dropped,
    Ready,
    Scored,
    VersionLoaded,
)
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind
from tests.events import finished
from tests.ledger.runs import begin, consume, digest_of, issue, payload_of, publish, store

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
WITH_ENVIRONMENT = "environment={kind: class, path: guess.py:Guess, at_once: 8}"
TURNS = (Span(0, 0, 2), Span(None, 2, 4), Span(0, 4, 5))  # of a response of five tokens


class Script:
    """A ledger and the second that it is."""

    def __init__(self, ledger, clock):
        self._ledger = ledger
        self._clock = clock

    def at(self, second, *events):
        """These happen now."""
        self._clock.second = second
        self._ledger.append_all(events)

    def issue(self, second, id, *, replica=0, index=0, kind=Kind.TRAIN):
        """Issued and handed to a replica at once."""
        self._clock.second = second
        issue(self._ledger, id, kind=kind, index=index)
        self.at(second, Assigned(id, replica, 1, 0))

    def finish(self, second, id, *, length=5, version=0, spans=None, epoch=1, **times):
        """All its tokens come at once."""
        self._clock.second = second
        spans = spans or (Span(version, 0, length),)
        store(self._ledger, id, 0, length, spans)
        self.at(
            second,
            finished(
                id,
                spans,
                epoch=epoch,
                digest=digest_of(self._ledger, id),
                **{"queue_s": 0.0, "generate_s": 1.0, **times},
            ),
        )

    def score(self, second, id, *, reward=1.0, elapsed_s=0.0):
        """Its reward is there, and its group complete."""
        self.at(second, Scored(trajectory_id=id, reward=reward, elapsed_s=elapsed_s), Ready(id, 0.5))

    def drop(self, second, id, reason=DropReason.STALE):
        """For good."""
        self.at(second, Dropped(id, reason))

    def step(self, second, number, *ids, elapsed_s=1.0, waited_s=0.0, reference_s=0.0, version=0):
        """Committed now."""
        took = {"elapsed_s": elapsed_s, "waited_s": waited_s, "reference_s": reference_s}
        self.at(second, *consume(number, version, *ids, staleness=version, **took))

    def publish(self, second, version, *, stall_s=0.0, num_bytes=10):
        """On record now."""
        self._clock.second = second
        publish(self._ledger, version, stall_s=stall_s, num_bytes=num_bytes)

    def load(self, second, version, *, replica=0, elapsed_s=0.0):
        """Served by a replica from now on."""
        digest = f"digest{version}"
        self.at(second, VersionLoaded(replica=replica, version=version, digest=digest, elapsed_s=elapsed_s))


class Clock:
    """It is when the script says."""

    second = 0.0

    def now(self):
        return self.second


@asynccontextmanager
async def scripted(run, *overrides, command_s=None):
    """A run with the quickstart's config, begun at second 0 with version 0."""
    (run / "config.yaml").write_text(dump_config(load_config(CONFIG, list(overrides))))
    clock = Clock()
    ledger = Ledger(run / LEDGER_NAME, host="host-1", clock=clock)
    await ledger.start()
    script = Script(ledger, clock)
    wall = patch("laminar_py.ledger.ledger.time", SimpleNamespace(time=lambda: clock.second))
    wall.start()
    try:
        begin(ledger, versions=(), command_s=command_s)
        script.publish(0.0, 0)
        yield script
    finally:
        wall.stop()
        await ledger.close()
        payload_of(ledger).writer.close()
