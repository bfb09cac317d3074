"""The end of a simulation that comes to no step any more. Owned by `simulate.run`."""

from laminar_py.config import ConfigError, RunConfig

STALLED_S = 1e5  # of the GPUs, in which no response gets any further
VAIN_BATCHES, VAIN_GROUPS = 100, 2000  # of responses that end, and of which no step comes


class StallWatch:
    """Looks at how far a run is, now and then."""

    def __init__(self, config: RunConfig) -> None:
        assert config.emulation is not None, "a simulation has emulated engines"
        rollout = config.rollout
        self._stalled_s = STALLED_S / config.emulation.compression
        groups = (VAIN_BATCHES + rollout.max_refill) * rollout.prompts_per_step + VAIN_GROUPS
        self._most_ended = groups * rollout.group_size
        self._batch = f"rollout.prompts_per_step={rollout.prompts_per_step}"
        self._step = self._ended = 0  # responses that had ended at the last step
        self._moved, self._moved_s = (-1, -1), 0.0  # when it was last found to have changed

    def look(self, now_s: float, *, step: int, ended: int, moved: tuple[int, int], waits: bool) -> None:
        """Compare with what was seen before. Raises `ConfigError`.

        `moved` grows with all that responses do; with `waits` there is something that is sure to come.
        """
        if step > self._step:
            self._step, self._ended = step, ended
        if waits or moved != self._moved:
            self._moved, self._moved_s = moved, now_s
        if now_s - self._moved_s > self._stalled_s:
            raise ConfigError(
                f"{self._batch}: step {step + 1} is not full, and no response has got any further for"
                f" {STALLED_S:g} s of the GPUs; lower it, or raise buffer.capacity, rollout.batch_per_replica or"
                " rollout.replicas"
            )
        if ended - self._ended > self._most_ended:
            raise ConfigError(
                f"{self._batch}: {ended - self._ended:,} responses have ended since step {step}, and the next one"
                " is not full, since groups are dropped; raise rollout.group_deadline_s, or what else drops them"
            )
