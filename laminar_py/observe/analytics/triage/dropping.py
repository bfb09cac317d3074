"""Meaning of the table of drops, in plain words. Pure; called by `triage.report`."""

from laminar_py.observe.analytics.measure.drops import MIN_KNOWN, DropRow, DropTable
from laminar_py.observe.analytics.read.columns import CAPS
from laminar_py.records.trajectory import Cap, DropReason

SETTINGS = {
    Cap.TOKENS: "rollout.sampling.max_new_tokens",
    Cap.SECONDS: "rollout.max_seconds",
    Cap.TURNS: "environment.max_turns",
}
_LONGER = 1.2  # times as long as what is kept: below, dropping does not go by length
_CERTAIN = 2.0  # standard errors


def tell_dropping(table: DropTable) -> list[str]:
    """A line on dropping, then one for each cap that cut, then one on groups without signal."""
    rows = {row.reason: row for row in table.rows}
    lines = [_on_dropping(table)]
    lines += [_on_cap(rows[f"cap: {cap}"], cap, table) for cap in CAPS if f"cap: {cap}" in rows]
    if DropReason.NO_SIGNAL in rows:
        lines.append(_on_signal(rows[DropReason.NO_SIGNAL], table))
    return lines


def _on_dropping(table: DropTable) -> str:
    row, kept = table.any, table.kept
    if not row.count:
        return "Nothing was dropped for its length, age or failures: no long reasoning is lost this way."
    if not row.length or not kept.length:
        return f"{row.share:.2%} were dropped, of lengths that cannot be compared with what is kept."
    times = row.length / kept.length
    at_least = "at least " if row.unfinished else ""
    words = f"{row.share:.2%} were dropped, {at_least}{times:.1f}x as long as what is kept"
    if times < _LONGER and not row.unfinished:
        return f"{words}: dropping does not go by length."
    if row.known < MIN_KNOWN or row.reward is None:
        return (
            f"{words}; the rewards of only {row.known} are known, so whether this trains away long reasoning is"
            " not."
        )
    if row.expected is None:
        return (
            f"{words}; the {row.known} whose reward is known {_right(row.reward, table)}, and nothing so long is"
            " kept: what they could teach is lost."
        )
    compared = (
        f"{words}; the {row.known} whose reward is known {_right(row.reward, table)}, kept ones of the same length"
        f" {_right(row.expected, table)}"
    )
    if row.expected - row.reward > _CERTAIN * row.error:
        return f"{compared}: what is dropped is worse, and little is lost."
    if times < _LONGER:
        return f"{compared}: as good, and hardly longer."
    return f"{compared}: dropping trains away long reasoning."


def _on_cap(row: DropRow, cap: str, table: DropTable) -> str:
    words = f"The cap on {cap} ({SETTINGS[Cap(cap)]}) cut {row.share:.2%}, which were trained on as they were"
    if row.reward is None:
        return f"{words}."
    rest = f"the kept {_right(table.kept.reward or 0.0, table)}"
    return f"{words}; they {_right(row.reward, table)}, {rest}."


def _on_signal(row: DropRow, table: DropTable) -> str:
    trained = table.ended - sum(other.count for other in table.rows if not other.reason.startswith("cap"))
    words = f"Groups without signal took {row.share:.1%}; they {_right(row.reward or 0.0, table)}"
    return f"{words}, and nothing of them was trained on ({trained:,} trajectories were)."


def _right(reward: float, table: DropTable) -> str:
    return f"have a mean reward of {reward:.3g}" if table.graded else f"were right in {reward:.0%}"
