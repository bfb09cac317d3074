"""Order of the tests: whole runs and real clusters, which mostly wait, are spread among the others."""

from itertools import groupby

from hypothesis import settings

settings.register_profile("busy", deadline=None)  # no test is timed
settings.load_profile("busy")

WAITING = (
    "tests/runs/",
    "tests/test_extending.py",
    "tests/cluster/",
    "tests/workers/",
    "tests/preflight/",
    "tests/launcher/",
)


def pytest_collection_modifyitems(items):
    """Each worker of a parallel session then has its share of both, and seldom do two that wait run at once."""
    modules = [list(tests) for _, tests in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    waiting = [tests for tests in modules if tests[0].nodeid.startswith(WAITING)]
    computing = [tests for tests in modules if not tests[0].nodeid.startswith(WAITING)]
    places = [(index / len(group), tests) for group in (waiting, computing) for index, tests in enumerate(group)]
    items[:] = [item for _, tests in sorted(places, key=lambda place: place[0]) for item in tests]
