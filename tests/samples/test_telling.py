"""Samples as lines of a terminal: text is text, whatever it contains."""

import io
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from laminar_lab.audit.sample_lines import CUT_AT, Colour, describe_colours, describe_response, describe_sample
from laminar_lab.audit.samples import Sample
from laminar_lab.audit.stories import Story, StoryEvent
from laminar_py.ledger import TRAJECTORY_COLUMNS, TrajectoryRow
from laminar_py.ledger.segments import Payload
from laminar_py.records.events import Assigned, Scored
from laminar_py.records.scoring import TermValue
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason, Kind, Status
from tests.samples.runs import HOSTILE


def make_row(**other):
    fields = dict.fromkeys(TRAJECTORY_COLUMNS)
    fields |= {"number": 1, "id": "g0.0", "prompt_id": "p0", "group_id": "g0", "kind": Kind.TRAIN}
    fields |= {"status": Status.CONSUMED, "reward": 1.0, "length": 1, "finish_reason": FinishReason.STOP}
    return TrajectoryRow(**(fields | other))


RIGHT = TermValue(name="math", value=1.0, elapsed_s=0.5, text="right", answer="4")


def make_sample(*tokens, spans=None, logprobs=None, row=None, terms=(RIGHT,), ids_only="", **other):
    """A response of these tokens under version 0, or under `spans` of (version, start, end)."""
    spans = [(0, 0, len(tokens))] if spans is None and tokens else spans or []
    known = [-0.5] * len(tokens) if logprobs is None else [math.nan if x is None else x for x in logprobs]
    response = Payload(
        ids=np.arange(len(tokens), dtype=np.int32),
        logprobs=np.array(known, np.float32),
        spans=tuple(Span(*span) for span in spans),
    )
    events = [
        Assigned("g0.0", 1, 1, 0),
        Scored(trajectory_id="g0.0", reward=1.0, elapsed_s=0.5, terms=list(terms)),
    ]
    fields = {"prompt": "2+2=", "answer": "4", "task": "sum"} | other
    story = Story(
        row=row or make_row(length=len(tokens)),
        events=tuple(StoryEvent(seq, 0.0, "host", event) for seq, event in enumerate(events)),
        response=response,
        **fields,
    )
    siblings = [make_row(), make_row(id="g0.1", reward=None), make_row(id="g0.2", reward=0.5)]
    return Sample(story=story, tokens=list(tokens), ids_only=ids_only, columns={}, siblings=siblings)


def tell(sample, *, colour=Colour.VERSION, full=False):
    return [line.plain for line in describe_sample(sample, colour=colour, full=full)]


def respond(sample, *, full=False):
    return [line.plain for line in describe_response(sample, colour=Colour.VERSION, full=full)]


def test_a_problem_without_an_answer_is_told_without_one():
    assert "prompt p0 of sum:" in tell(make_sample("4", answer=""))


def test_a_sample_is_told_with_problem_text_verdict_and_group():
    row = make_row(length=2, step=9, staleness=3, advantage=0.5)
    assert tell(make_sample("four", "!\nor 4", row=row)) == [
        "g0.0: reward 1; advantage 0.5; 2 tokens, ended by stop; used by step 9, staleness 3",
        "prompt p0 of sum, answer '4':",
        "  2+2=",
        "response: version 0, replica 1",
        "  four!",
        "  or 4",
        "math 1 in 0.500 s, says '4'",
        "  right",
        "group g0, rewards: [1] - 0.5",
    ]


def test_an_evaluation_has_no_step_and_no_advantage():
    row = make_row(kind=Kind.EVAL, group_id="e0-aime", step=-1, staleness=0, advantage=0.0)
    head, *_, last = tell(make_sample("4", row=row))
    assert head == "g0.0: reward 1; 1 tokens, ended by stop; consumed"
    assert last == "pass e0-aime, rewards: [1] - 0.5"


def test_each_change_of_version_is_a_line_at_its_token():
    sample = make_sample("a", "b", "c", "d", spans=[(3, 0, 1), (4, 1, 2), (4, 2, 3), (7, 3, 4)])
    assert respond(sample) == [
        "response: version 3, replica 1",
        "  a",
        "from token 1 on: version 4, replica 1",
        "  bc",
        "from token 3 on: version 7, replica 1",
        "  d",
    ]
    assert respond(make_sample()) == ["response: nothing yet"]
    assert respond(make_sample(lost="host 10.0.0.7 is gone")) == ["response: host 10.0.0.7 is gone"]


def test_turns_of_the_model_and_of_its_environment_stand_apart():
    spans = [(None, 0, 1), (3, 1, 2), (4, 2, 3), (None, 3, 4), (4, 4, 5)]
    sample = make_sample("Guess.\n", "4", "2", "\x1b[2J[red]no[/red]", "43", spans=spans)
    assert respond(sample) == [
        "from token 0 on: the environment",
        "  Guess.",
        "  ",
        "turn 1, from token 1 on: version 3, replica 1",
        "  4",
        "from token 2 on: version 4, replica 1",
        "  2",
        "from token 3 on: the environment",
        "  \\x1b[2J[red]no[/red]",
        "turn 2, from token 4 on: version 4, replica 1",
        "  43",
    ]


@pytest.mark.parametrize("colour", [Colour.VERSION, Colour.LOGPROB])
def test_a_token_of_an_environment_has_the_colour_of_no_version_and_of_no_log_probability(colour):
    sample = make_sample("a", "b", "c", spans=[(3, 0, 1), (None, 1, 2), (3, 2, 3)], logprobs=[-0.5, 0.0, -0.5])
    text = {line.plain: line for line in describe_response(sample, colour=colour, full=True)}
    ours, theirs = ({str(span.style) for span in text[f"  {token}"].spans} for token in "ab")
    assert theirs == {"dim"}
    assert ours != theirs


def test_the_middle_of_a_long_text_is_left_out_and_the_version_behind_it_told():
    sample = make_sample("a" * CUT_AT, "b" * CUT_AT, spans=[(0, 0, 1), (1, 1, 2)])
    head, note, mark, tail = respond(sample)[1:]
    assert note == f"... {CUT_AT:,} characters left out; --full shows them"
    assert (set(head), set(tail), mark) == (set(" a"), set(" b"), "from token 1 on: version 1, replica 1")
    assert len(head) + len(tail) - 4 == CUT_AT
    assert [len(line) - 2 for line in respond(sample, full=True) if line.startswith("  ")] == [CUT_AT, CUT_AT]
    assert len(respond(make_sample("a" * CUT_AT))) == 2


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800 lone \udfff"])
@pytest.mark.parametrize("colour", Colour)
def test_hostile_text_comes_out_as_text(text, colour):
    row = make_row(prompt_id=text, drop_detail=text, drop_reason="stale")
    terms = [TermValue(name=text, value=0.0, text=text, answer=text)]
    sample = make_sample(*text, row=row, prompt=text, answer=text, task=text, terms=terms)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, highlight=False)
    for line in describe_sample(sample, colour=colour, full=True):
        console.print(line, soft_wrap=True)
    said = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # colours of ours
    assert all(one.isprintable() or one in "\n\t " for one in said)
    shown = {line.plain.expandtabs() for line in describe_response(sample, colour=colour, full=True)}
    assert shown <= set(said.split("\n"))


@given(st.lists(st.text(alphabet=st.characters(), max_size=9), min_size=1, max_size=9), st.booleans())
def test_only_our_own_lines_have_no_spaces_before_them(tokens, full):
    lines = respond(make_sample(*tokens), full=full)[1:]
    assert all(line.startswith("  ") for line in lines)
    assert all("\n" not in line for line in lines)


def test_colours_say_version_or_log_probability():
    sample = make_sample("a", "b", "c", spans=[(3, 0, 1), (9, 1, 3)], logprobs=[-0.01, -9.0, None])
    styles = {colour: drawn(sample, colour) for colour in Colour}
    assert styles[Colour.VERSION] == [["cyan"], ["yellow"]]
    assert styles[Colour.LOGPROB] == [["green"], ["red", "reverse"]]
    assert styles[Colour.NONE] == [[], []]
    assert describe_colours(Colour.VERSION) is None
    assert describe_colours(Colour.LOGPROB).plain.startswith("log-probability:  from -0.1  from -0.7")


def drawn(sample, colour):
    """Styles of the lines of the text."""
    lines = describe_response(sample, colour=colour, full=True)
    return [[span.style for span in line.spans if span.style] for line in lines if line.plain.startswith("  ")]


def test_tokens_that_are_ids_and_unfinished_responses_are_told():
    row = make_row(reward=None, finish_reason=None, status=Status.RUNNING, length=2)
    (head, *_) = tell(make_sample("1 ", "2 ", row=row, terms=[]))
    assert head == "g0.0: no reward; 2 tokens so far; running"
