"""The end of a run: a few lines that `laminar train` prints, and the table of all figures in `laminar report`."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from laminar_lab.advice import advise_changes
from laminar_lab.report.diagnosis import NO_STEP
from laminar_lab.report.gains import describe_main_term, warn_of_bonus
from laminar_lab.report.run_report import RunReport
from laminar_py.config.run import RunConfig
from laminar_py.observe import CheckpointFigures, EvaluationFigures, RelayFigures, Summary
from laminar_py.records.host import counted

WHOLE = 0.995  # share of bytes above which versions count as whole


def ending_table(summary: Summary, report: RunReport, *, interrupted: bool) -> Table:
    """Gain of a run, its limit and the next commands, a line each."""
    run, steps = summary.run, f"{counted(summary.steps, 'step')} in {summary.rl_seconds:.1f} s"
    trained = "" if summary.trained_steps == summary.steps else f", {summary.trained_steps} of them trained"
    rows = [
        *([] if interrupted else _evaluation_rows(summary.evaluations, report.snapshot.config)),
        ("RL", f"{steps}{trained}, {summary.trained_tokens_per_s:,.0f} trained tokens/s"),
        *_limit_rows(report),
        *(("learning", str(finding)) for finding in report.learning[:1]),
        ("next", f"laminar report {run} (all figures, pictures), laminar advise {run}, laminar samples {run}"),
    ]
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def _limit_rows(report: RunReport) -> Iterator[tuple[str, str]]:
    """Rows on the bottleneck and the first setting to change against it."""
    diagnosis, config = report.diagnosis, report.snapshot.config
    if diagnosis is None or config is None:
        yield "limited by", NO_STEP
        return
    gain = diagnosis.evidence if diagnosis.is_balanced else f"without it {diagnosis.describe_gain} the goodput"
    yield "limited by", f"{diagnosis.verdict}; {gain}"
    advice = advise_changes(diagnosis, config)
    yield ("change first", str(advice.gains[0][0])) if advice.gains else ("change", advice.without)


def closing_table(summary: Summary, config: RunConfig | None = None) -> Table:
    """All figures of an ended run; `config` has the weights of its reward's terms."""
    lengths, counts, repack = summary.response_length, summary.trajectories, summary.repack
    trained, left = summary.trained_steps, "never trained" if summary.finished else "live"
    drops = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.dropped_by_reason.items()))
    moved = (
        f", {repack.running} trajectories moved in {repack.rounds} rounds, and {repack.waiting} that waited"
        if repack.rounds
        else ""
    )
    attention = f"; attention {summary.attention}" if summary.attention else ""
    idle = "" if trained == summary.steps else f"; {trained} of {counted(summary.steps, 'step')} trained"
    rows = [
        *_evaluation_rows(summary.evaluations, config),
        ("RL", f"{counted(summary.steps, 'step')} in {summary.rl_seconds:.1f} s{idle}"),
        ("response tokens", f"p50 {lengths.p50}, p95 {lengths.p95}, p99 {lengths.p99}"),
        *_turn_rows(summary),
        ("tokens", f"{summary.tokens.generated:,} generated, {summary.tokens.trained:,} trained"),
        ("trained", f"{summary.trained_tokens_per_s:,.0f} tokens/s"),
        (
            "trajectories",
            f"{counts.issued} issued = {counts.consumed} consumed + {counts.dropped} dropped"
            f" + {counts.live} {left}",
        ),
        *([("replayed", f"{counts.replayed} times")] if counts.replayed else []),
        ("dropped", drops or "none"),
        ("staleness", f"mean {summary.staleness.mean:.2f}, max {summary.staleness.max}"),
        ("versions alive", f"{summary.versions_alive_max} at most"),
        ("relay", relay_summary(summary.relay)),
        ("checkpoints", checkpoint_summary(summary.checkpoints)),
        ("replicas", f"{summary.kv_use:.0%} of their KV caches in use{moved}"),
        (
            "learner",
            f"waited {summary.learner_waiting_share:.0%}; {summary.overlap_share:.0%} of its work overlapped"
            f" generation{attention}",
        ),
        ("memory", f"{summary.peak_memory_bytes / 2**30:.2f} GiB at the peak, all processes"),
        ("restarts", ", ".join(f"{part} {count}" for part, count in summary.restarts.items()) or "none"),
    ]
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def _turn_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Row on turns, if the run has environments."""
    if (turns := summary.turns).mean:
        times = f"p50 {turns.environment_p50_s:.2f} s, p95 {turns.environment_p95_s:.2f} s"
        yield "turns", f"mean {turns.mean:.2f} of the model; of its environment {times} a trajectory"


def relay_summary(relay: RelayFigures) -> str:
    """Number of versions, the learner's stall, the spread, and the transferred bytes, in one line."""
    words = [f"{relay.versions} versions"]
    if relay.stall_s is not None:
        words.append(f"the learner stood still {relay.stall_s * 1000:.1f} ms for one")
    if relay.spread_s is not None:
        words.append(f"{relay.spread_s:.2f} s until the last relay had it")
    if relay.wire_share is not None:
        words.append(
            "whole versions travelled"
            if relay.wire_share >= WHOLE
            else f"{relay.wire_share:.1%} of whole versions travelled, the rest was as in the version before"
        )
    return ", ".join(words)


def checkpoint_summary(checkpoints: CheckpointFigures) -> str:
    """Number of checkpoints, the learner's stall and the time until they are on disk, in one line."""
    if checkpoints.stall_s is None or checkpoints.elapsed_s is None:
        return "none"
    stall_ms = checkpoints.stall_s * 1000
    on_disk = f"{checkpoints.elapsed_s:.2f} s until it was on disk"
    return f"{checkpoints.count}, the learner stood still {stall_ms:.1f} ms for one, {on_disk}"


def _evaluation_rows(
    evaluations: Sequence[EvaluationFigures], config: RunConfig | None
) -> Iterator[tuple[str, str]]:
    """First and last evaluation of each set, with the main one of several terms, and a gain that others made."""
    for name in dict.fromkeys(evaluation.set_name for evaluation in evaluations):
        passes = [evaluation for evaluation in evaluations if evaluation.set_name == name]
        accurate = all(evaluation.figures.is_accuracy for evaluation in passes)
        label = f"{name} {'accuracy' if accurate else 'mean reward'}"
        first, last = passes[0].figures, passes[-1].figures
        term = f"; {words}" if (words := describe_main_term(first, last)) else ""
        yield label, f"{first.mean.value:.3f} -> {last.mean.describe()}{term}"
        if warning := warn_of_bonus(first, last, config):
            yield "careful", f"{name}: {warning}"
