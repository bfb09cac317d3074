"""An event loop whose time passes at once: with nothing to do it skips to its next timer.

Work for threads is done on the spot, since no time passes while it lasts.
"""

import asyncio
import selectors

DAY_S = 86_400.0


class _Skipping(selectors.DefaultSelector):
    """Waits for no time, and says how much of it would have passed."""

    skipped_s = 0.0

    def select(self, timeout=None):
        self.skipped_s += timeout or 0.0
        return super().select(None if timeout is None else 0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its `time` is what was skipped."""

    def __init__(self):
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self):
        return self._skipping.skipped_s

    def skip(self, seconds):
        """So much time passes in which nothing runs."""
        self._skipping.skipped_s += seconds

    def run_in_executor(self, executor, function, *arguments):
        done = self.create_future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 (whatever it raises is the future's)
            done.set_exception(error)
        return done


def virtually(coroutine, *, limit_s=DAY_S):
    """Run it to its end in virtual time, of which it has so much."""

    async def limited():
        async with asyncio.timeout(limit_s):
            return await coroutine

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())
