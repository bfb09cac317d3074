"""Law 1 over random histories, through the real file."""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import LEDGER_NAME
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.machine import IllegalEventError
from laminar_py.records.events import (
    Assigned,
    Consumed,
    Dropped,
    Interrupted,
    Ready,
    Scored,
    Undone,
)
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason
from tests.builders import make_prompt
from tests.depth import examples
from tests.events import finished, issued
from tests.ledger.runs import Ticks, begin, digest_of, payload_of, store

IDS = st.integers(0, 5).map(lambda i: f"g0.{i}")
LEGAL = {  # what leads from where to where
    "assigned": ({"queued", "interrupted"}, "running"),
    "interrupted": ({"running"}, "interrupted"),
    "finished": ({"running"}, "finished"),
    "scored": ({"finished"}, "scored"),
    "ready": ({"scored"}, "ready"),
    "consumed": ({"ready"}, "consumed"),
    "undone": ({"consumed"}, "ready"),
    "dropped": ({"queued", "running", "interrupted", "finished", "scored", "ready"}, "dropped"),
}


class Histories(RuleBasedStateMachine):
    """Random events, legal or not, against a model of a dozen lines."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.run_folder = Path(self.folder.name)
        self.loop = asyncio.new_event_loop()
        self.status, self.length, self.epoch = {}, Counter(), Counter()
        self.open()
        begin(self.ledger)
        self.ledger.store_prompt(make_prompt())

    def wait(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def open(self):
        self.ledger = Ledger(self.run_folder / LEDGER_NAME, host="host-1", clock=Ticks())
        self.wait(self.ledger.start())

    @rule(id=IDS)
    def issue(self, id):
        if id not in self.status:
            self.ledger.append(issued(id))
            self.status[id] = "queued"

    @rule(id=IDS, count=st.integers(1, 4))
    def grow(self, id, count):
        start = self.length[id]
        try:
            store(self.ledger, id, start, start + count, (Span(0, start, start + count),))
        except IllegalEventError:
            assert self.status.get(id) != "running"
        else:
            assert self.status[id] == "running"
            self.length[id] += count

    @rule(id=IDS, name=st.sampled_from(sorted(LEGAL)))
    def move(self, id, name):
        before, after = LEGAL[name]
        try:
            self.ledger.append(self.event(name, id))
        except IllegalEventError:
            assert self.status.get(id) not in before
        else:
            assert self.status[id] in before
            self.status[id] = after
            self.epoch[id] += name == "assigned"

    def event(self, name, id):
        length, epoch = self.length[id], self.epoch[id]
        spans = (Span(0, 0, length),) if length else ()
        return {
            "assigned": Assigned(id, 0, epoch + 1, length),
            "interrupted": Interrupted(trajectory_id=id, epoch=epoch, length=length, reason="replica_crashed"),
            "finished": finished(id, spans, epoch=epoch, digest=digest_of(self.ledger, id)),
            "scored": Scored(trajectory_id=id, reward=1.0, elapsed_s=0.1),
            "ready": Ready(id, 0.5),
            "consumed": Consumed(trajectory_id=id, step=1, version=0, staleness=0, weight=1.0),
            "undone": Undone(id, 1),
            "dropped": Dropped(id, DropReason.STALE),
        }[name]

    @rule()
    def commit(self):
        self.wait(self.ledger.commit())
        assert accounting(self.run_folder) == self.ledger.accounting()

    @rule()
    def reopen(self):
        self.wait(self.ledger.close())
        self.open()

    @invariant()
    def issued_is_consumed_and_dropped_and_live(self):
        train = self.ledger.accounting().train
        counts = Counter(self.status.values())
        assert train.balanced
        assert train.issued == len(self.status)
        assert train.consumed == counts["consumed"]
        assert sum(train.dropped.values()) == counts["dropped"]

    def teardown(self):
        self.wait(self.ledger.close())
        payload_of(self.ledger).writer.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        # the random consumption has no learner step behind it, which is the only thing to find
        assert {str(finding.subject) for finding in verify(self.run_folder)} <= {"step 1"}
        self.folder.cleanup()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)
