"""What must not happen to a job's files: mixed, overwritten, read as rows, lost, or left behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from prefixwise.batch import job as job_module
from prefixwise.batch.job import JobFiles, begin
from prefixwise.contract.errors import BatchError
from prefixwise.engine.engine import ScoringEngine
from tests.batch.inputs import read_jsonl, rows, write_jsonl
from tests.batch.test_job import FRESH, OPTIONS, RESUME, run, score, started

OVERWRITE = replace(FRESH, overwrite=True)


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    return JobFiles(str(write_jsonl(tmp_path / "in.jsonl", rows(12))), str(tmp_path / "out.jsonl"))


def test_two_jobs_on_one_output_do_not_mix(files: JobFiles, engine: ScoringEngine) -> None:
    first = started(files)
    second = started(files, OVERWRITE, labels=["c"])
    list(islice(score(first, engine), 2))  # goes on, and knows nothing of the second
    assert [part.index for part in started(files, RESUME, labels=["c"]).missing] == [0, 1, 2]
    list(score(second, engine))
    with pytest.raises(BatchError, match="another job was begun"):
        first.finish()
    assert second.finish().rows == 12
    assert not Path(f"{files.output}.parts").exists()


@pytest.mark.parametrize("errors", ["out.jsonl", "./out.jsonl", "x/../out.jsonl", "out.jsonl.job.json"])
def test_the_error_file_is_no_other_file_of_the_job(files: JobFiles, errors: str) -> None:
    folder = files.output.rpartition("/")[0]
    with pytest.raises(BatchError, match="--errors must be a file of its own, apart from "):
        begin(replace(files, errors=f"{folder}/{errors}"), OPTIONS, OVERWRITE)
    with pytest.raises(BatchError, match="--errors must be a file of its own, apart from "):
        begin(replace(files, errors=f"{files.output}.parts/e.jsonl"), OPTIONS, OVERWRITE)


@pytest.mark.parametrize(
    ("source", "output", "named"),
    [
        ("*.jsonl", "out.csv", r"out\.csv\.errors\.jsonl"),
        ("*.json", "out.csv", r"out\.csv\.job\.json"),
        ("**/part-*.jsonl", "out.csv", r"out\.csv\.parts/part-"),
    ],
)
def test_what_the_job_makes_beside_the_output_is_never_its_input(
    files: JobFiles, tmp_path: Path, source: str, output: str, named: str
) -> None:
    (tmp_path / output).write_text("old")
    mine = JobFiles(str(tmp_path / source), str(tmp_path / output), input_format="jsonl")
    with pytest.raises(BatchError, match=rf"{named}.* must not be a part of the input"):
        begin(mine, OPTIONS, OVERWRITE)
    assert (tmp_path / output).read_text() == "old"


def test_a_pattern_does_not_reach_into_folders(tmp_path: Path, engine: ScoringEngine) -> None:
    (tmp_path / "pat").mkdir()
    write_jsonl(tmp_path / "pat/in.jsonl", rows(2))
    files = JobFiles(str(tmp_path / "pat/*.jsonl"), str(tmp_path / "pat/out/x.jsonl"))
    assert run(files, engine).rows == 2
    assert run(files, engine, OVERWRITE).rows == 2


def test_overwrite_removes_nothing_before_the_input_could_be_read(files: JobFiles, engine: ScoringEngine) -> None:
    run(files, engine)
    before = Path(files.output).read_bytes()
    bad = Path(files.input).with_name("bad.jsonl.gz")
    bad.write_bytes(b"no gzip")
    with pytest.raises(BatchError, match=r"bad\.jsonl\.gz: "):
        begin(replace(files, input=str(bad)), OPTIONS, OVERWRITE)
    assert Path(files.output).read_bytes() == before
    assert Path(f"{files.output}.job.json").exists()


def test_an_input_that_changes_while_it_is_scored_is_noticed(files: JobFiles, engine: ScoringEngine) -> None:
    job = started(files)
    list(score(job, engine))
    write_jsonl(Path(files.input), reversed(rows(12)))  # as many rows, and as many bytes
    with pytest.raises(BatchError, match=r"in\.jsonl has changed since the job began"):
        job.finish()
    assert not Path(files.output).exists()
    with pytest.raises(BatchError, match=r"in\.jsonl has changed since the job began"):
        list(score(job, engine))


def test_an_id_that_utf_8_cannot_carry_is_spelled_out_in_parquet(files: JobFiles, engine: ScoringEngine) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_jsonl(Path(files.input), [{**rows(1)[0], "id": "a\ud800"}])
    target = replace(files, output=f"{files.output}.parquet")
    assert run(target, engine).items == 2
    assert parquet.read_table(target.output).to_pylist()[0]["id"] == "a\\ud800"


def test_what_was_half_written_by_a_merge_goes_with_the_work_folder(
    files: JobFiles, engine: ScoringEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(files)
    list(score(job, engine))
    before = {path.name for path in tmp_path.iterdir()}
    seen: set[str] = set()

    def look(*arguments: object) -> list[dict[str, object]]:
        seen.update(path.name for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job_module, "_complete_part", look)
        job.finish()
    assert seen == before  # so `kill -9` would have left nothing beside the output
    (tmp_path / "out.jsonl.parts/out.jsonl.0123abcd.tmp").write_text("half")
    assert started(files, RESUME).finish().rows == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.errors.jsonl",
        "out.jsonl.job.json",
    ]
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 12


def test_an_error_file_may_be_in_another_folder(files: JobFiles, engine: ScoringEngine, tmp_path: Path) -> None:
    write_jsonl(Path(files.input), [{"query": 5}])
    run(replace(files, errors=str(tmp_path / "far/errors.jsonl")), engine)
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["errors.jsonl"]
    assert read_jsonl(tmp_path / "far/errors.jsonl")[0]["line"] == 1
