"""Order of the tests: whole runs and real clusters, which mostly wait, are spread among the others.

All runs of a session fork their processes from one server, `LAMINAR_FORK_SERVER`: its imports take five seconds.

No token of the user's own clusters reaches them: Ray takes one from `RAY_AUTH_TOKEN`, which
`laminar_py.runtime.cluster` sets, else from the file that `RAY_AUTH_TOKEN_PATH` names, else from
~/.ray/auth_token. A process that joins a cluster where such a file lies gives up the variable for it
(`use_token_of_cluster`), and the next cluster that it starts would have that token, while the process goes on with
the one before.
"""

import os
import signal
import tempfile
from itertools import groupby
from pathlib import Path

from hypothesis import settings

from laminar_py.runtime.cluster.forked import SHARED, start_server

os.environ["RAY_AUTH_TOKEN_PATH"] = str(Path(__file__).parent / "no-token")  # before Ray is imported
# a shell may have us ignore it, and so all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)

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


def pytest_configure(config):
    """Start the session's fork server, in the process that starts the workers."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        folder = tempfile.TemporaryDirectory(prefix="laminar-tests-")
        server = start_server(Path(folder.name) / "server")
        os.environ[SHARED] = str(Path(folder.name) / "server")
        os.environ["LAMINAR_FORK_SERVER_PID"] = str(server.pid)
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(server.wait)
        config.add_cleanup(server.kill)
