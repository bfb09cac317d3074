"""The base of all config sections, common bounds, and the error for a user's mistake."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class ConfigError(ValueError):
    """A mistake of the user; the message names the field, the value and the remedy, in one line.

    It is a `ValueError` so that pydantic collects it from validators. Other errors of that type are ours.
    """


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys, without casts of strings to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


def is_address(url: str) -> bool:
    """True for an http or https URL with a host, and a numeric port if it has one."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return named and parts.scheme in ("http", "https")
