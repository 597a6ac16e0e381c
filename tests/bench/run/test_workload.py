from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import chain

import pytest

from prefixwise.bench.kinds.workload import Workload, checksum_key, request_checksum
from prefixwise.bench.run.workload import WorkloadOptions, make_workload, token_pool
from prefixwise.bench.tokens import TokenFacts, token_facts
from prefixwise.contract.errors import ArtifactError

# By another program, in another language, from the rule in the module's docstring.
CONTRACT_SHA256 = "2ce1f40deff33c00aae53453d788cc81265ba28491ff77172d24ae155dc8760a"
SMALL = WorkloadOptions(query_tokens=5, num_items=3, item_tokens=4, label_token_ids=(7, 8), delimiter_token_id=2)
# Ten ids, of which the last two have no token; 0 is special.
TINY = TokenFacts("tiny", "a test", vocab_size=10, num_tokens=8, special_ids=(0,))


def without_date(workload: Workload) -> dict[str, object]:
    return workload.model_dump(exclude={"generated_at_utc"})


def test_the_defaults_are_the_contract_workload() -> None:
    workload = make_workload(WorkloadOptions(), token_facts("Qwen/Qwen3-0.6B"))
    (request,) = workload.requests
    assert (workload.query_tokens, workload.num_items, workload.item_tokens) == (2000, 500, 20)
    assert (workload.label_token_ids, workload.delimiter_token_id) == ([9454, 2753], 151_643)
    assert (request.apply_softmax, request.item_first) == (True, False)
    assert request.request_id == "canonical_score_request_000"
    assert [len(request.query_token_ids), len(request.items_token_ids)] == [2000, 500]
    assert {len(item) for item in request.items_token_ids} == {20}
    assert workload.checksums == {"canonical_score_request_000_sha256": CONTRACT_SHA256}
    assert workload.safe_token_pool == {"first": 0, "last": 151_642, "excluded": [], "size": 151_643}
    assert workload.notes == []


def test_a_token_is_what_its_place_hashes_to() -> None:
    (request,) = make_workload(replace(SMALL, seed=9), TINY).requests
    digest = hashlib.sha256(b"itemwise:9:0:item:2:3").hexdigest()
    pool = [1, 3, 4, 5, 6, 7]  # neither 0, which is special, nor 2, the delimiter, nor 8 and 9
    assert request.items_token_ids[2][3] == pool[int(digest[:16], 16) % 6]


def test_the_same_arguments_give_the_same_workload() -> None:
    assert without_date(make_workload(SMALL, TINY)) == without_date(make_workload(SMALL, TINY))


def test_another_seed_gives_other_tokens() -> None:
    one, other = make_workload(SMALL, TINY), make_workload(replace(SMALL, seed=1), TINY)
    assert one.requests[0].query_token_ids != other.requests[0].query_token_ids
    assert one.checksums != other.checksums


def test_more_items_and_other_labels_leave_the_tokens_as_they_are() -> None:
    more = replace(SMALL, num_items=5, item_tokens=6, label_token_ids=(1, 3))
    (small,), (large,) = make_workload(SMALL, TINY).requests, make_workload(more, TINY).requests
    assert large.query_token_ids == small.query_token_ids
    assert [item[:4] for item in large.items_token_ids[:3]] == small.items_token_ids


def test_requests_are_numbered_and_each_has_tokens_and_a_checksum_of_its_own() -> None:
    workload = make_workload(replace(SMALL, num_requests=3), TINY)
    names = [f"canonical_score_request_00{index}" for index in range(3)]
    assert [request.request_id for request in workload.requests] == names
    assert [*workload.checksums] == [f"{name}_sha256" for name in names]
    assert len(set(workload.checksums.values())) == 3
    queries = {tuple(request.query_token_ids) for request in workload.requests}
    assert len(queries) == 3
    assert workload.requests[0] == make_workload(SMALL, TINY).requests[0]


def test_a_checksum_is_that_of_compact_json_with_sorted_keys() -> None:
    compact = b'{"a":[1,2],"b":{"c":true,"d":"\\u00fc"}}'
    assert request_checksum({"b": {"d": "ü", "c": True}, "a": [1, 2]}) == hashlib.sha256(compact).hexdigest()
    assert checksum_key("some_request") == "some_request_sha256"


def test_tokens_are_neither_special_nor_the_delimiter_nor_without_a_text() -> None:
    options = replace(SMALL, query_tokens=200, num_items=20)
    (request,) = make_workload(options, TINY).requests
    assert {*request.query_token_ids, *chain(*request.items_token_ids)} == {1, 3, 4, 5, 6, 7}


def test_the_pool_is_told_in_short() -> None:
    workload = make_workload(SMALL, TINY)
    assert workload.safe_token_pool == {"first": 1, "last": 7, "excluded": [2], "size": 6}


def test_a_vocabulary_of_special_tokens_has_no_pool() -> None:
    with pytest.raises(ArtifactError, match="tiny has no tokens but special ones"):
        token_pool(replace(TINY, special_ids=tuple(range(8))), 9)


def test_items_may_be_empty() -> None:
    assert make_workload(replace(SMALL, item_tokens=0), TINY).requests[0].items_token_ids == [[], [], []]


# Defaults that are not in the vocabulary


@pytest.mark.parametrize(
    ("facts", "delimiter", "which"),
    [
        (replace(TINY, eos_id=3), 3, "its end of text"),
        (replace(TINY, special_ids=(4, 6)), 4, "its first special token"),
        (replace(TINY, special_ids=()), 9, "its last id"),
    ],
)
def test_a_default_delimiter_is_replaced_by_the_models_own(facts: TokenFacts, delimiter: int, which: str) -> None:
    workload = make_workload(replace(SMALL, delimiter_token_id=None), facts)
    assert workload.delimiter_token_id == delimiter
    expected = f"the default delimiter_token_id 151643 is not in the vocabulary of tiny (10): {delimiter}, {which}"
    assert workload.notes == [expected]


@pytest.mark.parametrize(
    ("facts", "labels", "which"),
    [
        (replace(TINY, answer_ids=(6, 4)), [6, 4], "its tokens Yes and No"),
        (TINY, [1, 2], "its first ordinary tokens"),
        (replace(TINY, vocab_size=9454), [1, 2], "its first ordinary tokens"),  # which has 2753, and not 9454
    ],
)
def test_default_labels_are_replaced_together(facts: TokenFacts, labels: list[int], which: str) -> None:
    workload = make_workload(replace(SMALL, label_token_ids=None), facts)
    assert workload.label_token_ids == workload.requests[0].label_token_ids == labels
    (note,) = workload.notes
    assert note.startswith("the default label_token_ids [9454, 2753] is not in the vocabulary of tiny")
    assert note.endswith(f"{labels}, {which}")


def test_defaults_at_the_end_of_the_vocabulary_stay() -> None:
    options = replace(SMALL, label_token_ids=None, delimiter_token_id=None)
    assert make_workload(options, replace(TINY, vocab_size=9455)).label_token_ids == [9454, 2753]
    assert make_workload(options, replace(TINY, vocab_size=151_644)).delimiter_token_id == 151_643


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(SMALL, delimiter_token_id=10), r"delimiter_token_id: expected ids from 0 to 9, .* tiny, got 10"),
        (replace(SMALL, delimiter_token_id=-1), r"delimiter_token_id: expected ids from 0 to 9, .* tiny, got -1"),
        (replace(SMALL, label_token_ids=(3, 12)), r"label_token_ids: expected ids from 0 to 9, .* tiny, got 12"),
    ],
)
def test_an_id_that_was_given_is_not_replaced(options: WorkloadOptions, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        make_workload(options, TINY)
