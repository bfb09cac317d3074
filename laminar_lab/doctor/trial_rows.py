"""Rows of `laminar doctor --try`: a config's demand on its machines, a measurement and a verdict. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from laminar_lab.report.rates import SLOW, assumed_rates, measure_rates
from laminar_lab.report.snapshot import Snapshot
from laminar_lab.step_time import LEARNER_MFU
from laminar_py.records.events import LearnerLoaded, RunStarted, VersionLoaded, VersionPublished

WEIGHTY = 64e6  # bytes of a version from which its rates say something about the machine
MISMATCH = 0.3  # nats, 99th percentile of |learner - engine|; an engine in bf16 shows up to 0.2


class Verdict(StrEnum):
    """Verdicts of a row."""

    OK = "ok"
    SLOW = "slow"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow:
    """A row of the table, e.g. `TriedRow(what="learner step", asked="MFU 40 %", measured="MFU 38 %", ...)`."""

    what: str
    asked: str
    measured: str = ""
    verdict: Verdict = Verdict.NOT_RUN
    remedy: str = ""
    value: float | None = None  # of the measured figure, in the unit that the row names


def judged(
    what: str,
    asked: str,
    measured: str,
    *,
    failed: bool = False,
    slow: bool = False,
    remedy: str = "",
    value: float | None = None,
) -> TriedRow:
    """Make a row of a measured part; `remedy` is kept only where the part failed or is slow."""
    verdict = Verdict.FAILED if failed else Verdict.SLOW if slow else Verdict.OK
    remedy = "" if verdict is Verdict.OK else remedy
    return TriedRow(what=what, asked=asked, measured=measured, verdict=verdict, remedy=remedy, value=value)


def rate_row(what: str, asked: float, measured: float, *, remedy: str, weighty: bool = True) -> TriedRow:
    """Judge a rate in bytes per second; unless `weighty`, it had too few bytes to be called slow."""
    return judged(
        what,
        f"{asked / 1e9:.3g} GB/s" if weighty else "more than 64 MB would be judged",
        f"{measured / 1e9:.3g} GB/s",
        slow=weighty and measured < SLOW * asked,
        remedy=remedy,
        value=measured,
    )


TRIAL = (
    "learner start",
    "engines start",
    "first response",
    "learner step",
    "publish",
    "versions to nodes",
    "loads",
    "mismatch",
)
"""Parts of the trial, in the order in which a run reaches them."""


def trial_rows(snapshot: Snapshot, *, start_limit_s: float) -> list[TriedRow]:
    """Return a row for each part of the trial that the run reached."""
    rows = [
        _loaded_row(snapshot),
        _start_row(snapshot, start_limit_s),
        _response_row(snapshot),
        _learner_row(snapshot),
        *_version_rows(snapshot),
        _mismatch_row(snapshot),
    ]
    return [row for row in rows if row is not None]


def _first(times: Iterable[tuple[float, object]]) -> float | None:
    return next((at_s for at_s, _ in times), None)


def _loaded_row(snapshot: Snapshot) -> TriedRow | None:
    loaded = next((event for _, event in snapshot.history.of_kind(LearnerLoaded)), None)
    if loaded is None:
        return None
    refused = f"; not used: {'; '.join(loaded.refused)}" if loaded.refused else ""
    return judged("learner start", "an attention kernel that computes right", f"{loaded.attention}{refused}")


def _start_row(snapshot: Snapshot, limit_s: float) -> TriedRow | None:
    began, loaded = (_first(snapshot.history.of_kind(kind)) for kind in (RunStarted, VersionLoaded))
    if began is None or loaded is None:
        return None
    measured = f"{loaded - began:.1f} s from the run's start to a loaded version"
    return judged("engines start", f"within {limit_s:g} s", measured, value=loaded - began)


def _response_row(snapshot: Snapshot) -> TriedRow | None:
    loaded, ended = _first(snapshot.history.of_kind(VersionLoaded)), snapshot.trajectories.finished_s
    ended = ended[~np.isnan(ended)]
    if loaded is None or not len(ended):
        return None
    took_s = float(ended.min()) - loaded
    return judged("first response", "ends", f"{took_s:.1f} s after the load; {len(ended)} ended", value=took_s)


def _learner_row(snapshot: Snapshot) -> TriedRow | None:
    steps = snapshot.samples.steps
    if not steps:
        return None
    last = steps[-1]
    mfu = "" if last.mfu is None else f", MFU {last.mfu:.0%}"
    return judged(
        "learner step",
        "ends" if last.mfu is None else f"MFU {LEARNER_MFU:.0%}",
        f"{last.learner_s:.2f} s, {last.learner_tokens_per_s:,.0f} tokens/s{mfu}",
        slow=last.mfu is not None and last.mfu < SLOW * LEARNER_MFU,
        remedy="NCCL_DEBUG=INFO and logs/learner-0.log; learner.compile=true; a larger packer.max_tokens",
        value=last.learner_tokens_per_s,
    )


def _version_rows(snapshot: Snapshot) -> list[TriedRow]:
    """Return rows of publish, relays and loads; of several hosts the slowest counts."""
    published = next((event for _, event in snapshot.history.of_kind(VersionPublished)), None)
    if published is None:
        return []
    hosts, asked = measure_rates(snapshot), assumed_rates(())
    found = (
        ("publish", asked.publish, [one.publish for one in hosts], "the limit of locked memory, other load"),
        ("versions to nodes", asked.receive, [one.receive for one in hosts], "ray start --node-ip-address"),
        ("loads", asked.load, [one.load for one in hosts], "other load on the host's memory"),
    )
    rows = []
    for what, wanted, rates, remedy in found:
        known = [rate for rate in rates if rate is not None]
        if known and wanted is not None:
            weighty = published.num_bytes >= WEIGHTY
            rows.append(rate_row(what, wanted, min(known), remedy=remedy, weighty=weighty))
    return rows


def _mismatch_row(snapshot: Snapshot) -> TriedRow | None:
    seen = [row.mismatch_p99 for row in snapshot.samples.steps if row.mismatch_p99 == row.mismatch_p99]
    if not seen:
        return None
    return judged(
        "mismatch",
        f"at most {MISMATCH} nats, p99",
        f"{max(seen):.2g} nats",
        failed=max(seen) > MISMATCH,
        remedy="engine and learner compute different things: flags of the engine, learner.attention",
        value=max(seen),
    )
