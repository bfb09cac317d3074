"""Settings of held-out evaluation."""

from laminar_py.config.section import Count, Seconds, Section


class EvalConfig(Section):
    """Greedy evaluation on the held-out prompts."""

    every_steps: Count | None = None
    """Learner steps between two evaluations of RL; None: only before and after."""
    at_seconds: tuple[Seconds, ...] = ()
    """Seconds of RL after which the weights of that moment are evaluated too, in ascending order."""
    deferred: bool = False
    """Keep the weights in shared memory and evaluate when RL is over, off its clock, instead of meanwhile."""
