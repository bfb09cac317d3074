"""`audit verify` finds every breach and says where it is."""

import sqlite3

import pytest
import yaml
from msgspec.structs import replace

from laminar_lab.audit import replay
from laminar_lab.audit.checks import Rule
from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import LEDGER_NAME, open_writer, reading
from laminar_py.ledger.trajectory import live_rows
from laminar_py.ledger.writer import Stamped, Unwritten, Writer
from laminar_py.records.columns import token_values
from laminar_py.records.events import (
    Alarmed,
    Assigned,
    Consumed,
    Dropped,
    PartStarted,
    Relayed,
    Restamped,
    StreamLost,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, Kind
from tests.builders import make_evaluated, make_experts, make_mask
from tests.ledger.runs import (
    begin,
    consume,
    finish,
    issue,
    make_ready,
    open_ledger,
    replayed,
    run_to,
    score,
    store,
    store_columns,
    tokens,
)


async def good_run(run):
    async with open_ledger(run) as ledger:
        begin(ledger, drain=True, max_staleness=2, versions=(0, 1, 2))
        for index, id in enumerate(("g0.0", "g1.0", "g2.0")):
            make_ready(ledger, id, index=index)
        make_ready(ledger, "e0.0", kind=Kind.EVAL, index=90)
        ledger.append(Dropped("g2.0", DropReason.NO_SIGNAL))
        ledger.append_all(consume(1, 1, "g0.0", "g1.0"))
        ledger.append(consume(-1, 1, "e0.0")[1])
        issue(ledger, "g3.0", index=3)
        run_to(ledger, "g3.0", [(2, 0, 4)], recorded=True)
        store_columns(ledger, "g3.0", {"token_rewards": token_values(tokens("g3.0", 0, 4)[1])})


def edit(run, sql):
    connection = sqlite3.connect(run / LEDGER_NAME)
    with connection:
        assert connection.execute(sql).rowcount == 1
    connection.close()


async def test_a_good_run_has_no_findings(tmp_path):
    await good_run(tmp_path)
    assert verify(tmp_path) == []


@pytest.mark.parametrize(
    ("sql", "law", "subject"),
    [
        (
            "UPDATE event SET body = replace(body, '\"reward\":1.0', '\"reward\":0.0') WHERE seq = 8",
            "log",
            "event 8",
        ),
        ("UPDATE event SET body = CAST(x'ff' AS TEXT) WHERE seq = 8", "log", "event 8"),
        ("UPDATE event SET wall = wall + 1 WHERE seq = 8", "log", "event 8"),
        ("UPDATE event SET subject = 'g1.0' WHERE seq = 8", "log", "event 8"),
        ("DELETE FROM event WHERE seq = 8", "log", "event 8"),
        ("DELETE FROM event WHERE seq = (SELECT max(seq) FROM event)", "log", "end"),
        (
            "INSERT INTO event SELECT seq + 1, wall, mono, host, kind, subject, body, hash FROM event"
            " WHERE seq = (SELECT seq FROM head)",
            "log",
            "end",
        ),
        ("UPDATE trajectory SET reward = 0.5 WHERE id = 'g0.0'", "rows", "g0.0"),
        ("UPDATE trajectory SET status = 'ready' WHERE id = 'g0.0'", "accounting", "train"),
        ("UPDATE trajectory SET status = 'lost' WHERE id = 'g3.0'", "rows", "g3.0"),
        ("UPDATE trajectory SET drop_reason = 'mislaid' WHERE id = 'g2.0'", "drops", "trajectory"),
        ("DELETE FROM trajectory WHERE id = 'g2.0'", "rows", "g2.0"),
        (
            "INSERT INTO trajectory (number, id, group_id, prompt_id, prompt_index, sample_index, kind, status,"
            " first_seq, last_seq, epoch, length) SELECT 99, 'g9.9', group_id, prompt_id, prompt_index,"
            " sample_index, kind, status, 99, 99, 0, 0 FROM trajectory WHERE id = 'g3.0'",
            "rows",
            "g9.9",
        ),
        ("UPDATE version SET digest = 'other' WHERE version = 1", "rows", "version of event 3"),
        ("DELETE FROM step", "rows", "step of event 26"),
        ("UPDATE prompt SET answer = '5' WHERE id = 'p1'", "rows", "prompt p1"),
        ("DELETE FROM prompt WHERE id = 'p1'", "rows", "g1.0"),
        ("UPDATE piece SET segment = '../../x' WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET segment = '' WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET segment = '(counted)' WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET offset = offset + 1 WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET offset = -1 WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET num_bytes = 1 << 60 WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET digest = zeroblob(16) WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET spans = '[[1,0,5]]' WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET spans = '[[' WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET start = 1 WHERE trajectory = 2", "spans", "g1.0"),
        ("UPDATE piece SET routed = 0 WHERE trajectory = 5 AND name = ''", "spans", "g3.0"),
        ("UPDATE piece SET trajectory = 99 WHERE trajectory = 2", "spans", "g1.0"),
        ("DELETE FROM piece WHERE trajectory = 5 AND name = ''", "spans", "g3.0"),
        ("UPDATE piece SET name = 'hints' WHERE trajectory = 5 AND name = ''", "rows", "column hints of g3.0"),
        ("UPDATE piece SET name = 'hints' WHERE name = 'token_rewards'", "rows", "column hints of g3.0"),
        ("UPDATE trajectory SET restamped = 5 WHERE id = 'g0.0'", "rows", "g0.0"),
    ],
)
async def test_tampering_is_found_and_named(tmp_path, sql, law, subject):
    await good_run(tmp_path)
    edit(tmp_path, sql)
    assert (law, subject) in {(finding.rule, finding.subject) for finding in verify(tmp_path)}


async def test_one_changed_event_is_one_break_of_the_chain(tmp_path):
    await good_run(tmp_path)
    edit(tmp_path, "UPDATE event SET host = 'elsewhere' WHERE seq = 8")
    assert [finding.subject for finding in verify(tmp_path)] == ["event 8"]


def mixed_versions(ledger):
    make_ready(ledger, "g0.0", spans=((0, 0, 2), (1, 2, 5)))


def mixed_cache(ledger):
    make_ready(ledger, "g0.0", spans=((1, 0, 5, 0),))


def wrong_staleness(ledger):
    make_ready(ledger, "g0.0")
    ledger.append_all(consume(1, 1, "g0.0", staleness=1))


def steps(ledger, count):
    """Steps that consume a trajectory of version 0 each, whatever the learner publishes meanwhile."""
    for step in range(1, count + 1):
        make_ready(ledger, f"g{step}.0", index=step)
        ledger.append_all(consume(step, step - 1, f"g{step}.0"))


def too_stale(ledger):
    make_ready(ledger, "g0.0")
    steps(ledger, 3)
    ledger.append_all(consume(4, 3, "g0.0"))


def miscounted_step(ledger):
    make_ready(ledger, "g0.0")
    ledger.append(Consumed(trajectory_id="g0.0", step=1, version=1, staleness=0, weight=1.0))


def unpublished_tokens(ledger):
    make_ready(ledger, "g0.0", spans=((5, 0, 5),))


def unpublished_cache(ledger):
    make_ready(ledger, "g0.0", spans=((1, 0, 5, 9),))


def other_tensors(ledger):
    for replica, checksum in enumerate(("aa", None, "aa", "bb")):
        ledger.append(
            VersionLoaded(replica=replica, version=1, digest="digest1", elapsed_s=0.1, checksum=checksum)
        )


def restamped_elsewhere(ledger):
    issue(ledger, "g0.0")
    run_to(ledger, "g0.0", [(0, 0, 3)])
    ledger.append(Restamped("g0.0", (Span(1, 0, 3),)))
    store(ledger, "g0.0", 3, 5, (Span(1, 3, 5),))
    finish(ledger, "g0.0", [(1, 0, 3), (0, 3, 5)])


def store_with(ledger, **recorded):
    """READY, five tokens in two pieces, the first of them with this and the second with nothing."""
    issue(ledger, "g0.0")
    ledger.append(Assigned("g0.0", 0, 1, 0))
    store(ledger, "g0.0", 0, 3, (Span(0, 0, 3),), **recorded)
    store(ledger, "g0.0", 3, 5, (Span(0, 3, 5),))
    finish(ledger, "g0.0", [(0, 0, 5)])


def half_masked(ledger):
    store_with(ledger, sampling_mask=make_mask(tokens("g0.0", 0, 3)[0]))


def masked_out(ledger):
    issue(ledger, "g0.0")
    ledger.append(Assigned("g0.0", 0, 1, 0))
    store(ledger, "g0.0", 0, 5, (Span(0, 0, 5),), sampling_mask=make_mask(tokens("g0.0", 0, 5)[0][::-1]))
    finish(ledger, "g0.0", [(0, 0, 5)])


def half_routed(ledger):
    store_with(ledger, routed_experts=make_experts(0, 5))


def routed_from_the_middle(ledger):
    store_with(ledger, routed_experts=make_experts(1, 7))


def routed_beyond_its_end(ledger):
    store_with(ledger, routed_experts=make_experts(0, 8))


def backwards(ledger):
    for version in (1, 0):
        ledger.append(VersionLoaded(replica=3, version=version, digest=f"digest{version}", elapsed_s=0.1))


def other_bytes(ledger):
    ledger.append(VersionLoaded(replica=3, version=1, digest="digest0", elapsed_s=0.1))


def other_bytes_in_a_relay(ledger):
    held = {"num_bytes": 10, "base": None, "wire_bytes": 10, "first_byte_s": 0.1, "elapsed_s": 0.2}
    ledger.append(Relayed(node="relay-2", version=1, digest="digest0", **held))


def unpublished_load(ledger):
    ledger.append(VersionLoaded(replica=3, version=5, digest="digest5", elapsed_s=0.1))


@pytest.mark.parametrize(
    ("breach", "law", "subject"),
    [
        (mixed_versions, Rule.DRAIN, "g0.0"),
        (mixed_cache, Rule.DRAIN, "g0.0"),
        (unpublished_cache, Rule.VERSIONS, "g0.0"),
        (wrong_staleness, Rule.STALENESS, "g0.0"),
        (too_stale, Rule.STALENESS, "g0.0"),
        (miscounted_step, Rule.CONSUMPTION, "step 1"),
        (unpublished_tokens, Rule.VERSIONS, "g0.0"),
        (backwards, Rule.VERSIONS, "replica-3"),
        (other_bytes, Rule.WEIGHTS, "replica-3"),
        (other_bytes_in_a_relay, Rule.WEIGHTS, "relay-2"),
        (unpublished_load, Rule.WEIGHTS, "replica-3"),
        (other_tensors, Rule.WEIGHTS, "version 1"),
        (restamped_elsewhere, Rule.SPANS, "g0.0"),
        (half_masked, Rule.RECORDING, "g0.0"),
        (masked_out, Rule.RECORDING, "g0.0"),
        (half_routed, Rule.RECORDING, "g0.0"),
        (routed_from_the_middle, Rule.RECORDING, "g0.0"),
        (routed_beyond_its_end, Rule.RECORDING, "g0.0"),
    ],
)
async def test_a_breach_of_a_law_is_found_and_named(tmp_path, breach, law, subject):
    drain = breach in (mixed_versions, mixed_cache)
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, drain=drain, max_staleness=2, versions=(0, 1))
        breach(ledger)
    assert [(finding.rule, finding.subject) for finding in verify(tmp_path)] == [(law, subject)]


@pytest.mark.parametrize(
    ("reaction", "said", "silent"), [("stop", False, 1), ("stop", True, 0), ("off", False, 0)]
)
async def test_a_stale_engine_must_be_said_unless_its_check_is_off(tmp_path, reaction, said, silent):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"alarms": {"weights": reaction}}))
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        for version in (0, 1):
            load = {"version": version, "digest": f"digest{version}", "elapsed_s": 0.1, "checksum": "aa"}
            ledger.append(VersionLoaded(replica=0, **load))
        if said:
            ledger.append(Alarmed(1, "weights", "replica-0", "its engine still has the tensors of version 0"))
    found = [finding for finding in verify(tmp_path) if finding.rule is Rule.SILENT]
    assert [finding.subject for finding in found] == ["replica-0"] * silent


async def test_what_the_rules_allow_is_no_finding(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, max_staleness=2, versions=(0, 1, 2, 3))
        ledger.append(PartStarted("replica-3", 11))
        for version in (1, 1, 3):
            ledger.append(VersionLoaded(replica=3, version=version, digest=f"digest{version}", elapsed_s=0.1))
        ledger.append(PartStarted("replica-3", 12))
        ledger.append(VersionLoaded(replica=3, version=1, digest="digest1", elapsed_s=0.1))
        make_ready(ledger, "g0.0", spans=((0, 0, 2), (1, 2, 5)))
        steps(ledger, 3)
        ledger.append_all(consume(4, 3, "g0.0", weight=0.5))
    assert verify(tmp_path) == []


@pytest.mark.parametrize(("staleness", "found"), [(1, []), (0, [Rule.STALENESS])])
async def test_staleness_of_a_version_that_comes_on_record_after_its_first_use_is_checked_then(
    tmp_path, staleness, found
):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0,))
        steps(ledger, 2)
        make_ready(ledger, "g0.0", spans=((5, 0, 5),))
        ledger.append_all(consume(3, 5, "g0.0", staleness=staleness))
        ledger.append(
            VersionPublished(
                version=5, step=1, incarnation=1, parent=0, digest="digest5", num_bytes=10, stall_s=0.1
            )
        )
    assert [finding.rule for finding in verify(tmp_path)] == found


def recorded_from_the_middle(ledger, *, hole):
    """Masks are switched on after the first two tokens; with a `hole` one comes without."""
    issue(ledger, "g0.0")
    run_to(ledger, "g0.0", [(0, 0, 2)])
    for start in (2, 3, 4):
        mask = None if hole and start == 3 else make_mask(tokens("g0.0", start, start + 1)[0])
        store(ledger, "g0.0", start, start + 1, (Span(0, start, start + 1),), sampling_mask=mask)
    finish(ledger, "g0.0", [(0, 0, 5)])


@pytest.mark.parametrize("hole", [False, True])
async def test_masks_may_begin_in_the_middle_but_have_no_hole(tmp_path, hole):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        recorded_from_the_middle(ledger, hole=hole)
    found = [str(finding) for finding in verify(tmp_path)]
    assert len(found) == hole
    assert all("tokens from 3 on have no sampling mask" in line for line in found)


async def test_experts_that_nobody_can_know_are_no_finding(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 3)], recorded=True)
        mask = make_mask(tokens("g0.0", 3, 5)[0])
        store(ledger, "g0.0", 3, 5, (Span(0, 3, 5),), sampling_mask=mask)
        ledger.append(StreamLost("g0.0", 0, 5))
        finish(ledger, "g0.0", [(0, 0, 5)])
    assert verify(tmp_path) == []


async def test_a_second_consumption_is_found_even_with_a_valid_chain(tmp_path):
    await good_run(tmp_path)
    writer = Writer(open_writer(tmp_path / LEDGER_NAME), host="host-1")
    again = Stamped(
        writer.seq + 1, 0.0, 0.0, Consumed(trajectory_id="g0.0", step=2, version=2, staleness=1, weight=1.0)
    )
    writer.write(Unwritten(events=[again]))
    writer.close()
    assert [(finding.rule, finding.subject) for finding in verify(tmp_path)] == [
        (Rule.CONSUMPTION, f"event {again.seq}")
    ]


async def test_a_partial_run_is_judged_by_what_is_there(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 3), (0, 3, 5)])
        await ledger.commit()
        assert verify(tmp_path) == []
        finish(ledger, "g0.0", [(0, 0, 5)])
        await ledger.commit()
        assert verify(tmp_path) == []


@pytest.mark.parametrize(("reward", "is_found"), [(1.0, False), (0.0, True)])
async def test_figures_that_do_not_follow_from_the_answers_are_found(tmp_path, reward, is_found):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "e0-heldout.0", kind=Kind.EVAL)
        run_to(ledger, "e0-heldout.0", [(1, 0, 7)])
        score(ledger, "e0-heldout.0", [(1, 0, 7)], reward=reward)
        ledger.append(make_evaluated(1.0, version=1, step=1, problems=1, length=7))
    lines = [str(violation) for violation in verify(tmp_path)]
    assert any("evaluation e0-heldout: says accuracy 1.000" in line for line in lines) == is_found


@pytest.mark.parametrize(
    ("more", "stated", "rule", "words"),
    [
        ([], 1, None, ""),
        ([], 2, Rule.CONSUMPTION, "step 3: says it used 2 trajectories, but it consumed 0 and replayed 1"),
        ([replayed(3, staleness=1)], 1, Rule.CONSUMPTION, "the step replayed it before"),
        (
            [replayed(3, id="g1.0", staleness=1)],
            2,
            Rule.STALENESS,
            "recorded 1, but version 0 was 2 learner steps",
        ),
        ([replayed(4, id="g1.0")], 1, Rule.CONSUMPTION, "step 4: says it used 0 trajectories"),
        ([replayed(3, id="g2.0")], 2, Rule.CONSUMPTION, "it is not consumed"),
    ],
)
async def test_a_replay_is_judged_by_its_age_its_step_and_its_consumption(tmp_path, more, stated, rule, words):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, max_staleness=1, versions=(0, 1), replay_max_age=2)
        for index, id in enumerate(("g0.0", "g1.0", "g2.0")):
            make_ready(ledger, id, index=index)
        ledger.append_all(consume(1, 0, "g0.0", "g1.0"))
        ledger.append_all([replayed(2, id="g1.0"), stepped(2, 1)])
    add(tmp_path, replayed(3), *more, stepped(3, stated))
    found = verify(tmp_path)
    assert any(one.rule is rule and words in str(one) for one in found) if rule else found == []


@pytest.mark.parametrize("weight", [1, 0])  # 0: it was cut, and is masked
async def test_a_replay_beyond_its_bound_is_found_whatever_its_weight(tmp_path, weight):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1), replay_max_age=1)
        make_ready(ledger, "g0.0")
        ledger.append_all(consume(1, 0, "g0.0"))
        for step in (2, 3):
            ledger.append_all([replayed(step, weight=weight), stepped(step, 1)])
    (finding,) = verify(tmp_path)
    assert str(finding) == f"law 12: staleness: g0.0: 2 exceeds the bound of 1 and its weight is {weight}"


async def test_a_row_that_is_replayed_again_is_not_read_again(tmp_path, monkeypatch):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0,))
        make_ready(ledger, "g0.0")
        ledger.append_all(consume(1, 0, "g0.0"))
        for step in (2, 3):
            ledger.append_all([replayed(step), stepped(step, 1)])
    recalled = []
    monkeypatch.setattr(replay, "live_rows", lambda *where: recalled.append(where) or live_rows(*where))
    with reading(tmp_path) as connection:
        again = replay.Replay(connection)
        for stamped in again.read_events():
            again.row_before(stamped.event)
            again.apply_event(stamped)
        assert again.violations == []
    assert len(recalled) == 1


def stepped(step, num_trajectories):
    """A learner step that says that it used so many trajectories."""
    return replace(consume(step, 0)[0], num_trajectories=num_trajectories)


def add(run, *events):
    """Append events that a sound ledger might refuse."""
    writer = Writer(open_writer(run / LEDGER_NAME), host="host-1")
    stamped = [Stamped(writer.seq + place, 0.0, 0.0, event) for place, event in enumerate(events, 1)]
    writer.write(Unwritten(events=stamped))
    writer.close()
