"""What all sections of the configuration have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class ConfigError(ValueError):
    """A setting that cannot work; the message names the field, the value and the remedy, in one line."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, no silent casts of strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
