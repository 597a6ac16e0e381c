"""What all artifacts have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

BackendName = Literal["jax", "pytorch"]
EvaluationView = Literal["portable", "best_native"]
RowStatus = Literal["ok", "partial_failure", "failed"]
FailureReason = Literal["timeout", "http_error", "bad_json", "bad_response", "oom"]
Scores = list[list[float]]


class Artifact(BaseModel):
    """What all have in common: unknown fields stay, wrong types are errors."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
