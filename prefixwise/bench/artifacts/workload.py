"""The canonical workload: requests in token ids, with their checksums."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from prefixwise.bench.artifacts.base import Artifact

WORKLOAD_VERSION: Literal["canonical_score_workload_v1"] = "canonical_score_workload_v1"


class TokenizerFacts(Artifact):
    """Where the token pool comes from."""

    name_or_path: str
    vocab_size: int = Field(ge=1)
    special_token_ids: list[int]


class WorkloadRequest(Artifact):
    """One request to `/v1/score`, in token ids."""

    request_id: str
    query_token_ids: list[int] = Field(min_length=1)
    items_token_ids: list[list[int]] = Field(min_length=1)
    label_token_ids: list[int] = Field(min_length=1)
    apply_softmax: bool
    item_first: bool


class Workload(Artifact):
    """`canonical_workload.json`: the same arguments give the same requests and checksums."""

    schema_version: Literal["canonical_score_workload_v1"]
    generated_at_utc: str
    model: str
    query_tokens: int = Field(ge=1)
    num_items: int = Field(ge=1)
    item_tokens: int = Field(ge=0)
    delimiter_token_id: int = Field(ge=0)
    label_token_ids: list[int] = Field(min_length=1)
    tokenizer: TokenizerFacts
    safe_token_pool: dict[str, Any] | list[int]
    requests: list[WorkloadRequest] = Field(min_length=1)
    checksums: dict[str, str]
    # Of ours; workloads of the earlier system do without.
    seed: int | None = None
    tokenizer_source: str | None = None  # in words: its own files, or what is known of the model
    notes: list[str] = Field(default_factory=list)
