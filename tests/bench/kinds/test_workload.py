from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.kinds.samples import GONE, REQUEST_SHA256, check, reported, warned

KEY = "canonical_score_request_000_sha256"
OURS = {"tokenizer_source": "its own tokenizer"}  # then vocab_size counts added tokens, too


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({f"checksums__{KEY}": "0" * 64}, f"checksums.{KEY}: expected {REQUEST_SHA256} (computed from the request)"),
        ({f"checksums__{KEY}": GONE}, f"expected {REQUEST_SHA256} (computed from the request), got None"),
        ({"query_tokens": 4}, "requests[0].query_token_ids length: expected 4 (query_tokens), got 3"),
        ({"num_items": 500}, "requests[0].items_token_ids length: expected 500 (num_items), got 2"),
        ({"item_tokens": 3}, "requests[0].items_token_ids[0] length: expected 3 (item_tokens), got 2"),
        ({"label_token_ids": [2]}, "requests[0].label_token_ids: expected [2] (the workload's), got [2, 3]"),
        ({"requests__0__apply_softmax": False}, "requests[0].apply_softmax: expected True, got False"),
        ({"requests__0__item_first": True}, "requests[0].item_first: expected False, got True"),
        ({"requests__0__query_token_ids__1": 10}, "query_token_ids: expected ids from 0 to 9, the vocabulary, got 10"),
        ({"requests__0__items_token_ids__1": [4, -1]}, "items_token_ids[1]: expected ids from 0 to 9"),
        (
            {"requests__0__items_token_ids__1": [4, 1]},
            "expected tokens that are neither special nor the delimiter, got 1",
        ),
        ({"requests__0__query_token_ids__0": 0}, "expected tokens that are neither special nor the delimiter, got 0"),
        ({"delimiter_token_id": 10, **OURS}, "delimiter_token_id: expected ids from 0 to 9, the vocabulary, got 10"),
        ({"label_token_ids": [2, 11], **OURS}, "label_token_ids: expected ids from 0 to 9, the vocabulary, got 11"),
    ],
)
def test_what_does_not_fit_is_told_with_its_field(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert any(error in each for each in reported(check(tmp_path, "workload", **changes)))


def test_a_changed_token_is_found_by_the_checksum_alone(tmp_path: Path) -> None:
    (error,) = reported(check(tmp_path, "workload", requests__0__items_token_ids__0=[4, 6]))
    assert error.startswith(f"checksums.{KEY}: expected ")
    assert error.endswith(f" (computed from the request), got {REQUEST_SHA256}")


def test_a_request_id_stands_for_one_request(tmp_path: Path) -> None:
    request = {
        "request_id": "canonical_score_request_000",
        "query_token_ids": [7, 8, 9],
        "items_token_ids": [[4, 5], [6, 7]],
        "label_token_ids": [2, 3],
        "apply_softmax": True,
        "item_first": False,
    }
    (error,) = reported(check(tmp_path, "workload", requests=[request, request]))
    assert error == (
        "requests[1].request_id: expected an id that no other request has, got canonical_score_request_000"
    )


def test_a_checksum_of_no_request_is_odd(tmp_path: Path) -> None:
    report = check(tmp_path, "workload", checksums__other_sha256="0")
    assert report.is_valid
    assert warned(report) == ["checksums.other_sha256: expected the name of a request and _sha256, got no such request"]
