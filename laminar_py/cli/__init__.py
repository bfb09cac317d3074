"""The command `laminar`. `main` owns the signals before it imports anything that takes time."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names
from laminar_py.runtime.orchestrator.signals import SIGNALS, write_line

if TYPE_CHECKING:
    from laminar_py.cli.command import app as app
    from laminar_py.cli.command import console as console
    from laminar_py.cli.command import print_line as print_line
else:
    __getattr__ = public_names(__name__)


def main() -> None:
    """Run the command line of this process, and end with its exit code."""
    SIGNALS.own()
    try:
        from laminar_py.cli.command import run

        run()
    except KeyboardInterrupt:
        write_line("laminar: stopped")
        raise SystemExit(130) from None
