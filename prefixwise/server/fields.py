"""Fields of the smaller routes' bodies, checked as `contract/parse.py` checks those of a scoring request."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, MissingParameterError

Fields = Mapping[str, object]


def present(body: Fields) -> dict[str, object]:
    """The fields that are there; null counts as absent."""
    return {name: value for name, value in body.items() if value is not None}


def required(fields: Fields, name: str, expected: str) -> object:
    """Raises missing_NAME."""
    if name not in fields:
        message = f"{name} is required: expected {expected}, got nothing"
        raise MissingParameterError(message, code=f"missing_{name}", param=name)
    return fields[name]


def text(fields: Fields, name: str) -> str | None:
    """None where it is absent. Raises invalid_NAME_type."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    message = f"{name} must be a string, got {describe(value)}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)


def flag(fields: Fields, name: str) -> bool:
    """False where it is absent. Raises invalid_NAME_type."""
    value = fields.get(name, False)
    if isinstance(value, bool):
        return value
    message = f"{name} must be true or false, got {describe(value)}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)


def seconds(fields: Fields, name: str, default: float, most: float) -> float:
    """Above 0 and at most `most`. Raises invalid_NAME."""
    value = fields.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, int | float) and is_number and math.isfinite(value) and 0 < value <= most:
        return float(value)
    message = f"{name} must be a number of seconds above 0 and at most {most:g}, got {describe(value)}"
    raise InvalidValueError(message, code=f"invalid_{name}", param=name)
