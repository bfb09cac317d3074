import sys
from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

try:
    from laminar_py.cli.main import app, console, main, print_line
except KeyboardInterrupt:  # importing takes a second, in which the user may press Ctrl-C
    print("laminar: stopped before it began", file=sys.stderr)
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from laminar_py.cli.reward import score_and_print as score_and_print
else:
    __getattr__ = public_names(__name__)

__all__ = ["app", "console", "main", "print_line", "score_and_print"]
