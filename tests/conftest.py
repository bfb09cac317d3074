"""Which tests run, how deep, and in which order: whole runs and real clusters, which mostly wait, are spread out.

`make test` leaves out tests marked `slow` and draws a quarter of the examples of property tests. `make test-all`
runs all of both. `--part K/N` keeps part K of the tests that are left, for a share that changes with the commit.

All runs of a session fork their processes from one server, `LAMINAR_FORK_SERVER`: its imports take five seconds.

The Ray clusters of tests have a token of their own.
"""

import hashlib
import os
import secrets
import signal
import tempfile
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import settings

from laminar_py.records.host import socket_folder
from laminar_py.runtime.cluster.forked import SHARED, start_server
from tests.depth import DAY, FULL

os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # before Ray is imported
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's spelling)
# a shell may have us ignore it, and so all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)

# no test is timed
settings.register_profile("day", deadline=None, max_examples=DAY)
settings.register_profile("full", deadline=None, max_examples=FULL)
settings.load_profile("day")

WAITING = (
    "tests/runs/",
    "tests/test_extending.py",
    "tests/cluster/",
    "tests/workers/",
    "tests/preflight/",
    "tests/doctor/",
    "tests/launcher/",
)


def pytest_addoption(parser):
    parser.addoption("--part", type=part, metavar="K/N", help="of N parts of the tests run the K-th, from 0")


def part(text):
    """E.g. `(2, 8)` of `2/8`. A K of N or more counts from the start, so any number chooses a part."""
    index, number = map(int, text.split("/"))
    return index % number, number


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config, items):
    """Keep the chosen part, then spread the tests that wait.

    Each worker of a parallel session has its share of both, and seldom do two that wait run at once.
    """
    if chosen := config.getoption("part"):
        kept = in_part(items, *chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    modules = [list(tests) for _, tests in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    waiting = [tests for tests in modules if tests[0].nodeid.startswith(WAITING)]
    computing = [tests for tests in modules if not tests[0].nodeid.startswith(WAITING)]
    places = [(index / len(group), tests) for group in (waiting, computing) for index, tests in enumerate(group)]
    items[:] = [item for _, tests in sorted(places, key=lambda place: place[0]) for item in tests]


def pytest_configure(config):
    """Start the session's fork server, in the process that starts the workers."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        folder = tempfile.TemporaryDirectory(prefix="laminar-tests-", dir=socket_folder())
        server = start_server(Path(folder.name) / "server")
        os.environ[SHARED] = str(Path(folder.name) / "server")
        os.environ["LAMINAR_FORK_SERVER_PID"] = str(server.pid)
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(server.wait)
        config.add_cleanup(server.kill)


def in_part(items, index, number):
    """The tests of a part, the same in every checkout.

    Tests of one file share an SGLang server, so these are divided by file: as evenly as can be, into no more parts
    than there are files, so that no part is empty.
    """
    files = sorted({item.location[0] for item in items if item.get_closest_marker("sglang")}, key=digest)
    parts = min(number, len(files))
    servers = {file for place, file in enumerate(files) if place % parts == index % parts}
    return {
        item
        for item in items
        if (
            item.location[0] in servers
            if item.get_closest_marker("sglang")
            else digest(item.nodeid) % number == index
        )
    }


def digest(name):
    """A number that follows from a name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
