"""Rates of hosts: bytes of versions over the recorded seconds, by relay, beside the planner's own rates."""

import pytest
from rich.console import Console

from laminar_lab.report.rates import HostRates, assumed_rates, measure_rates
from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.terminal import rate_table
from laminar_py.records.events import Pulled, VersionLoaded
from tests.events import relayed
from tests.report.builders import make_step_row, write_rows
from tests.report.scripted import scripted

GB = 10**9


def arrived(version, elapsed_s, *, node="relay-1"):
    return relayed(node, version, num_bytes=GB, wire_bytes=GB, elapsed_s=elapsed_s)


def loaded(version, elapsed_s, **hashed):
    return VersionLoaded(replica=3, version=version, digest=f"digest{version}", elapsed_s=elapsed_s, **hashed)


@pytest.fixture
async def run(tmp_path):
    async with scripted(tmp_path) as script:
        script.issue(0.5, "g0.0")
        script.at(1.0, arrived(0, 0.0, node="relay-0"), arrived(0, 2.0))
        script.at(2.0, Pulled("relay-1", "replica-3", 0, 0.5), loaded(0, 9.0, checksum="slow, since it hashed"))
        script.publish(3.0, 1, stall_s=0.1, num_bytes=GB)
        script.at(4.0, arrived(1, 4.0), Pulled("relay-1", "replica-3", 1, 1.5), loaded(1, 2.0))
    write_rows(
        tmp_path / "metrics.jsonl",
        [make_step_row(n, n, learner_tokens_per_s=1000.0 * n, mfu=0.1 * n) for n in (1, 2, 3)],
    )
    return tmp_path


async def test_rates_are_bytes_of_a_version_over_the_seconds_on_record(run):
    root, host = measure_rates(read_snapshot(run))
    assert root == HostRates(
        host="relay-0", publish=pytest.approx(GB / 0.1), learner=pytest.approx(2000.0), mfu=pytest.approx(0.2)
    )
    assert host.replicas == 1
    assert host.load == pytest.approx(GB / 0.5), "the wait for the relay and the hashed load are left out"
    assert host.receive == pytest.approx((GB / 2 + GB / 4) / 2)


async def test_the_planner_trains_the_same_tokens_at_its_own_share_of_the_peak(run):
    rates = measure_rates(read_snapshot(run))
    assert assumed_rates(rates).learner == pytest.approx(4000.0)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(rate_table(rates))
    cells = [line.split() for line in shown.get().splitlines()[2:]]
    assert cells[1] == ["relay-0", "0", "-", "-", "10", "2,000", "20.0%"]
    assert cells[2] == ["relay-1", "1", "2", "0.375", "-", "-", "-"]
    assert cells[3] == ["laminar", "plan", "assumes", "4.2", "1.2", "20", "4,000", "40.0%"]
