"""Output of all commands: the console, and lines of text that reach it as they are."""

from rich.console import Console

console = Console(highlight=False)


def say(line: str, *, style: str | None = None) -> None:
    """Print a line unwrapped; brackets, as in `urls=[...]`, are text and no markup."""
    console.print(line, style=style, markup=False, soft_wrap=True)
