"""How a run's errors are told: what the user or a limit explains in its own line, a mistake of ours as one."""

import io

import pytest
from rich.console import Console

from laminar_py.cluster.errors import PartBugError, RunFailedError
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.orchestrator import launch
from tests.runs.runs import REPO

BUG = r"probably a bug of laminar's: {}; the traceback is in .*controller\.log"


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
    ],
)
def test_a_bug_anywhere_in_a_group_counts_before_all_else(tmp_path, monkeypatch, errors, kind, line):
    async def lead(controller):
        raise ExceptionGroup("run", [ExceptionGroup("inner", errors)])

    monkeypatch.setattr(launch, "Controller", lambda *arguments, **settings: None)
    monkeypatch.setattr(launch, "_lead", lead)
    config = load_config(REPO / "configs/quickstart.yaml", [])
    run, console = RunFolder(tmp_path), Console(file=io.StringIO())
    run.logs.mkdir()
    with pytest.raises(kind, match=line):
        launch._run(config, run, placement=None, inputs=None, resume=False, console=console)
