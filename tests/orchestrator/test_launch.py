"""How a run's errors are told: what the user or a limit explains in its own line, a mistake of ours as one."""

import errno
import io
import sqlite3
import sys
from contextlib import closing

import pytest
from rich.console import Console

from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.runtime.cluster.errors import PartBugError, RunFailedError, UnwritableError
from laminar_py.runtime.orchestrator import launch
from tests.runs.runs import REPO


def opened(folder):
    """Everything that a controller would be made of, in a folder with a place for logs."""
    run = RunFolder(folder)
    run.logs.mkdir()
    config = load_config(REPO / "configs/quickstart.yaml", [])
    return launch.RunStart(config=config, run=run, placement=None, inputs=None, resumed=False)


BUG = r"probably a bug of laminar's: {}; the traceback is in .*controller\.log"


LORA = "learner.lora.rank=4"


@pytest.mark.parametrize(
    ("settings", "line", "times"),
    [
        (["staleness.max_staleness=null"], launch.UNBOUNDED, 1),
        (["staleness.max_staleness=2"], launch.UNBOUNDED, 0),
        (["staleness.max_staleness=null", "schedule=sync"], launch.UNBOUNDED, 0),
        ([LORA], launch.WHOLE_WARM_START, 1),
        ([], launch.WHOLE_WARM_START, 0),
        ([LORA, "warm_start=null", "model.from_scratch=false"], launch.WHOLE_WARM_START, 0),
    ],
)
def test_a_start_says_once_what_a_user_may_not_expect_of_its_settings(monkeypatch, settings, line, times):
    monkeypatch.setattr(launch, "lead", lambda *arguments, **settings: sys.exit())
    said = io.StringIO()
    with pytest.raises(SystemExit):
        launch.launch(
            load_config(REPO / "configs/quickstart.yaml", settings),
            resume=None,
            console=Console(file=said, width=80),
        )
    assert said.getvalue().count(line) == times


UNWRITTEN = r"cannot be written \(.*{}\); .* MiB are free there, and it needs room for checkpoints .* --resume$"


def full_ledger() -> sqlite3.Error:
    """What SQLite raises where there is no room."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA max_page_count = 1")
        try:
            connection.execute("CREATE TABLE event (body TEXT)")
        except sqlite3.Error as error:
            return error
    raise AssertionError("there was room")


@pytest.mark.parametrize(
    ("errors", "kind", "line"),
    [
        ([OSError("disk"), RunFailedError("too often")], RunFailedError, "^too often$"),
        ([OSError("disk"), ConfigError("steps=0")], ConfigError, "^steps=0$"),
        ([RunFailedError("too often"), TypeError("planted")], RunFailedError, BUG.format("TypeError: planted")),
        (
            [ConfigError("s"), PartBugError("replica-0: KeyError: 3")],
            RunFailedError,
            BUG.format("replica-0: KeyError: 3"),
        ),
        ([OSError("disk")], RunFailedError, BUG.format("OSError: disk")),
        ([TypeError("after it"), OSError(errno.ENOSPC, "full")], RunFailedError, UNWRITTEN.format("full")),
        (
            [OSError(errno.EROFS, "read-only", "x/ledger")],
            RunFailedError,
            UNWRITTEN.format("read-only: 'x/ledger'"),
        ),
        ([UnwritableError("learner-0: full")], RunFailedError, UNWRITTEN.format("learner-0: full")),
        ([full_ledger()], RunFailedError, UNWRITTEN.format("the ledger: database or disk is full")),
    ],
)
def test_a_bug_anywhere_in_a_group_counts_before_all_else(tmp_path, monkeypatch, errors, kind, line):
    async def lead(controller, run):
        raise ExceptionGroup("run", [ExceptionGroup("inner", errors)])

    monkeypatch.setattr(launch, "_lead", lead)
    with pytest.raises(kind, match=line):
        launch._lead_logged(opened(tmp_path), lambda opened: None)
