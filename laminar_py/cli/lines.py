"""Output of all commands: the console, and lines of text that reach it as text, whatever they contain."""

from rich.console import Console

from laminar_py.records.visible import visible

console = Console(highlight=False)


def say(line: str, *, style: str | None = None) -> None:
    """Print a line unwrapped; brackets, as in `urls=[...]`, are text and no markup, control characters escapes."""
    console.print(visible(line, keep="\n\t"), style=style, markup=False, soft_wrap=True)
