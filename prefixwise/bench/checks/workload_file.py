"""What must hold in a workload: its requests are what their checksums and the counts say, and of legal tokens."""

from __future__ import annotations

from collections.abc import Iterable

from prefixwise.bench.artifacts import Workload, WorkloadRequest
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.workload import checksum_key, request_checksum


def check_workload(workload: Workload, found: Findings) -> None:
    """All requests, then what they have in common."""
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
        _check_range(token_ids, field, workload.tokenizer.vocab_size, found)


def _check_counts(request: WorkloadRequest, where: str, workload: Workload, found: Findings) -> None:
    found.same(f"{where}.query_token_ids length", workload.query_tokens, len(request.query_token_ids), "query_tokens")
    found.same(f"{where}.items_token_ids length", workload.num_items, len(request.items_token_ids), "num_items")
    for index, item in enumerate(request.items_token_ids):
        if len(item) != workload.item_tokens:
            found.same(f"{where}.items_token_ids[{index}] length", workload.item_tokens, len(item), "item_tokens")
            break  # one is enough to be told of
    found.same(f"{where}.label_token_ids", workload.label_token_ids, request.label_token_ids, "the workload's")
    found.same(f"{where}.apply_softmax", True, request.apply_softmax)
    found.same(f"{where}.item_first", False, request.item_first)


def _check_tokens(request: WorkloadRequest, where: str, workload: Workload, found: Findings) -> None:
    """A delimiter in an item would cut it in two, and a special token makes a prompt that nobody writes."""
    forbidden = {workload.delimiter_token_id, *workload.tokenizer.special_token_ids}
    parts = [("query_token_ids", request.query_token_ids)]
    parts += [(f"items_token_ids[{index}]", item) for index, item in enumerate(request.items_token_ids)]
    for name, token_ids in parts:
        _check_range(token_ids, f"{where}.{name}", workload.tokenizer.vocab_size, found)
        bad = next((token_id for token_id in token_ids if token_id in forbidden), None)
        if bad is not None:
            found.fail(f"{where}.{name}", "tokens that are neither special nor the delimiter", bad)


def _check_range(token_ids: Iterable[int], where: str, vocab_size: int, found: Findings) -> None:
    bad = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if bad is not None:
        found.fail(where, f"ids from 0 to {vocab_size - 1}, the vocabulary", bad)


def _check_checksum(index: int, request_id: str, workload: Workload, found: Findings) -> None:
    key = checksum_key(request_id)
    computed = request_checksum(found.document["requests"][index])
    found.same(f"checksums.{key}", computed, workload.checksums.get(key), "computed from the request")
