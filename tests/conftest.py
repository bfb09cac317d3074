"""Order of the tests: whole runs and real clusters, which mostly wait, are spread among the others."""

from itertools import groupby

WAITING = ("tests/runs/", "tests/test_extending.py", "tests/cluster/", "tests/workers/", "tests/preflight/")
WAITING_SHARE = 0.85  # of the session in which they begin, so that nobody waits for one at its end


def pytest_collection_modifyitems(items):
    """Each worker of a parallel session then has its share of both, and seldom do two that wait run at once."""
    modules = [list(tests) for _, tests in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    waiting = [tests for tests in modules if tests[0].nodeid.startswith(WAITING)]
    computing = [tests for tests in modules if not tests[0].nodeid.startswith(WAITING)]
    groups = ((waiting, WAITING_SHARE), (computing, 1.0))
    places = [(share * at / len(group), tests) for group, share in groups for at, tests in enumerate(group)]
    items[:] = [item for _, tests in sorted(places, key=lambda place: place[0]) for item in tests]
