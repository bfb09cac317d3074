"""A disk that is full: one line that names the run folder and what it needs; the record holds, the run goes on.

A limit on the size of files stands for the disk: what the controller writes beyond it fails, as on a full one.
"""

import resource

from laminar_lab.audit.verify import verify
from tests.runs.runs import ALONE, TrainProcess, assert_laws, wait_until_gone

FEW_BYTES = 64 * 2**10  # beyond which a file cannot be written; the ledger's is larger from the start


def test_a_disk_that_is_full_ends_the_run_with_one_line_and_it_goes_on_when_there_is_room(tmp_path):
    with TrainProcess(tmp_path, "steps=10000", *ALONE) as train:
        train.wait_for_step(1)
        family = train.family()
        resource.prlimit(train.process.pid, resource.RLIMIT_FSIZE, (FEW_BYTES, FEW_BYTES))
        code, output = train.finish()
        assert wait_until_gone(family) == []
    (line,) = [line for line in output.splitlines() if line.startswith("laminar:")]
    assert line.startswith(f"laminar: {train.run}: cannot be written ("), line
    assert "for each checkpoint" in line
    assert line.endswith("and continue with --resume")
    assert code == 1
    assert "Traceback" not in output
    assert verify(train.run) == []
    done = len((train.run / "metrics.jsonl").read_bytes().splitlines())
    with TrainProcess(tmp_path, f"steps={done + 1}", *ALONE, resume=True) as train:
        output = train.end_with(0)
    assert_laws(train.run)
