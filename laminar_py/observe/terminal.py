"""Figures of one run as the terminal shows them, in 100 columns. Words and layout alone."""

from collections.abc import Iterable, Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from laminar_py.observe.diagnosis import NO_STEP, Diagnosis, wall_rows
from laminar_py.observe.report import RunReport
from laminar_py.observe.tails import (
    COUNTED,
    MOST_ROWS,
    NAMES,
    Distribution,
    Distributions,
    Measure,
    Tails,
    tell_seconds,
)
from laminar_py.observe.tokens import DropRow, DropTable, TokenAccount, TokenLoss
from laminar_py.records.events import RefillStopped

_BY = (Measure.LENGTH, Measure.GENERATION, Measure.ENVIRONMENT, Measure.REWARD, Measure.END_TO_END)
_OF_GENERATION = {  # an environment's first words come before them
    Measure.FIRST_TOKENS: f"  of it, {NAMES[Measure.FIRST_TOKENS]}"
}


def run_tables(report: RunReport, *, details: bool) -> Iterator[Group | str]:
    """Tables and lines, the most important first."""
    tokens = report.tokens
    if report.simulation:
        yield f"SIMULATED: {report.simulation}"
    yield (
        f"{report.run}: {report.steps} steps in {report.rl_s:.1f} s of RL; goodput {tokens.goodput:,.0f} useful"
        f" tokens/s, {report.trained_tokens_per_s:,.0f} trained"
    )
    if report.steps and tokens.useful_trajectories:
        size, length = tokens.useful_trajectories / report.steps, tokens.useful / tokens.useful_trajectories
        step_s = report.rl_s / report.steps
        yield f"a mean step: {size:,.0f} trajectories x {length:,.1f} useful tokens / {tell_seconds(step_s)}"
    for name, passes in report.snapshot.history.of_sets.items():
        first, last = passes[0].figures, passes[-1].figures
        yield f"{name}: {first.mean.value:.3f} at the first evaluation; the last: {last.describe()}"
    yield NO_STEP if report.diagnosis is None else diagnosis_table(report.diagnosis)
    yield token_table(tokens)
    yield from _beside(tokens)
    yield tail_table(report.tails)
    yield from _stragglers(report)
    if report.staleness is not None:
        yield f"staleness: mean {report.staleness.mean:.2f}, max {report.staleness.max} learner steps"
    yield from _refills(report)
    if details:
        for title, rows in (
            ("replica", report.tails.by_replica),
            ("versions", report.tails.by_version),
            ("task", report.tails.by_task),
        ):
            if rows:
                yield _tails_by(title, rows)
    if report.drops.rows:
        yield drop_table(report.drops, details=details)
    yield from report.dropping


def _refills(report: RunReport) -> Iterator[str]:
    """The last step that dynamic sampling could not fill, and how many there were."""
    stopped = [event for _, event in report.snapshot.history.of_kind(RefillStopped)]
    if stopped:
        last = stopped[-1]
        yield f"steps that refill could not fill: {len(stopped)}, at last step {last.step} with {last.describe()}"


def make_table(title: str, first: str, others: Iterable[str], rows: Iterable[Iterable[str]]) -> Group:
    """Words to the left, numbers to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="bold", no_wrap=True), table)


def diagnosis_table(diagnosis: Diagnosis) -> Group:
    """Wall of the run, and what to change."""
    table = Table.grid(padding=(0, 2))
    for heading, line in wall_rows(diagnosis):
        table.add_row(heading, line)
    return Group(Text("\nWhat limits it", style="bold"), table)


def token_table(account: TokenAccount) -> Group:
    """Waterfall of tokens, from issued down to useful."""
    losses = sorted(account.losses, key=lambda loss: -loss.tokens)
    rows = [
        TokenLoss("issued", account.issued, account.issued_trajectories),
        *(TokenLoss(f"  - {loss.name}", loss.tokens, loss.trajectories) for loss in losses),
        TokenLoss("= useful", account.useful, account.useful_trajectories),
    ]
    cells = (
        (row.name, f"{row.tokens:,}", f"{row.tokens / max(1, account.issued):.1%}", f"{row.trajectories:,}")
        for row in rows
    )
    return make_table("\nWhere the tokens went", "", ("tokens", "share", "trajectories"), cells)


def _beside(account: TokenAccount) -> Iterator[str]:
    told = {
        "of the useful in responses that a cap cut": account.cut,
        "of prefixes computed again after moves and new weights": account.recomputed,
        "trained in steps that were rolled back": account.undone,
    }
    words = [f"{count:,} {what}" for what, count in told.items() if count]
    if words:
        yield f"beside: {'; '.join(words)}"


def tail_table(tails: Tails) -> Group:
    """Distributions over all trajectories."""
    names = NAMES if Measure.ENVIRONMENT in tails.overall else NAMES | _OF_GENERATION
    cells = [
        (names[measure], *_quantiles(found, seconds=measure not in COUNTED))
        for measure, found in tails.overall.items()
    ]
    if tails.longest_over_mean is not None:
        cells.append(("longest over mean of a group", *_quantiles(tails.longest_over_mean, seconds=False)))
    return make_table("\nTails", "", ("p50", "p90", "p95", "p99", "max", "p95/p50"), cells)


def _quantiles(found: Distribution, *, seconds: bool) -> list[str]:
    values = found.p50, found.p90, found.p95, found.p99, found.max
    tail = "-" if found.tail is None else f"{found.tail:.1f}"
    return [*(map(tell_seconds if seconds else _number, values)), tail]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _stragglers(report: RunReport) -> Iterator[str]:
    found = report.stragglers
    told = {
        "of the life of trajectories was waiting for the last of their group": found.group_wait,
        "of the replicas' slots were empty while a last few held them": found.slots,
        "of their usual KV cache": found.kv,
    }
    words = [f"{share:.1%} {what}" for what, share in told.items() if share is not None]
    if words:
        yield f"lost to stragglers: {'; '.join(words)}"


def _tails_by(title: str, rows: dict[str, Distributions]) -> Group:
    """Rows by a key; those with the longest tail of generation, where there are too many."""
    p95 = {key: row[Measure.GENERATION].p95 for key, row in rows.items() if Measure.GENERATION in row}
    longest = sorted(p95, key=lambda key: -p95[key])[:MOST_ROWS]
    shown = {key: row for key, row in rows.items() if len(rows) <= MOST_ROWS or key in longest}
    measures = [one for one in _BY if one is not Measure.ENVIRONMENT or any(one in row for row in rows.values())]
    heads = [NAMES[measure] for measure in measures]
    cells = ((key, *_cells(row, measures)) for key, row in shown.items())
    return make_table(f"\nBy {title}: p50 / p95", title, heads, cells)


def _cells(row: Distributions, measures: Iterable[Measure]) -> Iterator[str]:
    for measure in measures:
        found = row.get(measure)
        if found is None:
            yield "-"
        elif measure is Measure.LENGTH:
            yield f"{_number(found.p50)} / {_number(found.p95)}"
        else:
            yield f"{tell_seconds(found.p50)} / {tell_seconds(found.p95)}"


def drop_table(table: DropTable, *, details: bool) -> Group:
    """Drops of each reason; with `details`, of each range of lengths."""
    rows = [table.kept, *table.rows]
    if not details:
        heads = ["trajectories", "share", "mean tokens", "reward", "kept, same length"]
        return make_table("\nDropped, and cut by caps", "", heads, map(_summary, rows))
    heads = ["number", *(f"to {edge:,}" for edge in table.edges)]
    title = "\nDropped, and cut by caps: share of each length in tokens, then reward"
    return make_table(title, "", heads, ((_reason(row), f"{row.count:,}", *_binned(row)) for row in rows))


def _reason(row: DropRow) -> str:
    return row.reason.replace("_", " ")


def _summary(row: DropRow) -> list[str]:
    mean = f"{'>' if row.unfinished else ''}{row.length:,.0f}"
    rewards = [_value(row.reward), _value(row.expected)]
    return [_reason(row), f"{row.count:,}", f"{row.share:.1%}", mean, *rewards]


def _binned(row: DropRow) -> Iterator[str]:
    for found in row.bins:
        reward = "" if found.reward is None else f" {found.reward:.2f}"
        yield f"{found.share:.0%}{reward}" if found.share else "-"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
