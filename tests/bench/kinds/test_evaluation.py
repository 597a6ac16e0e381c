from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.kinds.samples import GONE, check, reported, warned

SAME = "isolation__same_length_mutation"
CHANGED = "isolation__changed_length_mutation"
ALIGNED = "equivalence_query_plus_delimiter"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"isolation__base_scores": [[0.5], [0.5]]}, "isolation.base_scores length: expected 3 (item_ids), got 2"),
        ({"isolation__base_scores__1": [0.5]}, "isolation.base_scores[1] length: expected 2 (labels), got 1"),
        ({f"{SAME}__mutated_index": 3}, "same_length_mutation.mutated_index: expected from 0 to 2, got 3"),
        (
            {f"{SAME}__mutated_item_ids": [5]},
            "isolation.same_length_mutation.mutated_item_ids: expected other ids than item_ids[1], got [5]",
        ),
        (
            {f"{SAME}__mutated_item_ids": [[4]]},  # of all items, and there is none with that index
            "isolation.same_length_mutation.mutated_item_ids[0]: expected a valid integer, got [4] (list)",
        ),
        (
            {f"{SAME}__mutated_item_ids": [9, 9]},
            "isolation.same_length_mutation.mutated_item_ids: expected 1 tokens, as before, got 2 tokens",
        ),
        (
            {f"{CHANGED}__mutated_item_ids": [9]},
            "changed_length_mutation.mutated_item_ids: expected another length than 1 tokens, got 1 tokens",
        ),
        ({f"{SAME}__scores": [[0.5]]}, "isolation.same_length_mutation.scores length: expected 3 (item_ids), got 1"),
        (
            {f"{SAME}__max_abs_diff_unchanged": 0.0},
            "same_length_mutation.max_abs_diff_unchanged: expected 0.125 (of its differences), got 0",
        ),
        (
            {f"{SAME}__mean_abs_diff_unchanged": 0.125},
            "same_length_mutation.mean_abs_diff_unchanged: expected 0.0625 (of its differences), got 0.125",
        ),
        (
            {f"{SAME}__unchanged_item_abs_diffs": [0.0, 0.0]},
            "same_length_mutation.unchanged_item_abs_diffs[1]: expected 0.125 (by the scores), got 0",
        ),
        ({f"{SAME}__unchanged_item_abs_diffs": []}, "expected a difference for each unchanged item, 2 of them, got 0"),
        ({"semantic_alignment": None}, "semantic_alignment: expected the field, in serial mode, got nothing"),
        (
            {"semantic_alignment__query_plus_delimiter_ids": [7, 8]},
            "semantic_alignment.query_plus_delimiter_ids: expected query_ids and the delimiter, got 2 other ids",
        ),
        (
            {"semantic_alignment__base_scores_query_plus_delimiter": [[0.5]]},
            "semantic_alignment.base_scores_query_plus_delimiter length: expected 3 (item_ids), got 1",
        ),
        ({"performance__8__p50_sec": 0.25}, "performance.8.p50_sec: expected 0.375 (of latencies_sec), got 0.25"),
        ({"performance__8__p95_sec": 0.5}, "performance.8.p95_sec: expected 0.4875 (of latencies_sec), got 0.5"),
        ({"performance__8__items_per_sec_p50": 8.0}, "items_per_sec_p50: expected 21.33333333 (8 / p50), got 8"),
        ({"performance__8__items_per_sec_p95": 8.0}, "items_per_sec_p95: expected 16.41025641 (8 / p95), got 8"),
        ({"performance__8__latencies_sec": []}, "performance.8.latencies_sec: expected times of more than 0 s, got []"),
    ],
)
def test_an_evaluation_follows_from_its_scores_and_times(
    tmp_path: Path, changes: dict[str, object], error: str
) -> None:
    assert any(error in each for each in reported(check(tmp_path, "endpoint-evaluation", **changes)))


def test_item_counts_are_numbers(tmp_path: Path) -> None:
    metrics = dict.fromkeys(("p50_sec", "p95_sec"), 1.0) | dict.fromkeys(
        ("items_per_sec_p50", "items_per_sec_p95"), 1.0
    )
    report = check(tmp_path, "endpoint-evaluation", performance={"many": {"latencies_sec": [1.0], **metrics}})
    assert reported(report) == ["performance.many: expected a number of items, got many"]
    single = check(tmp_path, "endpoint-evaluation", performance={"1": {"latencies_sec": [1.0], **metrics}})
    assert single.is_valid
    assert "performance.1.latencies_sec: expected several, for a p95 with a meaning, got 1" in warned(single)


def test_items_that_do_not_leave_each_other_alone_are_odd_here(tmp_path: Path) -> None:
    """They are a finding about the server, and gates are there to fail for it: the file is as it should be."""
    report = check(tmp_path, "endpoint-evaluation")
    assert report.is_valid
    assert [each.partition(":")[0] for each in warned(report)] == [
        "isolation.same_length_mutation.max_abs_diff_unchanged",
        "isolation.changed_length_mutation.max_abs_diff_unchanged",
    ]


def test_counts_that_failed_are_odd_here(tmp_path: Path) -> None:
    report = check(tmp_path, "endpoint-evaluation", failures={"128": "timeout"})
    assert report.is_valid
    assert "failures.128: expected times of so many items, got timeout" in warned(report)


def test_a_multi_item_server_needs_no_alignment(tmp_path: Path) -> None:
    assert check(tmp_path, "endpoint-evaluation", mode="multi", semantic_alignment=GONE).is_valid


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"performance__32__speedup_vs_serial_p50": 4.1},
            "performance.32.speedup_vs_serial_p50: expected 4 (serial over multi), got 4.1",
        ),
        ({"performance__32__multi_p50_sec": 0.0}, "performance.32.multi_p50_sec: expected more than 0, got 0.0"),
        (
            {"equivalence__mean_abs_diff": 0.3, "equivalence__abs_diffs_multi_vs_serial": GONE},
            "equivalence.mean_abs_diff: expected from 0 to max_abs_diff, 0.25, got 0.3",
        ),
        (
            {"equivalence__max_abs_diff": 0.5},
            "equivalence.max_abs_diff: expected 0.25 (of abs_diffs_multi_vs_serial), got 0.5",
        ),
        (
            {"equivalence__mean_abs_diff": 0.125},
            "equivalence.mean_abs_diff: expected 0.1875 (of abs_diffs_multi_vs_serial), got 0.125",
        ),
        (
            {"equivalence__multi_scores__1": [0.125, 0.875], f"{ALIGNED}__serial_query_plus_delimiter_scores": GONE},
            "equivalence.abs_diffs_multi_vs_serial[1]: expected 0 (by the scores), got 0.125",
        ),
        (
            {f"{ALIGNED}__serial_query_plus_delimiter_scores": [[0.5, 0.5]]},
            f"{ALIGNED}, its scores: expected two tables of one shape, got others",
        ),
    ],
)
def test_speed_ups_and_means_follow(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert reported(check(tmp_path, "multi-vs-serial", **changes)) == [error]


def test_a_leak_and_a_missing_count_are_odd(tmp_path: Path) -> None:
    lacking = {"performance": {}, ALIGNED: GONE}
    moved = {
        "isolation__same_length_mutation_max_abs_diff": 0.5,
        "isolation__same_length_mutation_unchanged_diffs": [0.5],
    }
    report = check(tmp_path, "multi-vs-serial", **lacking, **moved)
    assert report.is_valid
    assert warned(report) == [
        f"{ALIGNED}: expected the field, which a gate is on, got nothing",
        "performance: expected 32 items, which a gate is on, got []",
        "isolation.same_length_mutation_max_abs_diff: expected 0.0, got 0.5",
    ]


def test_parity_is_computed_again_from_its_vectors(tmp_path: Path) -> None:
    name = "max_abs_diff_jax_serial_vs_torch_serial"
    wrong = check(tmp_path, "parity", **{name: 0.01})
    assert reported(wrong) == [f"{name}: expected 0 (by jax_serial_scores and torch_serial_reference_scores), got 0.01"]
    moved = check(tmp_path, "parity", abs_diff_jax_serial_vs_torch_serial=[0.5])
    assert reported(moved) == [
        "abs_diff_jax_serial_vs_torch_serial[0]: expected 0 (by jax_serial_scores and torch_serial_reference_scores), "
        "got 0.5"
    ]
    gone = {"jax_serial_scores": GONE, "abs_diff_jax_serial_vs_torch_serial": GONE}
    negative = check(tmp_path, "parity", **{name: -0.01}, **gone)
    assert reported(negative) == [f"{name}: expected 0 or more, got -0.01"]
    ragged = check(tmp_path, "parity", jax_serial_scores=[[0.5]])
    expected = "jax_serial_scores and torch_serial_reference_scores: expected two tables of one shape, got others"
    assert reported(ragged) == [expected]


def test_parity_over_the_bound_is_odd_here(tmp_path: Path) -> None:
    report = check(tmp_path, "parity")
    assert report.is_valid
    assert warned(report) == ["max_abs_diff_jax_multi_vs_torch_serial: expected at most 0.02, got 0.25"]
