"""The part of a turn that counts, by a regular expression. Called by the kinds of environment that read one."""

import re

from laminar_py.config.section import ConfigError


def check_pattern(pattern: str | None) -> None:
    """Raises `ConfigError` where a pattern that a user wrote is none, or has no group for what counts."""
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r}: not a regular expression ({error}); mend it") from None
    if not groups:
        raise ConfigError(f"pattern={pattern!r}: has no group; put what counts in parentheses")


def last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """First group of a pattern's last match, without white space around it; None where nothing matches."""
    found = [match[1] or "" for match in pattern.finditer(text)]
    return found[-1].strip() if found else None
