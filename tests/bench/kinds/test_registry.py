from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from prefixwise.bench.kinds.registry import (
    KINDS,
    MODELED_KINDS,
    SCHEMA_DIALECT,
    json_schema,
    kind_named,
    known_versions,
    recognise,
)
from prefixwise.contract.errors import ArtifactError
from tests.bench.kinds.samples import SAMPLES, Document, edited

NAMES = [kind.name for kind in MODELED_KINDS]


def validator_of(name: str) -> Any:
    """Of another library, which came with one of our tools and has no types."""
    schema = json_schema(kind_named(name))
    draft = import_module("jsonschema").Draft202012Validator
    draft.check_schema(schema)
    return draft(schema)


def test_every_kind_has_a_name_a_label_a_check_and_a_sample_and_either_a_report_or_a_note() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(NAMES) == SAMPLES.keys()
    assert all(kind.check is not None for kind in MODELED_KINDS)
    assert len({kind.label for kind in KINDS}) == len(KINDS)
    assert all((kind.report is None) != (kind.note is None) for kind in KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_recognised_by_what_is_in_it(name: str) -> None:
    file_name, make = SAMPLES[name]
    own_name = kind_named(name).file_name is not None
    assert recognise(make(), file_name if own_name else "any.json") == kind_named(name)


@pytest.mark.parametrize(
    "document", [{}, {"model": "tiny"}, {"schema_version": "score_matrix_v2", "results": []}, {"schema_version": 1.0}]
)
def test_what_is_nothing_of_ours_is_not_recognised(document: Document) -> None:
    assert recognise(document, "any.json") is None


def test_an_unknown_version_is_not_taken_for_another_kind() -> None:
    _, make = SAMPLES["parity"]
    assert recognise({**make(), "schema_version": "parity_v9"}, "any.json") is None


def test_the_name_tells_the_files_of_an_ops_folder_apart() -> None:
    metadata = {**SAMPLES["ops-run-metadata"][1](), "schema_version": "1.0"}
    assert recognise(metadata, "run_metadata.json") == kind_named("ops-run-metadata")
    assert recognise(SAMPLES["ops-matrix"][1](), "matrix_results.json") == kind_named("ops-matrix")
    another = {**metadata, "schema_version": "score_matrix_v1"}
    assert recognise(another, "run_metadata.json") == kind_named("score-matrix")


def test_versions_are_those_of_the_contract() -> None:
    assert {"canonical_score_workload_v1", "score_matrix_v1", "1.0", "cross_backend_comparison_v1"} < {
        *known_versions()
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_one_and_accepts_the_artifact(name: str) -> None:
    _, make = SAMPLES[name]
    validator = validator_of(name)
    assert validator.schema["$schema"] == SCHEMA_DIALECT
    validator.validate(make())
    validator.validate({**make(), "more": "fields are allowed"})
    assert not validator.is_valid([])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("workload", {"schema_version": "canonical_score_workload_v2"}),
        ("workload", {"requests": []}),
        ("score-matrix", {"results__0__status": "fine"}),
        ("score-matrix", {"results__1__run_records__1__failure_reason": "laziness"}),
        ("ops-matrix", {"summary__total_configs_tested": "three"}),
        ("endpoint-evaluation", {"mode": "both"}),
    ],
)
def test_a_schema_refuses_what_is_none(name: str, changes: dict[str, object]) -> None:
    _, make = SAMPLES[name]
    assert not validator_of(name).is_valid(edited(make(), **changes))


def test_a_schema_has_the_names_that_stand_in_the_file() -> None:
    gate = json_schema(kind_named("comparison"))["$defs"]["Correctness"]
    assert "pass" in gate["required"]
    assert "passed" not in gate["properties"]


def test_another_name_is_answered_with_all_of_them() -> None:
    with pytest.raises(
        ArtifactError, match=r"no artifact is called 'matrix'; expected one of workload, score-matrix, "
    ):
        kind_named("matrix")
