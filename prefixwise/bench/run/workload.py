"""The canonical workload: requests of random tokens that are the same for the same arguments, on every machine.

Token n of a part of a request is `pool[u % len(pool)]`, where u is the first 8 bytes, big-endian, of the SHA-256 of
`itemwise:SEED:REQUEST:PART:n`; PART is `query` or `item:INDEX`, numbers are decimal and start at 0. So a part depends
neither on how many others there are nor on the labels, and uses no library's random numbers.

The pool: every id that has a token, in order, without special tokens and the delimiter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from prefixwise.bench.files import now_utc
from prefixwise.bench.kinds.workload import (
    WORKLOAD_VERSION,
    TokenizerFacts,
    Workload,
    WorkloadRequest,
    checksum_key,
    request_checksum,
)
from prefixwise.bench.tokens import TokenFacts, default_delimiter, default_labels
from prefixwise.contract.errors import ArtifactError

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
_SEED_NAME = "itemwise"  # part of the contract: another name gives other tokens and checksums


@dataclass(frozen=True)
class WorkloadOptions:
    """The contract workload where nothing else is said; None: the default, or the tokenizer's own where it has none."""

    query_tokens: int = 2000
    num_items: int = 500
    item_tokens: int = 20
    num_requests: int = 1
    seed: int = 0
    label_token_ids: tuple[int, ...] | None = None
    delimiter_token_id: int | None = None


def make_workload(options: WorkloadOptions, facts: TokenFacts) -> Workload:
    """Its `notes` say where a default was replaced. Raises ArtifactError where a given id is not the model's."""
    notes: list[str] = []
    labels = _labels(options, facts, notes)
    delimiter = _delimiter(options, facts, notes)
    pool = token_pool(facts, delimiter)
    requests = [_request(index, options, labels, pool) for index in range(options.num_requests)]
    tokenizer = TokenizerFacts(
        name_or_path=facts.model, vocab_size=facts.vocab_size, special_token_ids=list(facts.special_ids)
    )
    return Workload(
        schema_version=WORKLOAD_VERSION,
        generated_at_utc=now_utc(),
        model=facts.model,
        query_tokens=options.query_tokens,
        num_items=options.num_items,
        item_tokens=options.item_tokens,
        delimiter_token_id=delimiter,
        label_token_ids=list(labels),
        tokenizer=tokenizer,
        safe_token_pool=_describe_pool(pool),
        requests=requests,
        checksums={checksum_key(each.request_id): request_checksum(each.model_dump()) for each in requests},
        seed=options.seed,
        tokenizer_source=facts.source,
        notes=notes,
    )


def token_pool(facts: TokenFacts, delimiter: int) -> list[int]:
    """The token ids of queries and items, ascending. Raises ArtifactError where none is left."""
    left_out = {*facts.special_ids, delimiter}
    pool = [token_id for token_id in range(facts.num_tokens) if token_id not in left_out]
    if not pool:
        raise ArtifactError(f"{facts.model} has no tokens but special ones: expected at least one to make items of")
    return pool


def _request(index: int, options: WorkloadOptions, labels: Sequence[int], pool: Sequence[int]) -> WorkloadRequest:
    place = f"{options.seed}:{index}"
    return WorkloadRequest(
        request_id=f"canonical_score_request_{index:03d}",
        query_token_ids=_draw(pool, options.query_tokens, f"{place}:query"),
        items_token_ids=[_draw(pool, options.item_tokens, f"{place}:item:{item}") for item in range(options.num_items)],
        label_token_ids=list(labels),
        apply_softmax=True,
        item_first=False,
    )


def _draw(pool: Sequence[int], count: int, place: str) -> list[int]:
    digests = (sha256(f"{_SEED_NAME}:{place}:{number}".encode()).digest() for number in range(count))
    return [pool[int.from_bytes(digest[:8], "big") % len(pool)] for digest in digests]


def _describe_pool(pool: Sequence[int]) -> dict[str, Any]:
    """Every id from the first to the last, without some: most pools are one or two lines like this."""
    left_out = sorted(set(range(pool[0], pool[-1] + 1)) - set(pool))
    return {"first": pool[0], "last": pool[-1], "excluded": left_out, "size": len(pool)}


def _labels(options: WorkloadOptions, facts: TokenFacts, notes: list[str]) -> tuple[int, ...]:
    if options.label_token_ids is not None:
        _check_ids("label_token_ids", options.label_token_ids, facts)
        return options.label_token_ids
    labels, note = default_labels(facts)
    notes += [note] if note else []
    return labels


def _delimiter(options: WorkloadOptions, facts: TokenFacts, notes: list[str]) -> int:
    if options.delimiter_token_id is not None:
        _check_ids("delimiter_token_id", [options.delimiter_token_id], facts)
        return options.delimiter_token_id
    delimiter, note = default_delimiter(facts)
    notes += [note] if note else []
    return delimiter


def _check_ids(field: str, ids: Sequence[int], facts: TokenFacts) -> None:
    wrong = [token_id for token_id in ids if not 0 <= token_id < facts.vocab_size]
    if wrong:
        raise ArtifactError(
            f"{field}: expected ids from 0 to {facts.vocab_size - 1}, the vocabulary of {facts.model}, got {wrong[0]}"
        )
