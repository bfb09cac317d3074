"""How many examples a property test draws: a quarter by day, all of them under `--hypothesis-profile=full`."""

from hypothesis import settings

FEWEST = 20  # by day, of a test that draws more in full
FULL, DAY = 100, 25  # `max_examples` of the two profiles, which `conftest.py` registers


def examples(full: int) -> int:
    """`max_examples` of a test under the profile that is loaded, where `full` is its number in `make test-all`."""
    return min(full, max(FEWEST, full * settings.default.max_examples // FULL))
