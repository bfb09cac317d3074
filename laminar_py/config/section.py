"""The base of all sections of a config, common bounds, and the error of a user's mistake."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class ConfigError(ValueError):
    """The user's fault alone; the message names the field, the value and the remedy, in one line.

    A `ValueError` so that pydantic collects it from a validator; nobody else may take one for the other.
    """


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, no silent casts of strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
