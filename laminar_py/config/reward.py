"""Settings of the scoring stage."""

from laminar_py.config.section import Count, Seconds, Section


class RewardConfig(Section):
    """The scoring stage."""

    function: str = "exact"
    """A registered reward, or `path/to/file.py:function` of your own."""
    pattern: str = r"(.+)"
    """For `exact`: regular expression whose first group is the answer in the response."""
    workers: Count = 1
    """Scoring processes."""
    timeout_s: Seconds = 10.0
    """Longest time for one trajectory; above it is dropped as `reward_timeout`."""
