"""Samples as lines for a terminal, for `laminar samples` and `laminar audit RUN show`.

A line with text of a model, of data or of a verifier begins with two spaces; our lines have none
(`tests/samples/test_telling.py::test_only_our_own_lines_have_no_spaces_before_them`). Unprintable characters
become escapes, and no text is read as markup.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import groupby, pairwise

from rich.text import Text

from laminar_lab.audit.samples import Sample
from laminar_lab.audit.stories import ReplicaSpan
from laminar_py.ledger import TrajectoryRow
from laminar_py.records.host import visible
from laminar_py.records.trajectory import Kind

CUT_AT = 2000  # characters of a text, unless --full asks for all
HEAD = 1200  # of these from the begin of the text, the others from its end
VERSION_STYLES = ("cyan", "yellow", "magenta", "green", "blue")  # in turn
LOGPROB_STYLES = ((-0.1, "green"), (-0.7, "cyan"), (-2.3, "yellow"), (-4.6, "magenta"))  # from this value on
LESS, UNKNOWN, ENVIRONMENT = "red", "reverse", "dim"


class Colour(StrEnum):
    """Meanings of a token's colour."""

    VERSION = "version"  # weight version that sampled the token
    LOGPROB = "logprob"
    NONE = "none"


def describe_sample(sample: Sample, *, colour: Colour, full: bool) -> Iterator[Text]:
    """Yield lines on a sample: its reward and use, its texts, and the rewards of its group."""
    row = sample.story.row
    yield describe_fate(row)
    yield from describe_texts(sample, colour=colour, full=full)
    rewards = " ".join(
        f"[{_number(other.reward)}]" if other.id == row.id else _number(other.reward) for other in sample.siblings
    )
    yield _line(f"{'group' if row.kind is Kind.TRAIN else 'pass'} {row.group_id}, rewards: {rewards}")


def describe_fate(row: TrajectoryRow) -> Text:
    """Return the line with a trajectory's id, reward, length, and its use or its drop."""
    words = ["no reward" if row.reward is None else f"reward {row.reward:g}"]
    is_train = row.kind is Kind.TRAIN  # an evaluation has numbers without meaning in the columns of training
    if row.advantage is not None and is_train:
        words.append(f"advantage {row.advantage:g}")
    end = " so far" if row.finish_reason is None else f", ended by {row.finish_reason}"
    words.append(f"{row.length:,} tokens{end}" + (f", cut by the cap on {row.cap}" if row.cap else ""))
    if row.drop_reason is not None:
        words.append(f"dropped: {row.drop_reason}" + (f" ({row.drop_detail})" if row.drop_detail else ""))
    elif row.step is not None and is_train:
        words.append(f"used by step {row.step}, staleness {row.staleness}")
    else:
        words.append(str(row.status))
    return _line(f"{row.id}: {'; '.join(words)}", "bold")


def describe_texts(sample: Sample, *, colour: Colour, full: bool) -> Iterator[Text]:
    """Yield lines with the prompt, the response, and each term of the reward with its verifier's words."""
    story = sample.story
    task = f" of {story.task}" if story.task else ""
    answer = f", answer {story.answer!r}" if story.answer else ""
    yield _line(f"prompt {story.row.prompt_id}{task}{answer}:", "dim")
    yield from _block(_text(story.prompt), {}, full=full)
    yield from describe_response(sample, colour=colour, full=full)
    for term in story.terms:
        said = f", says {term.answer!r}" if term.answer else ""
        yield _line(f"{term.name} {term.value:g} in {term.elapsed_s:.3f} s{said}", "dim")
        if term.text:
            yield from _block(_text(term.text), {}, full=full)


def describe_response(sample: Sample, *, colour: Colour, full: bool) -> Iterator[Text]:
    """Yield lines of the response, with a line before each turn and at each change of the weight version."""
    spans = sample.story.spans
    if not spans:
        yield _line(f"response: {sample.story.lost or 'nothing yet'}", "dim")
        return
    versions = list(dict.fromkeys(span.version for span in spans if span.version is not None))
    body, places = Text(), [0]
    tokens = zip(sample.tokens, _styles(sample, spans, versions, colour), strict=True)
    for style, run in groupby(tokens, key=lambda token: token[1]):
        texts = [visible(token, keep="\n\t") for token, _ in run]
        for text in texts:
            places.append(places[-1] + len(text))
        body.append("".join(texts), style)
    titles = _titles(spans)

    def mark(span: ReplicaSpan) -> Text:
        style = _version_style(span, versions) if colour is Colour.VERSION else ""
        return _mark(titles[span.start], span, style)

    yield mark(spans[0])
    changes = [new for old, new in pairwise(spans) if _weights_of(old) != _weights_of(new)]
    yield from _block(body, {places[span.start]: mark(span) for span in changes}, full=full)


def describe_colours(colour: Colour) -> Text | None:
    """Return the legend of the colours; None where they need no legend."""
    if colour is not Colour.LOGPROB:
        return None
    bounds = [(f"from {bound:g}", style) for bound, style in LOGPROB_STYLES]
    words = [*bounds, ("less", LESS), ("not known", UNKNOWN)]
    return Text("  ").join([Text("log-probability:"), *(Text(text, style) for text, style in words)])


def _line(text: str, style: str = "") -> Text:
    return Text(visible(text), style)


def _text(text: str) -> Text:
    return Text(visible(text, keep="\n\t"))


def _block(body: Text, marks: dict[int, Text], *, full: bool) -> Iterator[Text]:
    """Yield lines of a text with marks at their places, without its middle where it is too long."""
    breaks = [(place, place, mark) for place, mark in sorted(marks.items())]
    if not full and len(body) > CUT_AT:
        head, tail = HEAD, len(body) - (CUT_AT - HEAD)
        hidden = [(tail, tail, mark) for place, _, mark in breaks if head <= place <= tail]
        note = _line(f"... {tail - head:,} characters left out; --full shows them", "dim")
        shown = [one for one in breaks if not head <= one[0] <= tail]
        breaks = sorted([*shown, (head, tail, note), *hidden[-1:]], key=lambda one: one[0])
    at = 0
    for start, end, line in breaks:
        yield from _indented(body[at:start])
        yield line
        at = end
    yield from _indented(body[at:])


def _indented(text: Text) -> Iterator[Text]:
    if text:
        yield from (Text("  ") + line for line in text.split("\n", allow_blank=True))


def _titles(spans: Sequence[ReplicaSpan]) -> dict[int, str]:
    """Return the words before each span by its first token.

    Turns are numbered where an environment wrote tokens.
    """
    has_turns = any(span.version is None for span in spans)
    titles: dict[int, str] = {}
    turn, sampled = 0, False
    for span in spans:
        begins, sampled = span.version is not None and not sampled, span.version is not None
        turn += begins
        where = f"from token {span.start} on" if has_turns or titles else "response"
        titles[span.start] = f"turn {turn}, {where}" if has_turns and begins else where
    return titles


def _styles(sample: Sample, spans: Sequence[ReplicaSpan], versions: Sequence[int], colour: Colour) -> list[str]:
    """Return the style [L] of each token."""
    styles = [_logprob_style(logprob) if colour is Colour.LOGPROB else "" for logprob in sample.logprobs]
    for span in spans if colour is not Colour.NONE else ():
        if span.version is None or colour is Colour.VERSION:
            styles[span.start : span.end] = [_version_style(span, versions)] * (span.end - span.start)
    return styles


def _logprob_style(logprob: float | None) -> str:
    if logprob is None:
        return UNKNOWN
    return next((style for bound, style in LOGPROB_STYLES if logprob >= bound), LESS)


def _version_style(span: ReplicaSpan, versions: Sequence[int]) -> str:
    """Return the style of a span. Versions take the styles in turn, so neighbours differ."""
    if span.version is None:
        return ENVIRONMENT
    return VERSION_STYLES[versions.index(span.version) % len(VERSION_STYLES)]


def _weights_of(span: ReplicaSpan) -> tuple[int | None, int | None]:
    return span.version, span.kv_version


def _mark(title: str, span: ReplicaSpan, style: str) -> Text:
    """Return the line before a span: its title, weight version, replica, and version of the KV cache."""
    cache = "" if span.kv_version is None else f", on a KV cache from version {span.kv_version} on"
    replica = "" if span.replica is None or span.version is None else f", replica {span.replica}"
    by = "the environment" if span.version is None else f"version {span.version}"
    return Text.assemble((f"{title}: ", "dim"), (by, style), (f"{replica}{cache}", "dim"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
