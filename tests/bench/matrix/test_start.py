"""New matrices, and old ones to go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.artifacts import ScoreMatrix
from prefixwise.bench.files import sha256_of, write_artifact
from prefixwise.bench.matrix.start import choose_request, resume_matrix, rows_in
from prefixwise.bench.matrix.sweep import SweepOptions
from prefixwise.bench.workload import request_checksum
from prefixwise.contract.errors import ArtifactError
from tests.bench.matrix_samples import begun_matrix, good_row, small_workload, write_workload

OPTIONS = SweepOptions("jax", "portable", (1, 2), declared={"multi_item_mask_impl": "auto"})
CONFIG = {"dtype": "float32", "port": 1}


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return write_workload(tmp_path / "workload.json")


@pytest.fixture
def old(tmp_path: Path, workload: Path) -> Path:
    """An artifact with one row of two."""
    matrix = begun_matrix(workload, OPTIONS)
    matrix.results.append(good_row(1, 100.0))
    matrix.notes.append("a note")
    matrix.server_config = CONFIG
    write_artifact(tmp_path / "matrix.json", matrix)
    return tmp_path / "matrix.json"


class TestRequest:
    def test_the_first_or_the_one_that_is_named(self) -> None:
        workload = small_workload()
        other = workload.requests[0].model_copy(update={"request_id": "second"})
        workload.requests.append(other)
        assert choose_request(workload, None) is workload.requests[0]
        assert choose_request(workload, "second") is other

    def test_a_name_that_is_not_there(self) -> None:
        with pytest.raises(ArtifactError, match="has no request 'x', it has canonical_score_request_000"):
            choose_request(small_workload(), "x")

    def test_one_that_was_changed_does_not_fit_its_checksum(self) -> None:
        workload = small_workload()
        workload.requests[0].query_token_ids.append(1)
        with pytest.raises(ArtifactError, match=r"does not fit its checksum .*: the workload was changed"):
            choose_request(workload, None)


def test_a_new_matrix_says_what_it_is_of(workload: Path) -> None:
    matrix = begun_matrix(workload, OPTIONS)
    request = small_workload().requests[0]
    assert (matrix.backend, matrix.evaluation_view, matrix.results, matrix.complete) == ("jax", "portable", [], False)
    assert matrix.workload_ref.model_dump() == {
        "path": str(workload),
        "sha256": sha256_of(workload),
        "request_id": "canonical_score_request_000",
        "request_sha256": request_checksum(request.model_dump()),
    }
    assert matrix.workload.model_dump() == {
        "model": "fake-model",
        "query_tokens": 3,
        "num_items": 6,
        "item_tokens": 2,
        "label_token_ids": [3, 5],
    }
    assert matrix.arguments is not None
    assert matrix.arguments["client_chunk_sizes"] == [1, 2]
    assert matrix.notes == []


class TestWhatIsThere:
    def test_rows_are_counted(self, old: Path) -> None:
        assert (rows_in(old) or "").startswith("1 rows of jax, measured until 20")

    def test_nothing_would_be_lost(self, tmp_path: Path, workload: Path) -> None:
        (tmp_path / "empty.json").touch()
        write_artifact(tmp_path / "begun.json", begun_matrix(workload, OPTIONS))
        assert [rows_in(tmp_path / name) for name in ("none.json", "empty.json", "begun.json")] == [None] * 3

    def test_what_is_no_matrix_would_be(self, workload: Path) -> None:
        assert rows_in(workload) == "something that is no score matrix"


class TestResume:
    def fresh(self, workload: Path, options: SweepOptions = OPTIONS, **config: Any) -> ScoreMatrix:
        return begun_matrix(workload, options).model_copy(update={"server_config": {**CONFIG, **config}})

    def test_the_rows_and_notes_stay(self, workload: Path, old: Path) -> None:
        fresh = self.fresh(workload)
        fresh.notes.extend(["a note", "another"])
        resumed = resume_matrix(old, fresh)
        assert [row.client_chunk_size for row in resumed.results] == [1]
        assert resumed.notes == ["a note", "another"]

    def test_without_a_file_it_begins(self, tmp_path: Path, workload: Path) -> None:
        fresh = self.fresh(workload)
        assert resume_matrix(tmp_path / "none.json", fresh) is fresh

    def test_the_same_server_may_be_on_another_port(self, workload: Path, old: Path) -> None:
        assert resume_matrix(old, self.fresh(workload, port=2)).results

    def test_the_same_workload_may_have_been_made_again(self, tmp_path: Path, old: Path) -> None:
        again = small_workload().model_copy(update={"generated_at_utc": "2030-01-01T00:00:00Z"})
        write_artifact(tmp_path / "again.json", again)
        assert resume_matrix(old, self.fresh(tmp_path / "again.json")).results

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"backend": "pytorch"}, 'backend was "jax" and is "pytorch"'),
            ({"view": "best_native"}, 'evaluation view was "portable" and is "best_native"'),
            ({"client_chunk_sizes": (1, 4)}, r"client_chunk_sizes was \[1, 2\] and is \[1, 4\]"),
            ({"timed_runs": 6}, "timed_runs was 5 and is 6"),
            ({"timeout_sec": 1.0}, "timeout_sec was 180.0 and is 1.0"),
            ({"hardware": "tpu"}, 'hardware was null and is "tpu"'),
            ({"declared": {}}, r'declared was {"multi_item_mask_impl": "auto"} and is {}'),
        ],
    )
    def test_other_arguments_are_another_sweep(
        self, workload: Path, old: Path, change: dict[str, Any], words: str
    ) -> None:
        how = SweepOptions(**{**OPTIONS.__dict__, **change})
        with pytest.raises(ArtifactError, match=f"cannot be resumed: .*{words}"):
            resume_matrix(old, self.fresh(workload, how))

    def test_another_workload_is(self, tmp_path: Path, old: Path) -> None:
        other = write_workload(tmp_path / "other.json", first_token=11)
        with pytest.raises(ArtifactError, match="cannot be resumed: workload sha256 was"):
            resume_matrix(old, self.fresh(other))

    @pytest.mark.parametrize("now", [{"dtype": "bfloat16"}, {"new": True}])
    def test_a_server_of_another_kind_is(self, workload: Path, old: Path, now: dict[str, Any]) -> None:
        with pytest.raises(ArtifactError, match="cannot be resumed: server's"):
            resume_matrix(old, self.fresh(workload, **now))

    def test_a_server_that_is_not_there_is(self, workload: Path, old: Path) -> None:
        with pytest.raises(ArtifactError, match='server\'s dtype was "float32" and is null'):
            resume_matrix(old, begun_matrix(workload, OPTIONS))

    def test_a_file_that_is_no_matrix(self, workload: Path) -> None:
        with pytest.raises(ArtifactError, match="is no ScoreMatrix"):
            resume_matrix(workload, self.fresh(workload))
