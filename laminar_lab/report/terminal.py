"""Figures of one run as tables of a terminal, in 100 columns. `laminar report` and `laminar train` print them."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from laminar_lab.report.diagnosis import NO_STEP, Diagnosis, describe_diagnosis
from laminar_lab.report.figures import headline
from laminar_lab.report.learning import LearningFinding
from laminar_lab.report.rates import HostRates, assumed_rates, slow_lines
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.tails import COUNTED, NAMES, Distribution, Distributions, Measure, format_seconds
from laminar_lab.report.tokens import TOKEN_COLUMNS, TokenAccount, token_cells
from laminar_py.records.events import RefillStopped
from laminar_py.records.host import counted


def run_tables(report: RunReport, expected: HostRates | None = None) -> Iterator[Group | str]:
    """Yield tables and lines, the most important first.

    The table of rates ends with the `expected` rates of a profile, by default with the planner's assumptions.
    """
    yield _grid(
        f"{report.run}: {counted(report.steps, 'step')} in {report.rl_s:.1f} s of RL", _headline_rows(report)
    )
    yield diagnosis_table(report.diagnosis)
    yield from learning_lines(report.learning)
    yield token_table(report.tokens)
    yield from _beside_lines(report.tokens)
    if report.rates:
        yield rate_table(report.rates, expected)
        if expected is not None:
            yield from slow_lines(report.rates, expected)
    yield tail_table(report.tails)
    stopped = [event for _, event in report.snapshot.history.of_kind(RefillStopped)]
    if stopped:
        last = stopped[-1]
        yield f"steps that refill could not fill: {len(stopped)}, at last step {last.step} with {last.describe()}"


def make_table(title: str, first: str, others: Iterable[str], rows: Iterable[Iterable[str]]) -> Group:
    """Return a table with words in its first column, and numbers to the right in the others."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="bold", no_wrap=True), table)


def _grid(title: str, rows: Iterable[tuple[str, ...]]) -> Group:
    """Return rows of texts below a title, whose last column wraps."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="bold"), table)


def _headline_rows(report: RunReport) -> Iterator[tuple[str, ...]]:
    return ((card.name, card.value, card.note) for card in headline(report))


def diagnosis_table(diagnosis: Diagnosis | None) -> Group | str:
    """Return the bottleneck of a run with its evidence, or a line that it is unknown."""
    return NO_STEP if diagnosis is None else _grid("\nWhat limits it", describe_diagnosis(diagnosis))


def learning_lines(findings: Iterable[LearningFinding]) -> Iterator[str]:
    """Yield a line for each finding on how the run learns."""
    return (f"learning: {finding}" for finding in findings)


def token_table(account: TokenAccount) -> Group:
    """Return the waterfall of tokens, from issued to useful ones."""
    return make_table("\nWhere the tokens went", "", TOKEN_COLUMNS, token_cells(account))


def _beside_lines(account: TokenAccount) -> Iterator[str]:
    """Yield a line about tokens that the waterfall does not show, if there are any."""
    counts = {
        "of the useful in responses that a cap cut": account.cut,
        "of prefixes computed again after moves and new weights": account.recomputed,
        "trained in steps that were rolled back": account.undone,
    }
    words = [f"{count:,} {name}" for name, count in counts.items() if count]
    if words:
        yield f"beside: {'; '.join(words)}"


def tail_table(tails: Distributions) -> Group:
    """Return the percentiles of each measure."""
    names = NAMES
    if Measure.ENVIRONMENT not in tails:  # else an environment's first tokens come before them
        names = NAMES | {Measure.FIRST_TOKENS: f"  of it, {NAMES[Measure.FIRST_TOKENS]}"}
    cells = [(names[measure], *_percentiles(measure, found)) for measure, found in tails.items()]
    return make_table("\nTails", "", ("p50", "p90", "p95", "p99", "max", "p95/p50"), cells)


def rate_table(rates: Sequence[HostRates], expected: HostRates | None = None) -> Group:
    """Return the rates of each host, and below them the expected ones; None: the assumptions of the planner."""
    cells = [(one.host, f"{one.replicas}", *_rates(one)) for one in rates]
    below = expected or assumed_rates(rates)
    columns = ("replicas", "load GB/s", "receive GB/s", "publish GB/s", "learner tokens/s", "MFU")
    return make_table("\nRates of this run", "", columns, [*cells, (below.host, "", *_rates(below))])


def _rates(one: HostRates) -> list[str]:
    moved = ["-" if rate is None else f"{rate / 1e9:.3g}" for rate in (one.load, one.receive, one.publish)]
    learner = "-" if one.learner is None else f"{one.learner:,.0f}"
    return [*moved, learner, "-" if one.mfu is None else f"{one.mfu:.1%}"]


def _percentiles(measure: Measure, found: Distribution) -> list[str]:
    values = found.p50, found.p90, found.p95, found.p99, found.max
    tail = "-" if found.tail is None else f"{found.tail:.1f}"
    return [*(map(_count if measure in COUNTED else format_seconds, values)), tail]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
