"""Settings of detection and revival."""

from laminar_py.config.section import Count, Seconds, Section


class SupervisorConfig(Section):
    """Detection and revival of dead parts."""

    heartbeat_timeout_s: Seconds = 30.0
    """A part that has not answered for so long is killed and started anew."""
    max_restarts: Count = 20
    """Restarts of one part after which the run gives up."""
