"""Single bytes of a closed run are changed at random, and every change is found.

With a seal all are. Without one, all that change anything that can be read, from the ledger or from segments by
reference: what has no reference is read by nobody, and SQLite leaves bytes
unused (free pages, the space between cells of a page, counters of its header), and nothing depends on comments and
spaces in the text of the schema.
"""

import random
import re
import sqlite3
import struct

import pytest

from laminar_lab.audit.checks import Rule, Violation
from laminar_lab.audit.verify import prove, verify
from laminar_py.ledger.database import LEDGER_NAME, reading, segments_path
from laminar_py.ledger.pieces import piece_rows
from laminar_py.ledger.seal import seal_run
from laminar_py.ledger.segments.frames import frame_digest
from laminar_py.ledger.segments.writer import segments_in
from laminar_py.records.columns import token_values
from laminar_py.records.events import (
    Assigned,
    Checkpointed,
    Dropped,
    Restamped,
    StreamLost,
    VersionLoaded,
)
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind
from tests.builders import make_evaluated
from tests.depth import examples
from tests.ledger.runs import (
    begin,
    consume,
    issue,
    make_ready,
    open_ledger,
    run_to,
    score,
    store,
    store_columns,
    tokens,
    undo_since,
)

# changes; without a seal each costs a tenth of a second
SEALED, OPEN, PAYLOAD = examples(1000), examples(150), examples(50)


async def closed_run(run):
    """A bit of everything that a ledger has."""
    async with open_ledger(run) as ledger:
        begin(ledger, drain=False, max_staleness=3, versions=(0, 1))
        ledger.append(VersionLoaded(replica=0, version=1, digest="digest1", elapsed_s=0.1, checksum="aa-bb"))
        for index in range(6):
            id = f"g{index}.0"
            make_ready(ledger, id, spans=((0, 0, 3), (1, 3, 7)), index=index, recorded=index < 2)
            if index in (0, 5):
                store_columns(ledger, id, {"token_rewards": token_values(tokens(id, 0, 7)[1])})
        ledger.append_all(consume(1, 1, "g0.0", "g1.0", "g2.0"))
        ledger.append(Checkpointed(step=1, version=1, path="checkpoints/step-1", stall_s=0.1, elapsed_s=0.4))
        ledger.append_all(consume(2, 1, "g3.0"))
        ledger.append_all(await undo_since(ledger, 1, reason="learner_crashed"))
        ledger.append(Dropped("g4.0", DropReason.STALE, "staleness 4"))
        issue(ledger, "g9.0", index=9)
        run_to(ledger, "g9.0", [(1, 0, 4)], recorded=True)
        ledger.append(StreamLost("g9.0", 0, 4))
        ledger.append(Restamped("g9.0", (Span(0, 0, 1), Span(1, 1, 4))))
        store_columns(ledger, "g9.0", {"token_rewards": token_values(tokens("g9.0", 0, 4)[1])})
        issue(ledger, "g9.1", index=9)
        ledger.append(Assigned("g9.1", 0, 1, 0))
        issue(ledger, "e0-heldout.0", kind=Kind.EVAL)
        run_to(ledger, "e0-heldout.0", [(1, 0, 7)])
        score(ledger, "e0-heldout.0", [(1, 0, 7)])
        ledger.append(make_evaluated(1.0, version=1, step=1, problems=1, length=7))


def files_of(run):
    """The ledger and the one segment."""
    return [run / LEDGER_NAME, *segments_in(segments_path(run))]


def referred_bytes(run):
    """Places in the one segment that references lead to."""
    with reading(run) as connection:
        found = [row.ref for row in piece_rows(connection)]
    return {place for ref in found for place in range(ref.offset, ref.offset + ref.num_bytes)}


def changes(files, count, *, seed):
    """File, place and another byte, seeded; half of the places hold something, most of the rest is empty."""
    rng = random.Random(seed)
    places = [(file, place, byte) for file in files for place, byte in enumerate(file.read_bytes())]
    full = [(file, place) for file, place, byte in places if byte]
    for index in range(count):
        file, place = rng.choice(full) if index % 2 else rng.choice(places)[:2]
        yield file, place, rng.randrange(1, 256)


def flip(file, place, by):
    """Change one byte; doing it twice changes nothing."""
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ by]))


def findings(run):
    """What verify says, also where it can read nothing: one line each."""
    try:
        found = [str(finding) for finding in verify(run)]
    except ValueError as error:
        found = [str(error)]
    assert not any("\n" in line for line in found)
    return found


async def test_every_change_of_a_byte_of_a_sealed_run_is_found(tmp_path):
    await closed_run(tmp_path)
    seal_run(tmp_path)
    files = files_of(tmp_path)
    for file, place, by in changes(files, SEALED, seed=1):
        flip(file, place, by)
        named = str(file.relative_to(tmp_path))
        assert any(line.startswith(f"law 11: seal: {named}: was changed") for line in seal_findings(tmp_path)), (
            place,
            by,
        )
        flip(file, place, by)
    assert prove(tmp_path).violations == []


async def test_without_a_seal_every_change_of_what_can_be_read_is_found(tmp_path):
    await closed_run(tmp_path)
    files, referred = files_of(tmp_path), referred_bytes(tmp_path)
    whole, unused = readable(tmp_path), 0
    assert verify(tmp_path) == []
    for file, place, by in [*changes(files, OPEN, seed=2), *changes(files[1:], PAYLOAD, seed=3)]:
        flip(file, place, by)
        if not findings(tmp_path):
            where = f"byte {place} of {file.name} ^ {by}"
            assert file.name == LEDGER_NAME or (file.parent.name == "segments" and place not in referred), where
            assert readable(tmp_path) == whole, f"byte {place} ^ {by} changes what is read, and is not found"
            unused += 1
        flip(file, place, by)
    assert unused < OPEN * 0.8
    assert verify(tmp_path) == []


async def test_tokens_with_log_probabilities_of_another_number_are_a_finding(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        ledger.append(Assigned("g0.0", 0, 1, 0))
        with pytest.raises(AssertionError, match="16 bytes of logprobs"):
            store(ledger, "g0.0", 0, 5, (Span(0, 0, 5),), logprobs=tokens("g0.0", 0, 4)[1])
        store(ledger, "g0.0", 0, 5, (Span(0, 0, 5),))
    assert findings(tmp_path) == []
    forge_shorter(tmp_path)
    found = findings(tmp_path)
    assert any("36 bytes of arrays instead of 40" in line for line in found), found


def forge_shorter(run):
    """Leave out the last log-probability of the one piece, with digests as they are to be then."""
    (segment,) = segments_in(segments_path(run))
    kind, size, length, _ = struct.unpack_from("<4sIQ16s", whole := segment.read_bytes())
    body = whole[struct.calcsize("<4sIQ16s") :][: size + length - 4]
    digest = frame_digest(body[:size], body[size:])
    forged = struct.pack("<4sIQ16s", kind, size, length - 4, digest) + body
    segment.write_bytes(forged)
    connection = sqlite3.connect(run / LEDGER_NAME)
    with connection:
        connection.execute("UPDATE piece SET num_bytes = ?, digest = ?", (len(forged), digest))
    connection.close()


def seal_findings(run):
    """As `findings`, by the seal alone: what the laws say is the other test's."""
    from laminar_py.ledger.seal import differences, read_seal

    return [str(Violation(Rule.SEAL, *difference)) for difference in differences(run, read_seal(run))]


def readable(run):
    """Everything that SQL can see, but for comments in the schema."""
    connection = sqlite3.connect(f"file:{run / LEDGER_NAME}?mode=ro&immutable=1", uri=True)
    connection.text_factory = bytes
    try:
        schema = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name").fetchall()
        text = [
            b" ".join(re.sub(rb"--[^\n]*", b"", b" ".join(map(bytes, filter(None, row)))).split())
            for row in schema
        ]
        tables = [row[1].decode() for row in schema if row[0] == b"table"]
        rows = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
        return text, rows, connection.execute("PRAGMA integrity_check").fetchall()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        return str(error)
    finally:
        connection.close()
