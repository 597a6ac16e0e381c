"""What all artifacts have in common: the base model, the names of backends and views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from prefixwise.bench.render.document import NONE

BackendName = Literal["jax", "pytorch"]


EvaluationView = Literal["portable", "best_native"]


RowStatus = Literal["ok", "partial_failure", "failed"]


FailureReason = Literal["timeout", "http_error", "bad_json", "bad_response", "oom"]


Scores = list[list[float]]


class Artifact(BaseModel):
    """What all have in common: unknown fields stay, wrong types are errors."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


BACKENDS: tuple[BackendName, ...] = ("jax", "pytorch")


BACKEND_NAMES: Mapping[BackendName, str] = {"jax": "JAX", "pytorch": "PyTorch"}


VIEW_NAMES: Mapping[EvaluationView, str] = {"portable": "portable", "best_native": "best native"}


def date_of(artifact: Artifact) -> str:
    """The day on which the artifact was made; a dash where it does not say."""
    return str(getattr(artifact, "generated_at_utc", None) or NONE)[:10]
