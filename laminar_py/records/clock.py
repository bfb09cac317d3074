"""Real time, as the parts of a run are given it."""

import time


class SystemClock:
    """Real time."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()
