"""The embedded engine beside `generate` in the smallest form: both sides run, nothing is compared."""

from benchmarks.engines.huggingface import rows
from tests.bench.test_engines import TINY, TRAFFIC


def test_each_concurrency_gives_its_ratio_and_the_rate_of_the_other():
    found = rows(repeats=1, tell=lambda line: None, model=TINY, traffic=TRAFFIC)
    names = ("local_over_hf", "hf_useful_tokens")
    assert [row.name for row in found] == [f"{name}_c{slots}" for slots in (1, 4) for name in names]
    assert all(row.value > 0 for row in found)
