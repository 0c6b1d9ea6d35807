"""Settings classes whose fields are options of a command and environment variables; worker and gateway have one each.

    class Settings(CommandSettings):
        max_size: Size = Field(default=1024, description="…")    # --max-size, TOKENMILL_MAX_SIZE

`tokenmill.cli.options` makes a command of such a class.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tokenmill.protocol.environment import PREFIX, is_service_link

_UNITS: Final = {"": 1, "b": 1} | {
    unit: factor**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, factor in ((f"{prefix}ib", 1024), (prefix, 1024), (f"{prefix}b", 1000))
}


def parse_size(value: object) -> object:
    """Parse `2GiB`, `512MiB`, `1.5g`, `100MB` or a plain number into bytes; return other types as they are.

    `k`, `m`, `g` and `t` alone are powers of 1024. pydantic's ByteSize takes them as powers of 1000, and ignores text
    behind the unit.

    Raises:
        ValueError: not a size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size such as 2GiB, 512MiB or 100MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes; written with a unit on the command line and in the environment."""
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A comma-separated list on the command line and in the environment."""


def variable(field: str) -> str:
    """Return the environment variable of a field."""
    return PREFIX + field.upper()


def option(field: str) -> str:
    """Return the command-line option of a field."""
    return "--" + field.replace("_", "-")


class _Environment(PydanticBaseSettingsSource):
    """Reads the variable of each field under its exact name.

    pydantic-settings' own source reads `tokenmill_queue` too or, if it minds case and fields have aliases, `queue`.
    """

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value = os.environ.get(variable(field_name))
        if value and field_name == "port" and is_service_link(variable(field_name), value):
            value = None  # set by Kubernetes for a service that is called `tokenmill`
        if value and field.annotation is bool:
            value = value.strip()  # as the command line does; pydantic strips numbers
        return value or None, field_name, False

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: value for name, value in found.items() if value is not None}


class CommandSettings(BaseSettings):
    """Immutable settings. A field `some_name` is the option `--some-name` and the environment variable
    `TOKENMILL_SOME_NAME`.

    Fields that are not given are read from the environment; an empty variable counts as unset.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the given values, then the environment; no files."""
        return init_settings, _Environment(settings_cls)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Make settings from the given values (by field) and from the environment; None counts as not given.

        Raises:
            ValueError: with one line for each wrong value, which names its option if the value is in `given`, else its
                variable. A line never holds the value, which may be a password.
        """
        given = {field: value for field, value in given.items() if value is not None}
        names = {
            field: variable(field) if field not in given and os.environ.get(variable(field)) else option(field)
            for field in cls.model_fields
        }
        try:
            return cls(**given)
        except ValidationError as error:
            raise ValueError(
                "\n".join(_complaint(dict(item), names) for item in error.errors(include_url=False))
            ) from None


def _complaint(error: dict[str, Any], names: Mapping[str, str]) -> str:
    """Format an error of pydantic with the option or variable that was given; `names`: field → that name."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        message = f"must match {error['ctx']['pattern']}"
    if error["loc"]:
        field = str(error["loc"][0])
        return f"{names.get(field, option(field))}: {message}"
    by_option = {option(field): name for field, name in names.items()}
    return re.sub(r"--[a-z-]+", lambda found: by_option.get(found[0], found[0]), message)
