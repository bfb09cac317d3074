"""The command `laminar`: its list of subcommands, its output, and its exit codes.

Exit codes: 0 done; 1 a law is broken, the run failed, or the program has a bug; 2 bad input (one line on standard
error); 130 stopped by Ctrl-C, SIGTERM or SIGHUP.
"""

import importlib
import inspect
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Container
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from laminar_py.config.registry import installed_points
from laminar_py.config.section import ConfigError
from laminar_py.records.host import visible

GROUP = "laminar_py.commands"  # entry points of installed packages, each a `typer.Typer`
CHECKOUT = Path(__file__).parents[2]  # of an editable installation
COMMANDS = {  # name -> module:attribute of its function, and an example for its help
    "train": ("laminar_py.cli.train:train", "laminar train configs/quickstart.yaml seed=1 steps=60"),
    "export": ("laminar_py.cli.train:export", "laminar export runs/quickstart-1 out/quickstart --dtype bf16"),
    "eval": ("laminar_py.cli.train:evaluate", "laminar eval runs/quickstart-1 eval.sets.heldout.samples=4"),
}

console = Console(highlight=False)


def print_line(line: str, *, style: str | None = None) -> None:
    """Print a line unwrapped; brackets, as in `urls=[...]`, are no markup, and control characters are escaped."""
    console.print(visible(line, keep="\n\t"), style=style, markup=False, soft_wrap=True)


class Commands(TyperGroup):
    """Built-in commands and commands of installed packages. A command's module is imported when it is called."""

    def list_commands(self, ctx: object) -> list[str]:
        """Return the names of built-in commands, then the names that packages announce."""
        return list(dict.fromkeys((*COMMANDS, *(point.name for point in installed_points(GROUP)))))

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | TyperGroup | None:
        """Import and return a command; None for an unknown name.

        Raises `ConfigError` if its package is broken, or if only the checkout has the command.
        """
        if cmd_name in COMMANDS:
            location, example = COMMANDS[cmd_name]
            module, _, attribute = location.partition(":")
            commands = typer.Typer()
            commands.command(epilog=f"Example: {example}")(getattr(importlib.import_module(module), attribute))
            return _make_command(cmd_name, commands)
        for point in entry_points(group=GROUP, name=cmd_name):
            try:
                return _make_command(cmd_name, point.load())
            except ImportError as error:
                package = point.module.partition(".")[0]
                raise ConfigError(
                    f"laminar {cmd_name}: {package} cannot be imported ({error}); install {package} again"
                ) from error
        if cmd_name in _commands_of(CHECKOUT):
            raise ConfigError(
                f"laminar {cmd_name}: this checkout has it, and its installation is older; run pip install -e"
                f" {CHECKOUT} again"
            )
        return None


def _commands_of(checkout: Path) -> Container[str]:
    """Return the commands that a checkout announces; none where the package is installed without one."""
    project = checkout / "pyproject.toml"
    tree = tomllib.loads(project.read_text()) if project.is_file() else {}
    commands: dict[str, str] = tree.get("project", {}).get("entry-points", {}).get(GROUP, {})
    return commands


def _make_command(name: str, commands: typer.Typer) -> TyperCommand | TyperGroup:
    """Convert Typer `commands` to the command `name`, with help from the docstrings of its functions."""
    _set_help(commands)
    command = typer.main.get_command(commands)
    assert isinstance(command, TyperCommand | TyperGroup), "Typer makes these two"
    command.name = name
    return command


def _set_help(commands: typer.Typer) -> None:
    """Set the help of each command and subcommand from its docstring, with joined lines and escaped brackets.

    Typer by itself keeps the docstring's line breaks, and reads brackets as markup.
    """
    for command in commands.registered_commands:
        if command.help is None and command.callback is not None and command.callback.__doc__:
            paragraphs = inspect.cleandoc(command.callback.__doc__).split("\n\n")
            command.help = "\n\n".join(escape(" ".join(paragraph.split())) for paragraph in paragraphs)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _set_help(group.typer_instance)


app = typer.Typer(
    name="laminar", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def laminar() -> None:
    """Trajectory-level asynchronous RL post-training of language models."""


def run() -> None:
    """Run the command line; an error becomes one line, with exit code 2 for bad input and 1 otherwise."""
    from laminar_py.runtime.cluster.errors import RunFailedError, unexpected_message

    try:
        app()
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):  # by Typer
            raise KeyboardInterrupt from None
        raise
    except ConfigError as error:
        _exit(str(error), code=2)
    except RunFailedError as error:
        _exit(str(error), code=1)
    except Exception as error:  # noqa: BLE001 - a bug of ours; a run has already logged its traceback
        if isinstance(error, PermissionError) and error.filename is not None:
            _exit(f"{error.filename}: {error.strerror}; grant access to it, or name another path", code=2)
        with tempfile.NamedTemporaryFile("w", prefix="laminar-", suffix=".log", delete=False) as file:
            file.write(traceback.format_exc())
        _exit(unexpected_message(error, Path(file.name)), code=1)


def _exit(line: str, *, code: int) -> NoReturn:
    print("laminar:", visible(line, keep="\n"), file=sys.stderr)
    raise SystemExit(code) from None
