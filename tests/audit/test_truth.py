"""Turns in the record: what an environment wrote stands as such, and verify names every token that does not."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from laminar_lab.audit.checks import Rule
from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import LEDGER_NAME
from laminar_py.records.events import Assigned, Restamped
from laminar_py.records.spans import Span
from tests.builders import make_experts, make_mask
from tests.ledger.runs import begin, consume, finish, issue, open_ledger, store, tokens

TURNS = (Span(0, 0, 3), Span(None, 3, 5), Span(0, 5, 6))  # the model, its environment, the model again
NO_ROWS = np.zeros(0, np.int32)


def write_turns(ledger, *spans, id="g0.0", **given):
    """RUNNING, with one piece for all these spans, or those of two turns."""
    issue(ledger, id)
    ledger.append(Assigned(id, 0, 1, 0))
    store_turns(ledger, *(spans or TURNS), id=id, **given)


def store_turns(ledger, *spans, id="g0.0", logprobs=None, **recorded):
    """A piece as a replica makes it: no log-probability where an environment wrote."""
    start, end = spans[0].start, spans[-1].end
    found = tokens(id, start, end)[1].copy()
    for span in spans:
        if span.version is None:
            found[span.start - start : span.end - start] = 0.0
    store(ledger, id, start, end, spans, logprobs=found if logprobs is None else logprobs, **recorded)


def ended(ledger, *spans):
    """READY."""
    finish(ledger, "g0.0", spans or TURNS)


def masks(*with_rows):
    """Sampling masks of six tokens, those of the environment without rows unless it is said."""
    own = make_mask(tokens("g0.0", 0, 6)[0])
    rows = np.split(own.ids, np.cumsum(own.counts)[:-1])
    kept = [row if place in with_rows else NO_ROWS for place, row in enumerate(rows)]
    return type(own)(np.array([len(row) for row in kept], np.int32), np.concatenate(kept).astype(np.int32))


def found_in(run):
    return [(one.rule, one.subject, one.message) for one in verify(run)]


async def run_with(folder, breach, *, versions=(0, 1)):
    async with open_ledger(folder) as ledger:
        begin(ledger, versions=versions)
        breach(ledger)
        await ledger.commit()
    return found_in(folder)


def as_they_are(ledger):
    write_turns(ledger)
    ended(ledger)
    ledger.append_all(consume(1, 1, "g0.0"))


def first_words(ledger):
    spans = (Span(None, 0, 2), Span(0, 2, 6))
    write_turns(ledger, *spans)
    ended(ledger, *spans)


def a_turn_of_all_that_it_may_have(ledger):
    spans = (Span(None, 0, 2, turn_limit=3), Span(0, 2, 4), Span(1, 4, 5), Span(None, 5, 6, turn_limit=1))
    write_turns(ledger, *spans)
    ended(ledger, *spans)


def with_masks(ledger):
    write_turns(ledger, sampling_mask=masks(0, 1, 2, 5))
    ended(ledger)


def masks_and_a_piece_of_the_environment_alone(ledger):
    own = make_mask(tokens("g0.0", 0, 3)[0])
    write_turns(ledger, TURNS[0], sampling_mask=own)
    store_turns(ledger, TURNS[1])
    store_turns(ledger, TURNS[2], sampling_mask=make_mask(tokens("g0.0", 5, 6)[0]))
    ended(ledger)


def routed_until_the_last_turn(ledger):
    spans = (Span(0, 0, 3), Span(None, 3, 5))  # the environment left no room for another turn
    write_turns(ledger, *spans, routed_experts=make_experts(0, 5))
    ended(ledger, *spans)


@pytest.mark.parametrize(
    "run",
    [
        as_they_are,
        first_words,
        a_turn_of_all_that_it_may_have,
        with_masks,
        masks_and_a_piece_of_the_environment_alone,
        routed_until_the_last_turn,
    ],
)
async def test_turns_as_a_replica_stores_them_are_no_violation(tmp_path, run):
    assert await run_with(tmp_path, run) == []


def a_log_probability(ledger):
    logprobs = tokens("g0.0", 0, 6)[1].copy()
    logprobs[3], logprobs[4] = 0.0, -0.5
    write_turns(ledger, logprobs=logprobs)
    ended(ledger)


def no_number(ledger):
    logprobs = tokens("g0.0", 0, 6)[1].copy()
    logprobs[3:5] = np.nan
    write_turns(ledger, logprobs=logprobs)
    ended(ledger)


def a_mask(ledger):
    write_turns(ledger, sampling_mask=masks(0, 1, 2, 4, 5))
    ended(ledger)


def a_turn_above_its_limit(ledger):
    spans = (Span(None, 0, 2, turn_limit=3), Span(0, 2, 4), Span(1, 4, 6))
    write_turns(ledger, *spans)
    ended(ledger, *spans)


def a_cache(ledger):
    spans = (Span(0, 0, 3), Span(None, 3, 5, 0), Span(0, 5, 6))
    write_turns(ledger, *spans)
    ended(ledger, *spans)


def a_version_of_a_last_word(ledger):
    write_turns(ledger)
    spans = (Span(0, 0, 4), Span(None, 4, 5), Span(0, 5, 6))
    ledger.append(Restamped("g0.0", spans))
    ended(ledger, *spans)


@pytest.mark.parametrize(
    ("breach", "message"),
    [
        (
            a_log_probability,
            "token 4, which an environment wrote, has a log-probability of -0.5, not 0; 1 such",
        ),
        (no_number, "token 3, which an environment wrote, has a log-probability of nan, not 0; 2 such"),
        (a_mask, "token 4, which an environment wrote, has a sampling mask; 1 such"),
        (
            a_turn_above_its_limit,
            "the turn from token 2 on exceeds its environment's limit of 3 tokens",
        ),
        (a_cache, "token 3, which an environment wrote, has a KV cache of version 0; 2 such"),
        (
            a_version_of_a_last_word,
            "token 3 was stored as written by an environment, but not finished as such; 1 such tokens",
        ),
    ],
)
async def test_a_token_of_an_environment_that_stands_as_sampled_is_named_with_its_place(tmp_path, breach, message):
    assert await run_with(tmp_path, breach) == [(Rule.TRUTH, "g0.0", message)]


async def test_a_sampled_token_without_a_mask_is_told_and_one_of_an_environment_is_not(tmp_path):
    def breach(ledger):
        write_turns(ledger, sampling_mask=masks(0, 1, 5))
        ended(ledger)

    ((rule, subject, message),) = await run_with(tmp_path, breach)
    assert (rule, subject) == (Rule.RECORDING, "g0.0")
    assert message.startswith("token 2 (")


async def test_what_is_trained_on_without_any_sampled_token_is_named(tmp_path):
    def breach(ledger):
        write_turns(ledger, Span(None, 0, 6))
        ended(ledger, Span(None, 0, 6))
        ledger.append_all(consume(1, 1, "g0.0"))

    message = "was trained on, but no engine sampled a token of it"
    assert await run_with(tmp_path, breach) == [(Rule.TRUTH, "g0.0", message)]


@pytest.mark.parametrize(
    ("spans", "token"),
    [
        ((Span(0, 0, 6),), 3),  # all of it as sampled
        ((Span(0, 0, 3), Span(1, 3, 5), Span(0, 5, 6)), 3),
        ((Span(0, 0, 2), Span(None, 2, 5), Span(0, 5, 6)), 2),
    ],
)
async def test_spans_that_say_other_than_what_was_stored_are_named_with_the_token(tmp_path, spans, token):
    def breach(ledger):
        write_turns(ledger)
        ended(ledger, *spans)

    found = await run_with(tmp_path, breach)
    assert {(rule, subject) for rule, subject, _ in found} == {(Rule.SPANS, "g0.0"), (Rule.TRUTH, "g0.0")}
    assert any(message.startswith(f"token {token} was stored as ") for *_, message in found)


@pytest.mark.parametrize(
    ("sql", "rule", "subject"),
    [
        ("UPDATE piece SET spans = replace(spans, 'null,3,5', '1,3,5')", Rule.SPANS, "g0.0"),
        ("UPDATE trajectory SET spans = replace(spans, 'null,3,5', '1,3,5')", Rule.ROWS, "g0.0"),
        ("UPDATE trajectory SET spans = replace(spans, 'null,3,5', '1,3,5')", Rule.TRUTH, "g0.0"),
        (
            "UPDATE event SET body = replace(body, 'null,3,5', '1,3,5') WHERE kind = 'finished'",
            Rule.LOG,
            "event 6",
        ),
    ],
)
async def test_a_version_put_on_a_token_of_an_environment_is_found_wherever_it_is_put(
    tmp_path, sql, rule, subject
):
    assert await run_with(tmp_path, as_they_are) == []
    with closing(sqlite3.connect(tmp_path / LEDGER_NAME)) as connection, connection:
        assert connection.execute(sql).rowcount == 1
    assert (rule, subject) in {(found, named) for found, named, _ in found_in(tmp_path)}
