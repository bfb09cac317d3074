"""The table of a run's figures: the headline of terminal and page, and the comparison of runs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from laminar_lab.report.gains import describe_main_term, warn_of_bonus
from laminar_lab.report.kit import Card
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.tails import Distribution, Measure, format_seconds
from laminar_py.records.engine import DraftCounts, sum_drafts
from laminar_py.records.events import Alarmed, Leased, RunStarted, SettingChanged, Unquantized, VersionLoaded
from laminar_py.records.host import counted
from laminar_py.records.trajectory import Status

MOST_CHANGES = 4  # of settings during the run, with a card each


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a run, e.g. goodput: a card of the headline, or a row of a comparison."""

    name: str  # title of the card
    value: Callable[[RunReport], float | None]  # None: no value now
    format: Callable[[float], str] = "{:,.0f}".format
    compared: str = ""  # name in a comparison; "": not compared
    note: Callable[[RunReport], str] | None = None  # text of the card; None: no card


def _turns_of(report: RunReport) -> Distribution | None:
    return report.tails.get(Measure.TURNS)


def _note_steps(report: RunReport) -> str:
    account, ended = report.tokens, "has not ended" if report.snapshot.history.live else "has ended"
    steps = [step for _, step in report.snapshot.history.steps]
    trained = sum(step.loss is not None for step in steps)
    idle = "" if trained == len(steps) else f"{trained:,} of {counted(len(steps), 'step')} trained; "
    if not report.steps or not account.useful_trajectories:
        return f"{idle}the run {ended}"
    size, length = account.useful_trajectories / report.steps, account.useful / account.useful_trajectories
    step_s = format_seconds(report.rl_s / report.steps)
    return f"{step_s} each: {size:,.0f} trajectories x {length:,.1f} useful tokens; {idle}the run {ended}"


def _note_trajectories(report: RunReport) -> str:
    train = report.snapshot.trajectories
    left = report.snapshot.history.left_word
    used, dropped = (int(train.is_status(status).sum()) for status in (Status.CONSUMED, Status.DROPPED))
    return f"{used:,} consumed + {dropped:,} dropped + {len(train) - used - dropped:,} {left}"


def _note_replays(report: RunReport) -> str:
    replayed, consumed = report.replayed, report.staleness
    if replayed is None:
        return ""
    again = sum(replayed.counts.values())
    share = again / (again + (0 if consumed is None else sum(consumed.counts.values())))
    return (
        f"{share:.0%} of the trained trajectories; {replayed.mean:.1f} learner steps old, {replayed.max} at most"
    )


def _drafts(report: RunReport) -> DraftCounts:
    """Return the drafts of all steps."""
    return sum_drafts(row.drafts for row in report.snapshot.samples.steps)


def _note_drafts(report: RunReport) -> str:
    counts = _drafts(report)
    kinds = [
        ("own text", counts.accepted_own),
        ("siblings", counts.accepted_sibling),
        ("earlier responses", counts.accepted_earlier),
    ]
    origins = ", ".join(f"{accepted / max(1, counts.accepted):.0%} from {kind}" for kind, accepted in kinds)
    passes = f"{counts.accepted_per_pass:.2f} in a pass of a sequence"
    near = f"{counts.near:,} of {counts.verified:,} verified tokens within rounding of another"
    return f"of {counts.drafted:,} drafted tokens: {origins}; {passes}; {near}" if counts.drafted else ""


def _note_turns(report: RunReport) -> str:
    train, turns = report.snapshot.trajectories, _turns_of(report)
    known = ~np.isnan(train.environment_s)
    spent_s = float(np.sum(train.finished_s[known] - train.started_s[known]))
    share = float(train.environment_s[known].sum()) / spent_s if spent_s > 0 else 0.0
    most = 0.0 if turns is None else turns.max
    return f"of the model, the mean; {most:.0f} at most; environments take {share:.0%} of the time on replicas"


def _parts_of_first_answer(report: RunReport) -> tuple[float, float, float] | None:
    """Return the seconds of checks, until a replica serves, and from there to the first finished response.

    None without a finished response, and where the record has no start or no time of the command, as in a
    simulation.
    """
    history, finished_s = report.snapshot.history, report.snapshot.all_trajectories.finished_s
    finished_s = finished_s[~np.isnan(finished_s)]
    if not len(finished_s):
        return None
    first_s = float(finished_s.min())
    starts = [(at_s, event) for at_s, event in history.of_kind(RunStarted) if at_s <= first_s]
    if not starts:
        return None
    started_s, started = starts[-1]  # earlier starts ended before the first response
    loads = (at_s for at_s, _ in history.of_kind(VersionLoaded) if started_s <= at_s <= first_s)
    served_s = next(loads, None)
    if started.command_s is None or served_s is None:
        return None
    return started.command_s, served_s - started_s, first_s - served_s


def _note_first_answer(report: RunReport) -> str:
    parts = _parts_of_first_answer(report)
    assert parts is not None, "a figure without a value has no card"
    checks, served, answered = map(format_seconds, parts)
    return f"from the command: {checks} of checks, {served} until a replica has weights, {answered} more"


def handed_over_share(report: RunReport) -> float | None:
    """Return the share of RL for which shared devices were handed over; None without any."""
    leases = [lease for _, lease in report.snapshot.history.of_kind(Leased)]
    return sum(lease.elapsed_s for lease in leases) / report.rl_s if leases and report.rl_s else None


def _note_hand_overs(report: RunReport) -> str:
    turns = report.snapshot.history.learner_turns
    share = sum(seconds for _, seconds in turns) / report.rl_s
    return (
        f"of RL, with the prefill of released caches; the learner had {counted(len(turns), 'turn')}, {share:.0%}"
    )


FIGURES = (
    Figure(
        name="goodput",
        value=lambda r: r.tokens.goodput,
        compared="goodput, useful tokens/s",
        note=lambda r: f"tokens/s, {r.tokens.useful:,} useful in {r.rl_s:,.1f} s of RL",
    ),
    Figure(
        name="trained",
        value=lambda r: r.trained_tokens_per_s,
        compared="trained tokens/s",
        note=lambda r: "tokens/s, whatever their weight",
    ),
    Figure(
        name="", value=lambda r: r.tokens.useful_share, format="{:.1%}".format, compared="useful of the issued"
    ),
    Figure(
        name="learner steps",
        value=lambda r: len(r.snapshot.history.steps),
        compared="steps",
        note=_note_steps,
    ),
    Figure(name="of the RL phase", value=lambda r: r.rl_s, format=format_seconds, compared="RL"),
    Figure(
        name="first response",
        value=lambda r: None if (parts := _parts_of_first_answer(r)) is None else sum(parts),
        format=format_seconds,
        compared="first response",
        note=_note_first_answer,
    ),
    Figure(name="trajectories", value=lambda r: r.tokens.issued_trajectories, note=_note_trajectories),
    Figure(
        name="turns",
        value=lambda r: None if (found := _turns_of(r)) is None else found.mean,
        format="{:.2f}".format,
        note=_note_turns,
    ),
    Figure(
        name="accepted drafts",
        value=lambda r: _drafts(r).accepted / _drafts(r).drafted if _drafts(r).drafted else None,
        format="{:.0%}".format,
        note=_note_drafts,
    ),
    Figure(name="hand-overs", value=handed_over_share, format="{:.1%}".format, note=_note_hand_overs),
    Figure(
        name="staleness",
        value=lambda r: None if r.staleness is None else r.staleness.mean,
        format="{:.2f}".format,
        note=lambda r: "" if r.staleness is None else f"learner steps, the mean; {r.staleness.max} at most",
    ),
    Figure(
        name="replayed",
        value=lambda r: None if r.replayed is None else sum(r.replayed.counts.values()),
        note=_note_replays,
    ),
)


def headline(report: RunReport) -> list[Card]:
    """Return the cards of terminal and page: alarms, bottleneck, figures with a note, evaluations of each set."""
    cards = [
        Card("ALARM", alarm.check, f"step {alarm.step}: {alarm.part}: {alarm.message}")
        for _, alarm in report.snapshot.history.of_kind(Alarmed)
    ]
    cards += [Card("simulated", "no real run", report.simulation)] if report.simulation else []
    cards += [
        Card("resumed", f"step {started.resumed_step or 0}", f"with {' '.join(started.overrides)}")
        for _, started in report.snapshot.history.of_kind(RunStarted)
        if started.overrides
    ]
    changes = [change for _, change in report.snapshot.history.of_kind(SettingChanged)]
    earlier = f"; {len(changes) - MOST_CHANGES} before: laminar audit RUN" if len(changes) > MOST_CHANGES else ""
    for change in changes[-MOST_CHANGES:]:
        cards.append(Card("changed", f"step {change.step}", f"{change.describe()}{earlier}"))
        earlier = ""
    for _, ended in report.snapshot.history.of_kind(Unquantized):
        cards.append(Card("changed", f"step {ended.step}", ended.describe()))
    if report.diagnosis is not None:
        cards.append(Card("limited by", report.diagnosis.verdict.lower(), "the evidence is below"))
    for figure in FIGURES:
        value = figure.value(report) if figure.note is not None else None
        if figure.note is not None and value is not None:
            cards.append(Card(figure.name, figure.format(value), figure.note(report)))
    for name, passes in report.snapshot.history.evaluations_by_set.items():
        last, first = passes[-1].figures, passes[0].figures
        before = f", was {first.mean.value:.3f}" if len(passes) > 1 else ""
        unscored = f"; {last.unscored} not scored" if last.unscored else ""
        words = f"95 % interval {last.mean.low:.3f} to {last.mean.high:.3f}{before}{unscored}"
        if len(passes) > 1:
            parts = words, describe_main_term(first, last), warn_of_bonus(first, last, report.snapshot.config)
            words = "; ".join(part for part in parts if part)
        cards.append(Card(f"{name}: {last.name}", f"{last.mean.value:.3f}", words))
    return cards
