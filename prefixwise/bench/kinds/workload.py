"""The canonical workload: requests in token ids, with their checksums."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Literal

from pydantic import Field

from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.tokens import known_models

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
    tokenizer_source: str | None = None  # a phrase: its own files, or the table of known models
    notes: list[str] = Field(default_factory=list)


def request_checksum(request: Mapping[str, Any]) -> str:
    """SHA-256 of the request as compact JSON with sorted keys."""
    return sha256(json.dumps(request, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checksum_key(request_id: str) -> str:
    """The key of a request's checksum in a workload."""
    return f"{request_id}_sha256"


def check_workload(workload: Workload, found: Findings) -> None:
    """Check all requests, then the labels and the delimiter."""
    ids = [request.request_id for request in workload.requests]
    for index, request in enumerate(workload.requests):
        where = f"requests[{index}]"
        if ids.index(request.request_id) != index:
            found.fail(f"{where}.request_id", "an id that no other request has", request.request_id)
        _check_counts(request, where, workload, found)
        _check_tokens(request, where, workload, found)
        _check_checksum(index, request.request_id, workload, found)
    for key in workload.checksums.keys() - {checksum_key(request_id) for request_id in ids}:
        found.warn(f"checksums.{key}", "the name of a request and _sha256", "no such request")
    found.warn_of_few_labels("label_token_ids", workload.label_token_ids)
    named = (("delimiter_token_id", [workload.delimiter_token_id]), ("label_token_ids", workload.label_token_ids))
    for field, token_ids in named:
        _check_named(token_ids, field, workload, found)


def _check_counts(request: WorkloadRequest, where: str, workload: Workload, found: Findings) -> None:
    found.same(f"{where}.query_token_ids length", workload.query_tokens, len(request.query_token_ids), "query_tokens")
    found.same(f"{where}.items_token_ids length", workload.num_items, len(request.items_token_ids), "num_items")
    for index, item in enumerate(request.items_token_ids):
        if len(item) != workload.item_tokens:
            found.same(f"{where}.items_token_ids[{index}] length", workload.item_tokens, len(item), "item_tokens")
            break  # the first is enough
    found.same(f"{where}.label_token_ids", workload.label_token_ids, request.label_token_ids, "the workload's")
    found.same(f"{where}.apply_softmax", True, request.apply_softmax)
    found.same(f"{where}.item_first", False, request.item_first)


def _check_tokens(request: WorkloadRequest, where: str, workload: Workload, found: Findings) -> None:
    """A delimiter would split an item, and special tokens do not occur in real prompts."""
    forbidden = {workload.delimiter_token_id, *workload.tokenizer.special_token_ids}
    parts = [("query_token_ids", request.query_token_ids)]
    parts += [(f"items_token_ids[{index}]", item) for index, item in enumerate(request.items_token_ids)]
    for name, token_ids in parts:
        _check_range(token_ids, f"{where}.{name}", workload.tokenizer.vocab_size, found)
        bad = next((token_id for token_id in token_ids if token_id in forbidden), None)
        if bad is not None:
            found.fail(f"{where}.{name}", "tokens that are neither special nor the delimiter", bad)


def _check_named(token_ids: Iterable[int], where: str, workload: Workload, found: Findings) -> None:
    """Ids that may be added tokens.

    `vocab_size` counts all ids in a workload of ours. The earlier system writes that of the tokenizer, which leaves
    added tokens out: an id beyond it is legal if it is special, or the model is known to have it.
    """
    rest = [token_id for token_id in token_ids if token_id not in workload.tokenizer.special_token_ids]
    size, known = workload.tokenizer.vocab_size, known_models().get(workload.model)
    if workload.tokenizer_source is not None:
        _check_range(rest, where, size, found)
    elif known is not None:
        _check_range(rest, where, max(size, known.vocab_size), found)
    elif any(token_id >= size for token_id in rest):
        expected = f"ids from 0 to {size - 1}, unless they are added tokens, which tokenizer.vocab_size leaves out"
        found.warn(where, expected, max(rest))
    else:
        _check_range(rest, where, size, found)


def _check_range(token_ids: Iterable[int], where: str, vocab_size: int, found: Findings) -> None:
    bad = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if bad is not None:
        found.fail(where, f"ids from 0 to {vocab_size - 1}, the vocabulary", bad)


def _check_checksum(index: int, request_id: str, workload: Workload, found: Findings) -> None:
    key = checksum_key(request_id)
    computed = request_checksum(found.document["requests"][index])
    found.same(f"checksums.{key}", computed, workload.checksums.get(key), "computed from the request")
