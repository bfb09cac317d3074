import sys

try:
    from laminar_py.cli.main import app, console, main, print_line
except KeyboardInterrupt:  # importing takes a second, in which the user may press Ctrl-C
    print("laminar: stopped before it began", file=sys.stderr)
    raise SystemExit(130) from None

__all__ = ["app", "console", "main", "print_line"]
