"""A line on what everything waits for, so that a run that hangs says where. Pure; the views show it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """State of a run's stages, e.g. a learner without a batch while 64 responses wait for a reward that hangs."""

    in_rl: bool
    step: int
    learner_idle_s: float | None  # since it has no batch; None while it has one
    ready: int  # groups that it could have
    wanted: int  # of them for a step
    generating: int  # responses
    scores: str  # that are awaited, in words
    current: int  # replicas that serve the newest version
    replicas: int

    @property
    def line(self) -> str:
        """E.g. "learner waits 35 s for a batch (0 of 32 groups ready); waiting for: scores of 64 responses"."""
        parts = [self.scores] if self.scores else []
        if self.generating:
            parts.append(f"{self.generating} responses being generated")
        if self.current < self.replicas:
            parts.append(f"weights at {self.current} of {self.replicas} replicas")
        return f"{self._learner}; waiting for: {', '.join(parts) or 'nothing'}"

    @property
    def _learner(self) -> str:
        if not self.in_rl:
            return f"after step {self.step}, RL is over" if self.step else "before RL"
        if self.learner_idle_s is None:
            return f"learner at work on step {self.step + 1}"
        return (
            f"learner waits {self.learner_idle_s:.0f} s for a batch ({self.ready} of {self.wanted} groups ready)"
        )


def tell_time_left(*, step: int, steps: int, rl_s: float, max_rl_s: float | None) -> str:
    """Time left at the pace so far, within the limit; "" before the first step."""
    left = [] if not step else [rl_s / step * (steps - step)]
    if max_rl_s is not None:
        left.append(max(0.0, max_rl_s - rl_s))
    if not left:
        return ""
    minutes = min(left) / 60
    return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"
