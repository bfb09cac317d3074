"""docs/scale.md: its settings exist, and its figures by formula are those that the formulas give."""

import re

import pytest

from laminar_lab.broadcast import Broadcast, Links, arrivals_s
from laminar_lab.emulation.settings import EmulationConfig
from laminar_lab.relay_plan import THREADS, ways
from laminar_lab.step_time import (
    ENCODE_BYTES_PER_S,
    LOAD_BYTES_PER_S,
    PROVE_BYTES_PER_S,
    PUBLISH_BYTES_PER_S,
    RELAY_BYTES_PER_S,
    SEALED_BYTES_PER_S,
)
from laminar_py.config.loading import setting_names
from laminar_py.config.run import RunConfig
from laminar_py.relay.tree import choose_chunk_bytes, grow_tree, versions_at_peak
from laminar_py.runtime.workers.replicas import pace_of
from tests.runs.runs import REPO

PAGE = (REPO / "docs/scale.md").read_text()
WAYS = {  # row of the page: bytes a second of a link, of an encoder and of who applies; None: whole versions
    "the wire,": (50e9, None),
    "a link with one sealed lane": (SEALED_BYTES_PER_S, None),
    "a link with CURVE": (0.53e9, None),
    "a delta until it is proven": (SEALED_BYTES_PER_S, (ENCODE_BYTES_PER_S, PROVE_BYTES_PER_S)),
    "the same by eight": (SEALED_BYTES_PER_S, (ENCODE_BYTES_PER_S, THREADS * PROVE_BYTES_PER_S)),
}
PARAMETERS = (7.6e9, 72.7e9)
FLEETS = {"4": 5, "64": 65, "512": 513}  # hops: hosts with a relay


def cells(row):
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("row", WAYS)
def test_times_of_a_version_are_those_of_the_cost_model(row):
    speed, codec = WAYS[row]
    _, _, *columns, _ = cells(row)
    for parameters, column in zip(PARAMETERS, columns, strict=True):
        told = [float(time) for time in re.findall(r"[\d.]+", column)]
        found = []
        for hosts in FLEETS.values():
            share, rates = (1.0, ()) if codec is None else (0.0082, codec)
            broadcast = Broadcast(round(2 * parameters), share, *rates)
            tree, links = grow_tree(hosts, fanout=1), Links(speed, 50e-6)
            chunk_bytes = choose_chunk_bytes(tree, broadcast.num_bytes, bytes_per_s=speed, overhead_s=50e-6)
            found.append(max(arrivals_s(tree, broadcast, links, chunk_bytes=chunk_bytes)))
        assert told == pytest.approx(found if len(told) > 1 else [found[1]], rel=0.02)


@pytest.mark.parametrize(
    ("row", "rate", "gpus"),
    [
        ("a replica loads", LOAD_BYTES_PER_S, (1, 8)),
        ("a version reaches", RELAY_BYTES_PER_S, (1, 1)),
        ("a publish stops", PUBLISH_BYTES_PER_S, (1, 1)),
    ],
)
def test_rates_and_their_seconds_are_those_of_the_planner(row, rate, gpus):
    told, *seconds = (float(number) for number in re.findall(r"[\d.]+", cells(row)[1]))
    assert told == rate / 1e9
    assert seconds == pytest.approx(
        [2 * size / each / rate for size, each in zip(PARAMETERS, gpus, strict=True)], rel=0.06
    )


def test_room_for_versions_and_the_pace_of_reports_are_those_of_the_code():
    versions = versions_at_peak(keep_versions=2, num_replicas=8)
    assert versions * 2 * PARAMETERS[0] / 2**30 == pytest.approx(170, abs=0.5)
    assert f"{versions} versions of 15.2 GB" in PAGE
    rates = [replicas / pace_of(replicas, 60.0).quiet_s for replicas in (4, 32, 512, 4096)]
    told = [float(cell.replace(",", "")) for cell in cells("reports without news")[1:5]]
    assert told == pytest.approx(rates, rel=0.02)


def test_settings_exist():
    named = re.findall(r"`((?:rollout|learner|relay|packer|repack)\.[a-z_.]+)", PAGE)
    assert named
    assert set(named) <= {*setting_names(RunConfig), *setting_names(EmulationConfig, "rollout.engine.")}


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_the_command_has_the_ways_of_the_page(parameters):
    found = ways(round(2 * parameters), hosts=65, fanout=1, network_bytes_per_s=50e9)
    column = 2 + PARAMETERS.index(parameters)
    rows = {
        "one sealed lane": "a link with one sealed lane",
        "CURVE": "a link with CURVE",
        "wire": "the wire,",
        "delta": "a delta until it is proven",
        "the same": "the same by eight",
    }
    for name, row in rows.items():
        (seconds,) = (way.seconds for way in found if name in way.name)
        told = [float(time) for time in re.findall(r"[\d.]+", cells(row)[column])]
        assert seconds == pytest.approx(told[1 if len(told) > 1 else 0], rel=0.06)
