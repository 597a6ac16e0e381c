"""A job from its input to its output, cut short in every way and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from prefixwise.batch.job import BatchJob, BeginOptions, Finished, JobFiles, Totals, begin
from prefixwise.batch.parts import PartLimits, PartRecord
from prefixwise.batch.requests import RowDefaults
from prefixwise.batch.storage import list_names, read_bytes, write_file
from prefixwise.batch.worker import PartScorer, PartTask, RowScorer
from prefixwise.contract.errors import BatchError
from prefixwise.engine.engine import ScoringEngine
from tests.batch.inputs import read_jsonl, rows, write_jsonl

OPTIONS = {"model": "m", "labels": ["y"]}
DEFAULTS = RowDefaults({"labels": ["y", "n"]})
FRESH = BeginOptions(PartLimits(4))
RESUME = replace(FRESH, resume=True)
BAD = {"query": 5, "items": ["a"]}


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    bodies: list[dict[str, Any]] = rows(22)
    bodies[5] = BAD
    return JobFiles(str(write_jsonl(tmp_path / "in.jsonl", bodies)), str(tmp_path / "out.jsonl"))


def started(files: JobFiles, how: BeginOptions = FRESH, **options: object) -> BatchJob:
    job = begin(files, {**OPTIONS, **options}, how)
    assert isinstance(job, BatchJob)
    return job


def score(job: BatchJob, engine: ScoringEngine) -> Iterator[PartRecord]:
    scorer = PartScorer(RowScorer(engine, DEFAULTS), PartTask(job.manifest.files, DEFAULTS, job.parts))
    for part in job.missing:
        yield scorer.score(part)
    scorer.close()


def run(files: JobFiles, engine: ScoringEngine, how: BeginOptions = FRESH) -> Totals:
    job = started(files, how)
    list(score(job, engine))
    return job.finish()


def test_every_row_is_in_the_output_or_the_error_file_in_input_order(files: JobFiles, engine: ScoringEngine) -> None:
    assert run(files, engine) == Totals(rows=22, failures=1, items=42)
    output, errors = (read_jsonl(Path(path)) for path in (files.output, f"{files.output}.errors.jsonl"))
    assert [row["line"] for row in output] == [*range(1, 6), *range(7, 23)]
    assert [row["id"] for row in output] == [f"row-{number}" for number in range(22) if number != 5]
    assert [(row["file"], row["line"], row["code"]) for row in errors] == [("in.jsonl", 6, "invalid_query_type")]
    assert errors[0]["message"].endswith("got 5 (integer)")  # in the words of JSON, as with --url
    assert not Path(f"{files.output}.parts").exists()


def test_the_size_of_parts_does_not_show(files: JobFiles, engine: ScoringEngine, tmp_path: Path) -> None:
    run(files, engine)
    other = replace(files, output=str(tmp_path / "other.jsonl"))
    run(other, engine, BeginOptions(PartLimits(1000)))
    assert Path(files.output).read_bytes() == Path(other.output).read_bytes()


@pytest.mark.parametrize("num_done", [0, 1, 3, 6])
def test_a_job_that_was_cut_short_computes_only_what_is_missing(
    files: JobFiles, engine: ScoringEngine, num_done: int, tmp_path: Path
) -> None:
    whole = replace(files, output=str(tmp_path / "whole.jsonl"))
    run(whole, engine)
    list(islice(score(started(files), engine), num_done))
    again = started(files, RESUME)
    assert [part.index for part in again.missing] == list(range(num_done, 6))
    assert sum(record.num_failures for record in again.done) == (1 if num_done >= 2 else 0)
    list(score(again, engine))
    assert again.finish() == Totals(22, 1, 42)
    for suffix in ("", ".errors.jsonl"):
        assert Path(files.output + suffix).read_bytes() == Path(whole.output + suffix).read_bytes()


def test_a_part_that_is_damaged_is_computed_again(files: JobFiles, engine: ScoringEngine) -> None:
    job = started(files)
    list(score(job, engine))
    first, second, *_ = sorted(Path(job.folder.url).glob("part-*"))
    first.write_bytes(first.read_bytes()[:-1].rpartition(b"\n")[0] + b"\n")  # a row is missing
    second.write_bytes(second.read_bytes()[:-9])  # half a row
    again = started(files, RESUME)
    assert [part.index for part in again.missing] == [0, 1]
    with pytest.raises(BatchError, match="part 0 is damaged: expected 4 rows, got 3"):
        again.finish()
    assert not Path(files.output).exists()


def test_a_job_that_ended_while_it_merged_merges_again(files: JobFiles, engine: ScoringEngine) -> None:
    job = started(files)
    list(score(job, engine))
    Path(files.output).write_text("half")
    again = started(files, RESUME)
    assert again.missing == []
    assert again.finish() == Totals(22, 1, 42)
    assert len(read_jsonl(Path(files.output))) == 21


def test_a_finished_job_is_not_begun_again(files: JobFiles, engine: ScoringEngine) -> None:
    totals = run(files, engine)
    assert begin(files, OPTIONS, RESUME) == Finished(totals)
    # Nor where it ended before it had cleared up.
    left = Path(f"{files.output}.parts/part-0123456789ab-00000003.jsonl")
    left.parent.mkdir()
    left.write_text("{}\n")
    assert begin(files, OPTIONS, RESUME) == Finished(totals)
    assert not left.parent.exists()


def test_to_resume_what_never_began_is_to_begin(files: JobFiles) -> None:
    assert len(started(files, RESUME).missing) == 6


@pytest.mark.parametrize("suffix", ["", ".errors.jsonl"])
def test_what_is_there_is_not_written_over(files: JobFiles, suffix: str) -> None:
    Path(files.output + suffix).write_text("mine")
    with pytest.raises(BatchError, match=f"{suffix} exists already; --resume .* --overwrite"):
        begin(files, OPTIONS, FRESH)
    assert Path(files.output + suffix).read_text() == "mine"


def test_a_job_that_is_not_finished_is_not_written_over(files: JobFiles) -> None:
    started(files)
    with pytest.raises(BatchError, match=r"out\.jsonl\.parts exists already"):
        begin(files, OPTIONS, FRESH)


def test_overwrite_begins_anew_and_leaves_what_is_not_ours(files: JobFiles, engine: ScoringEngine) -> None:
    run(files, engine)
    list(score(started(files, replace(FRESH, overwrite=True)), engine))
    Path(f"{files.output}.parts/mine.txt").write_text("mine")
    job = started(files, replace(FRESH, overwrite=True))
    assert not Path(files.output).exists()
    assert len(job.missing) == 6
    list(score(job, engine))
    job.finish()
    assert [each.name for each in Path(f"{files.output}.parts").iterdir()] == ["mine.txt"]


def test_an_output_of_unknown_origin_is_not_taken_for_finished(files: JobFiles) -> None:
    Path(files.output).write_text("mine")
    with pytest.raises(BatchError, match=r"exists without .*out\.jsonl\.job\.json"):
        begin(files, OPTIONS, RESUME)


@pytest.mark.parametrize("is_finished", [False, True])
def test_other_options_are_another_job(files: JobFiles, engine: ScoringEngine, is_finished: bool) -> None:
    if is_finished:
        run(files, engine)
    else:
        started(files)
    with pytest.raises(BatchError, match='not the job that was begun: model was "m", got "n"; use --overwrite'):
        begin(files, {**OPTIONS, "model": "n"}, RESUME)
    with pytest.raises(BatchError, match="part_rows was 4, got 5"):
        begin(files, OPTIONS, BeginOptions(PartLimits(5), resume=True))


def test_another_input_is_another_job(files: JobFiles, tmp_path: Path) -> None:
    started(files)
    write_jsonl(tmp_path / "in.jsonl", rows(3))
    with pytest.raises(BatchError, match=r"in\.jsonl has changed"):
        begin(files, OPTIONS, RESUME)


def test_files_that_came_and_went_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", rows(3))
    files = JobFiles(str(folder), str(tmp_path / "out.jsonl"))
    started(files)
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    with pytest.raises(BatchError, match=r"a\.jsonl was in the input, and is not any more; .*b\.jsonl is new"):
        begin(files, OPTIONS, RESUME)


def test_rows_of_a_folder_name_their_file(tmp_path: Path, engine: ScoringEngine) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", rows(2))
    write_jsonl(folder / "a.jsonl", [BAD, *rows(1)])
    files = JobFiles(str(folder), str(tmp_path / "out.jsonl"))
    run(files, engine)
    output = read_jsonl(Path(files.output))
    assert [(row["file"], row["line"]) for row in output] == [("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 2)]


def test_a_file_in_the_folder_that_nobody_can_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/notes.txt").write_text("x")
    with pytest.raises(BatchError, match=r"notes\.txt: expected a name that ends in"):
        begin(JobFiles(str(tmp_path / "in"), str(tmp_path / "out.jsonl")), OPTIONS, FRESH)


@pytest.mark.parametrize("source", ["in.jsonl", "", "*.jsonl", "deep"])
def test_an_input_is_never_taken_for_the_output(tmp_path: Path, source: str) -> None:
    (tmp_path / "deep").mkdir()
    before = write_jsonl(tmp_path / "in.jsonl", rows(2)).read_bytes()
    write_jsonl(tmp_path / "deep/in.jsonl", rows(2))
    target = {"in.jsonl": "in.jsonl", "deep": "deep/more/out.jsonl"}.get(source, "out.jsonl")
    files = JobFiles(str(tmp_path / source), str(tmp_path / target))
    with pytest.raises(BatchError, match="must not be a part of the input"):
        begin(files, OPTIONS, replace(FRESH, overwrite=True))
    assert (tmp_path / "in.jsonl").read_bytes() == before
    other = replace(files, output=str(tmp_path.parent / f"{uuid4().hex}.jsonl"), errors=str(tmp_path / target))
    with pytest.raises(BatchError, match="must not be a part of the input"):
        begin(other, OPTIONS, FRESH)


def test_an_empty_input_gives_an_empty_output(tmp_path: Path, engine: ScoringEngine) -> None:
    files = JobFiles(str(write_jsonl(tmp_path / "in.jsonl", [])), str(tmp_path / "out.jsonl"))
    assert run(files, engine) == Totals()
    assert Path(files.output).read_bytes() == b""


def test_a_job_at_urls_is_the_same_job(files: JobFiles, engine: ScoringEngine) -> None:
    run(files, engine)
    root = f"memory://{uuid4().hex}"
    write_file(f"{root}/in.jsonl", Path(files.input).read_bytes())
    remote = JobFiles(f"{root}/in.jsonl", f"{root}/out.jsonl")
    list(islice(score(started(remote), engine), 2))
    again = started(remote, RESUME)
    assert len(again.missing) == 4
    list(score(again, engine))
    again.finish()
    assert read_bytes(remote.output) == Path(files.output).read_bytes()
    assert begin(remote, OPTIONS, RESUME) == Finished(Totals(22, 1, 42))


@pytest.mark.parametrize("root", ["", f"memory://{uuid4().hex}"])
def test_a_new_job_without_a_complete_part_can_be_discarded(
    files: JobFiles, engine: ScoringEngine, tmp_path: Path, root: str
) -> None:
    files = replace(files, output=f"{root or tmp_path}/out.jsonl")
    job = started(files)
    write_file(f"{job.folder.url}/mine.txt", b"mine")
    assert job.discard_if_new()
    assert list_names(job.folder.url) == ["mine.txt"]
    first, second = started(files), started(files, RESUME)
    assert not first.discard_if_new()  # the second run goes on with it
    assert not second.discard_if_new()
    other = started(files, replace(FRESH, overwrite=True), labels=["c"])
    assert not first.discard_if_new()  # another job's folder by now
    next(score(other, engine))
    assert not other.discard_if_new()
    assert len(started(files, RESUME, labels=["c"]).done) == 1


def test_the_record_of_a_job_says_what_it_was(files: JobFiles, engine: ScoringEngine) -> None:
    run(files, engine)
    record = json.loads(Path(f"{files.output}.job.json").read_text())
    assert (record["rows"], record["failures"], record["items"]) == (22, 1, 42)
    assert record["options"] == {**OPTIONS, "part_rows": 4}
