"""Law 1 after kill -9 of a real process at random moments."""

import random
import signal
import subprocess
import sys
import time

import pytest

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import reading

KILLS = 6


def run_and_kill(rng, *arguments):
    """Steps the process said were on disk, after it was killed somewhere behind a random one."""
    command = [sys.executable, "-m", "tests.ledger.crashing_run", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = [process.stdout.readline() for _ in range(rng.randrange(1, 40))]
        time.sleep(rng.random() * 0.02)
        process.kill()
        said += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL, "it died by itself"
    return [int(line.split()[0]) for line in said if line.endswith("\n")]


@pytest.mark.parametrize("disk", [(), ("network",)])
def test_the_laws_hold_after_every_crash_and_no_committed_step_is_lost(tmp_path, disk):
    rng = random.Random(7)
    for incarnation in range(1, KILLS + 1):
        said = run_and_kill(rng, tmp_path, *disk)
        assert not (disk and list(tmp_path.glob("*-wal")))
        assert verify(tmp_path) == []
        assert accounting(tmp_path).balanced
        with reading(tmp_path) as connection:
            (highest,) = connection.execute("SELECT max(step) FROM step WHERE NOT undone").fetchone()
            (last,) = connection.execute("SELECT max(incarnation) FROM incarnation").fetchone()
        assert highest >= said[-1]
        assert last == incarnation
