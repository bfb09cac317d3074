"""Rates at which the hosts of a run moved weights and trained, beside the assumptions of `laminar plan`.

A host is named by its relay; the learner publishes to `relay-0` on its own host. All figures come from the record.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.report.snapshot import Snapshot
from laminar_lab.step_time import (
    LEARNER_MFU,
    LOAD_BYTES_PER_S,
    PUBLISH_BYTES_PER_S,
    RELAY_BYTES_PER_S,
    version_bytes,
)
from laminar_py.records.events import Pulled, Relayed, VersionLoaded, VersionPublished

ROOT = "relay-0"
SLOW = 0.5  # share of the expected rate below which a rate is called slow


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """Medians of one host over the run, in bytes or tokens a second; None: nothing was measured."""

    host: str  # e.g. "relay-1"
    replicas: int = 0  # that loaded versions here
    load: float | None = None  # of a GPU's share; the wait for the relay is left out
    receive: float | None = None  # from the first request for a version until it is verified
    publish: float | None = None  # of a version, while the learner waits
    learner: float | None = None  # tokens of prompts and responses, on all ranks
    mfu: float | None = None


def measure_rates(snapshot: Snapshot) -> tuple[HostRates, ...]:
    """Return a row for each host, the learner's first; none of a run whose engines are emulated."""
    config, history = snapshot.config, snapshot.history
    if config is None or config.rollout.engine.emulates is not None:
        return ()
    published = [event for _, event in history.of_kind(VersionPublished)]
    num_bytes = {event.version: event.num_bytes for event in published}
    received: dict[str, list[float]] = defaultdict(list)
    for _, relayed in history.of_kind(Relayed):
        received[relayed.node] += [relayed.num_bytes / relayed.elapsed_s] if relayed.elapsed_s else []
    pulls = {(pull.subscriber, pull.version): pull for _, pull in history.of_kind(Pulled)}
    loads: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    loaded = (event for _, event in history.of_kind(VersionLoaded) if event.base is None)
    every = [event for event in loaded if event.version in num_bytes]
    for event in [one for one in every if one.checksum is None] or every:  # a hash takes time of its own
        pull = pulls.get((f"replica-{event.replica}", event.version))
        load_s = event.elapsed_s - (pull.waited_s if pull else 0.0)
        if load_s > 0:
            share = num_bytes[event.version] / max(1, config.rollout.engine.gpus)
            loads[pull.node if pull else ROOT][event.replica].append(share / load_s)
    steps = snapshot.samples.steps

    def rates(host: str) -> HostRates:
        here = HostRates(
            host=host,
            replicas=len(loads[host]),
            load=_median(rate for found in loads[host].values() for rate in found),
            receive=_median(received[host]),
        )
        if host != ROOT:
            return here
        return HostRates(
            host=host,
            replicas=here.replicas,
            load=here.load,
            publish=_median(event.num_bytes / event.stall_s for event in published if event.stall_s),
            learner=_median(row.learner_tokens_per_s for row in steps),
            mfu=_median(row.mfu for row in steps if row.mfu is not None),
        )

    return tuple(rates(host) for host in sorted({ROOT, *received, *loads}, key=lambda name: (len(name), name)))


def assumed_rates(measured: Iterable[HostRates]) -> HostRates:
    """Return the rates that `laminar plan` assumes; the learner's tokens cost the FLOPs that they cost the run."""
    learner = next((one.learner * LEARNER_MFU / one.mfu for one in measured if one.learner and one.mfu), None)
    return HostRates(
        host="laminar plan assumes",
        load=LOAD_BYTES_PER_S,
        receive=RELAY_BYTES_PER_S,
        publish=PUBLISH_BYTES_PER_S,
        learner=learner,
        mfu=LEARNER_MFU,
    )


def profiled_rates(profile: EmulationProfile, *, ranks: int, num_bytes: int | None = None) -> HostRates:
    """Return the rates of a profile, and its learner's tokens on so many ranks, without `optimizer_s`.

    Versions have `num_bytes`, by default as many as in bf16.
    """
    learner, engine = profile.learner, profile.engine
    num_bytes = num_bytes or version_bytes(learner.num_published)
    return HostRates(
        host="the profile says",
        load=num_bytes / engine.gpus / engine.load_s if engine.load_s else None,
        receive=profile.relay_bytes_per_s,
        publish=num_bytes / learner.publish_s if learner.publish_s else None,
        learner=ranks * learner.train_tokens_per_s,
    )


def slow_lines(measured: Iterable[HostRates], expected: HostRates) -> Iterator[str]:
    """Yield a line for each rate of a host that is slow beside the expected rate."""
    for one in measured:
        for what in ("load", "receive", "publish", "learner"):
            seen, wanted = getattr(one, what), getattr(expected, what)
            if seen is not None and wanted is not None and seen < SLOW * wanted:
                scale, unit = (1.0, "tokens/s") if what == "learner" else (1e9, "GB/s")
                yield (
                    f"slow: {one.host}, {what}: {seen / scale:,.3g} {unit}, where {expected.host}"
                    f" {wanted / scale:,.3g}; laminar doctor CONFIG --try names the part"
                )


def _median(values: Iterable[float]) -> float | None:
    """Return the median of the values that are numbers; None without any."""
    known = [value for value in values if value == value]
    return median(known) if known else None
