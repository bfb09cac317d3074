from laminar_py.cli.main import app, main

__all__ = ["app", "main"]
