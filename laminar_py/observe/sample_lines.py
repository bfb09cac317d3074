"""Samples as lines for a terminal. Called by `laminar samples` and `laminar audit RUN show`.

Invariant: text of models, data and verifiers stands in lines that begin with two spaces, and comes out as text:
no markup, and what does not print as escapes. Lines of ours have no spaces before them.
"""

from collections.abc import Iterator
from itertools import groupby, pairwise

from rich.text import Text

from laminar_py.observe.samples import Colour, FullSample, PromptVisit, TokenSpan
from laminar_py.records.host import visible
from laminar_py.records.scoring import TermValue
from laminar_py.records.trajectory import Kind

CUT_AT = 2000  # characters of a text, unless all of it is asked for
HEAD = 1200  # of these from its beginning, the others from its end
VISITS = 8  # the newest ones of a prompt
VERSIONS = ("cyan", "yellow", "magenta", "green", "blue")  # colours, in turn
LOGPROBS = ((-0.1, "green"), (-0.7, "cyan"), (-2.3, "yellow"), (-4.6, "magenta"))  # at least this, in this colour
LESS, UNKNOWN, ENVIRONMENT = "red", "reverse", "dim"


def tell_sample(sample: FullSample, *, colour: Colour, whole: bool) -> Iterator[Text]:
    """Lines on a sample: its problem, its text, its reward, its group and its prompt's visits."""
    row = sample.row
    yield _line(f"{row.id}: {_fate(sample)}", "bold")
    yield from tell_text(sample, colour=colour, whole=whole)
    rewards = " ".join(
        f"[{_number(one.reward)}]" if one.id == row.id else _number(one.reward) for one in sample.siblings
    )
    yield _line(f"{'group' if row.kind is Kind.TRAIN else 'pass'} {row.group_id}, rewards: {rewards}")
    visits = ", ".join(f"{_number(one.mean_reward)} ({_when(one)})" for one in sample.history[-VISITS:])
    newest = f", the newest {VISITS}" if len(sample.history) > VISITS else ""
    yield _line(f"prompt {row.prompt_id}, visits {len(sample.history)}, mean rewards{newest}: {visits}")


def tell_text(sample: FullSample, *, colour: Colour, whole: bool) -> Iterator[Text]:
    """Lines on the problem, the response, and each term of its reward."""
    yield from _prompt(sample, whole=whole)
    yield from tell_response(sample, colour=colour, whole=whole)
    yield from _verdict(sample, whole=whole)


def _prompt(sample: FullSample, *, whole: bool) -> Iterator[Text]:
    """Lines on the problem, with the prompt as the model got it."""
    task = f" of {sample.task}" if sample.task else ""
    answer = f", answer {sample.answer!r}" if sample.answer else ""
    yield _line(f"prompt {sample.row.prompt_id}{task}{answer}:", "dim")
    yield from _block(_text(sample.prompt), {}, whole=whole)


def tell_response(sample: FullSample, *, colour: Colour, whole: bool) -> Iterator[Text]:
    """Lines of the response; each turn, and each change of version under it, has a line before it."""
    if not sample.spans:
        yield _line(f"response: {sample.lost or 'nothing yet'}", "dim")
        return
    styles = _styles(sample, colour)
    body, places = Text(), [0]
    for style, run in groupby(zip(sample.tokens, styles, strict=True), key=lambda one: one[1]):
        texts = [visible(token, keep="\n\t") for token, _ in run]
        for text in texts:
            places.append(places[-1] + len(text))
        body.append("".join(texts), style)
    first, *_ = sample.spans
    titles = _titles(sample)
    yield _mark(titles[first.start], first, sample, colour)
    changes = [new for old, new in pairwise(sample.spans) if _made_by(old) != _made_by(new)]
    marks = {places[span.start]: _mark(titles[span.start], span, sample, colour) for span in changes}
    yield from _block(body, marks, whole=whole)


def _verdict(sample: FullSample, *, whole: bool) -> Iterator[Text]:
    """Lines on each term of the reward, with what its verifier said."""
    for term in sample.terms:
        yield _line(f"{term.name} {term.value:g} in {term.elapsed_s:.3f} s{_said(term)}", "dim")
        if term.text:
            yield from _block(_text(term.text), {}, whole=whole)


def tell_colours(colour: Colour) -> Text | None:
    """Line that says what colours mean, where they need one."""
    if colour is not Colour.LOGPROB:
        return None
    bounds = [(f"from {bound:g}", style) for bound, style in LOGPROBS]
    words = [*bounds, ("less", LESS), ("not known", UNKNOWN)]
    return Text("  ").join([Text("log-probability:"), *(Text(text, style) for text, style in words)])


def _line(text: str, style: str = "") -> Text:
    return Text(visible(text), style)


def _text(text: str) -> Text:
    return Text(visible(text, keep="\n\t"))


def _block(body: Text, marks: dict[int, Text], *, whole: bool) -> Iterator[Text]:
    """Lines of a text, without its middle where it is too long, and marks between at their places in it."""
    breaks = [(place, place, mark) for place, mark in sorted(marks.items())]
    if not whole and len(body) > CUT_AT:
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


def _titles(sample: FullSample) -> dict[int, str]:
    """Words before each span, by its first token; a response of one turn needs no number of it."""
    has_turns = any(span.version is None for span in sample.spans)
    titles: dict[int, str] = {}
    turn, sampled = 0, False
    for span in sample.spans:
        begins, sampled = span.version is not None and not sampled, span.version is not None
        turn += begins
        where = f"from token {span.start} on" if has_turns or titles else "response"
        titles[span.start] = f"turn {turn}, {where}" if has_turns and begins else where
    return titles


def _styles(sample: FullSample, colour: Colour) -> list[str]:
    """[L] style of each token."""
    styles = [_style(logprob) if colour is Colour.LOGPROB else "" for logprob in sample.logprobs]
    for span in sample.spans if colour is not Colour.NONE else ():
        if span.version is None or colour is Colour.VERSION:
            styles[span.start : span.end] = [_version_style(span, sample)] * (span.end - span.start)
    return styles


def _style(logprob: float | None) -> str:
    if logprob is None:
        return UNKNOWN
    return next((style for bound, style in LOGPROBS if logprob >= bound), LESS)


def _version_style(span: TokenSpan, sample: FullSample) -> str:
    """Colours go round in the order in which versions come, so that neighbours differ; an environment has none."""
    if span.version is None:
        return ENVIRONMENT
    versions = [one for one in dict.fromkeys(one.version for one in sample.spans) if one is not None]
    return VERSIONS[versions.index(span.version) % len(VERSIONS)]


def _made_by(span: TokenSpan) -> tuple[int | None, int | None]:
    return span.version, span.kv_version


def _mark(title: str, span: TokenSpan, sample: FullSample, colour: Colour) -> Text:
    cache = "" if span.kv_version is None else f", on a KV cache from version {span.kv_version} on"
    replica = "" if span.replica is None or span.version is None else f", replica {span.replica}"
    style = _version_style(span, sample) if colour is Colour.VERSION else ""
    by = "the environment" if span.version is None else f"version {span.version}"
    return Text.assemble((f"{title}: ", "dim"), (by, style), (f"{replica}{cache}", "dim"))


def _fate(sample: FullSample) -> str:
    row = sample.row
    words = ["no reward" if row.reward is None else f"reward {row.reward:g}"]
    if row.advantage is not None:
        words.append(f"advantage {row.advantage:g}")
    end = " so far" if row.finish_reason is None else f", ended by {row.finish_reason}"
    words.append(f"{row.length:,} tokens{end}" + (f", cut by the cap on {row.cap}" if row.cap else ""))
    if row.drop_reason is not None:
        words.append(f"dropped: {row.drop_reason}" + (f" ({row.drop_detail})" if row.drop_detail else ""))
    elif row.step is not None:
        words.append(f"used by step {row.step}, staleness {row.staleness}")
    else:
        words.append(str(row.status))
    return "; ".join(words)


def _said(term: TermValue) -> str:
    return f", says {term.said!r}" if term.said else ""


def _when(visit: PromptVisit) -> str:
    return visit.group_id if visit.step is None else f"step {visit.step}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
