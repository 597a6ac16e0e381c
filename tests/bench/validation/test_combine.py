from __future__ import annotations

from typing import Any

import pytest

from prefixwise.bench.validation.combine import combine
from prefixwise.contract.errors import ArtifactError
from tests.bench.evaluations import DELIMITER, isolation, multi_evaluation, serial_evaluation, took

SERIAL = [[0.5, 0.5], [0.5, 0.5]]  # against [[0.5, 0.5], [0.25, 0.75]]: 0, 0, 0.25, 0.25
ALIGNED = [[0.5, 0.5], [0.375, 0.625]]  # 0, 0, 0.125, 0.125


def test_equivalence_is_of_the_query_alone_and_of_the_query_with_the_delimiter() -> None:
    found = combine(multi_evaluation(), serial_evaluation(SERIAL, ALIGNED))
    alone, aligned = found.equivalence, found.equivalence_query_plus_delimiter
    assert (alone.max_abs_diff, alone.mean_abs_diff, alone.num_compared) == (0.25, 0.125, 4)
    assert (aligned.max_abs_diff, aligned.mean_abs_diff, aligned.num_compared) == (0.125, 0.0625, 4)
    assert (found.model, found.multi_url, found.serial_url) == (
        "a-model",
        "http://multi/v1/score",
        "http://serial/v1/score",
    )


def test_isolation_is_that_of_the_multi_item_server() -> None:
    multi = multi_evaluation(isolation=isolation([[0.5, 0.5], [0.25, 0.75]], same=0.25, changed=0.125))
    serial = serial_evaluation(isolation=isolation(SERIAL, same=0.5, changed=0.5))
    found = combine(multi, serial).isolation
    assert found.same_length_mutation_max_abs_diff == 0.25
    assert found.changed_length_mutation_max_abs_diff == 0.125


def test_speed_ups_are_ratios_of_medians_for_counts_that_both_have() -> None:
    found = combine(multi_evaluation(), serial_evaluation()).performance
    assert list(found) == ["1", "8", "32"]
    assert [each.speedup_vs_serial_p50 for each in found.values()] == [1.0, 3.0, 6.0]
    assert (found["32"].multi_p50_sec, found["32"].serial_p50_sec) == (1.0, 6.0)
    assert found["32"].speedup_vs_serial_p95 == 4.5


@pytest.mark.parametrize(
    ("multi", "serial", "error"),
    [
        ({}, {"model": "another"}, "both evaluations must have the same model, got a-model and another"),
        ({"labels": [4, 9]}, {}, r"the same labels, got \[4, 9\] and \[4, 5\]"),
        ({"delimiter": 9}, {}, f"the same delimiter, got 9 and {DELIMITER}"),
        ({"mode": "serial"}, {}, "expected an evaluation of mode multi, got one of mode serial"),
        ({}, {"semantic_alignment": None}, "the serial evaluation has no semantic_alignment"),
        ({"base": [[0.5, 0.5]]}, {}, "scores must be of one shape"),
        ({"performance": {"8": took(1e-9).model_copy(update={"p50_sec": 0.0})}}, {}, "more than 0 s, got 0.0"),
    ],
)
def test_evaluations_that_do_not_go_together_are_an_error(
    multi: dict[str, Any], serial: dict[str, Any], error: str
) -> None:
    with pytest.raises(ArtifactError, match=error):
        combine(multi_evaluation(**multi), serial_evaluation(**serial))


def test_other_items_are_an_error() -> None:
    other = isolation(SERIAL).model_copy(update={"item_ids": [[1, 2], [4]]})
    with pytest.raises(ArtifactError, match="the same item_ids"):
        combine(multi_evaluation(), serial_evaluation(isolation=other))
