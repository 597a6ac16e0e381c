"""What an agent answers, read with care: the one on the target may be of another version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from prefixwise.bench.artifacts import OpsRow
from prefixwise.bench.files import problems_of
from prefixwise.bench.remote.targets.base import TargetError

_MEND = "prefixwise ops install mends it where the target has another version"


def told(answer: Mapping[str, Any], name: str, who: str) -> Any:
    """One field of it. Raises TargetError."""
    if name not in answer:
        got = ", ".join(sorted(answer)) or "nothing"
        raise TargetError(f"{who}: expected {name} in the agent's answer, got {got} ({_MEND})")
    return answer[name]


def row_of(answer: object, who: str) -> OpsRow:
    """Raises TargetError."""
    try:
        return OpsRow.model_validate(answer)
    except ValidationError as error:
        raise TargetError(f"{who}: expected a row, got another answer: {problems_of(error)[0]} ({_MEND})") from None
