"""A run whose longest responses exceed one rank's tokens: two ranks share each row."""

import pytest

from laminar_py.ledger.database import reading
from tests.runs.runs import TrainProcess, assert_laws

ROW = 256  # tokens of a rank; the quickstart's responses have up to 344
SETTINGS = (
    "learner.world_size=2",
    "learner.context_parallel=2",
    f"packer.max_tokens={ROW}",
    "rollout.sampling.max_new_tokens=344",
    "steps=4",
    "eval.sets={}",
)


@pytest.mark.slow
def test_what_is_longer_than_one_rank_s_tokens_is_trained_on_by_two(tmp_path):
    with TrainProcess(tmp_path, *SETTINGS) as run:
        run.end_with(0)
    with reading(run.run) as connection:
        longest = "SELECT max(length) FROM trajectory WHERE status = 'consumed'"
        ((length,),) = connection.execute(longest)
        ((dropped,),) = connection.execute("SELECT count(*) FROM trajectory WHERE drop_reason = 'too_long'")
    assert length > ROW
    assert dropped == 0
    assert_laws(run.run)
