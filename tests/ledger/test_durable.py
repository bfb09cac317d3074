"""What a power cut may undo: a second of the log, and nothing that weights were trained by or files deleted by."""

import sqlite3

import pytest

from laminar_py.ledger.database import LEDGER_NAME, open_writer
from laminar_py.ledger.writer import Stamped, Unwritten, Writer
from laminar_py.records.events import PartStarted, RunEnded, SealBroken
from tests.ledger.runs import begin, checkpoint, consume, make_ready, open_ledger
from tests.ledger.syncs import CALLS, without_sync


def batch(seq, event):
    return Unwritten(events=[Stamped(seq, 0.0, 0.0, event)])


def modes_of_commits(statements):
    """The setting under which each transaction was committed."""
    mode, found = "", []
    for statement in statements:
        mode = statement.rpartition(" ")[2] if statement.startswith("PRAGMA synchronous") else mode
        found += [mode] if statement == "COMMIT" else []
    return found


async def test_steps_and_checkpoints_are_committed_with_a_sync_and_all_else_without(tmp_path):
    statements = []
    async with open_ledger(tmp_path) as ledger:
        ledger._writer._connection.set_trace_callback(statements.append)
        begin(ledger)
        await ledger.commit()
        make_ready(ledger, "g0.0")
        await ledger.commit()
        ledger.append_all(consume(1, 0, "g0.0"))
        await ledger.commit()
        make_ready(ledger, "g1.0", index=1)
        await ledger.commit()
        make_ready(ledger, "g2.0", index=2)
        ledger.append(checkpoint(1, 0))
        await ledger.commit()
        ledger._writer._connection.set_trace_callback(None)
    assert modes_of_commits(statements) == ["NORMAL", "NORMAL", "FULL", "NORMAL", "FULL"]


@pytest.mark.skipif(not CALLS, reason="the kernel's numbers are not known")
@pytest.mark.parametrize(
    "event", [checkpoint(1, 0), SealBroken("9f"), RunEnded(1, "finished"), *consume(1, 0, "g")]
)
def test_where_the_disk_cannot_sync_such_a_batch_fails_and_another_is_written(tmp_path, event):
    writer = Writer(open_writer(tmp_path / LEDGER_NAME), host="host-1")
    writer.write(batch(1, PartStarted("learner-0", 1)))  # the first one begins SQLite's log, with a sync
    without_sync(writer.write, batch(2, PartStarted("replica-0", 2)))
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        without_sync(writer.write, batch(3, event))
    assert writer.seq == 2
    writer.write(batch(3, event))
    writer.close()
