import sys

try:
    from laminar_py.cli.lines import console, say
    from laminar_py.cli.main import app, main
except KeyboardInterrupt:  # its modules take a second
    print("laminar: stopped before it began", file=sys.stderr)
    raise SystemExit(130) from None

__all__ = ["app", "console", "main", "say"]
