"""`benchmarks.quality`: what becomes of BIG-bench's JSON, and what a run must show. No package is fetched."""

from __future__ import annotations

import json
import re
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import data
from benchmarks.quality.accuracy import rank_correlation
from benchmarks.quality.data import parse_task, read_lee, read_task
from benchmarks.quality.harness import NUM_EXAMPLES, write_task
from benchmarks.quality.runs import Parts, Run, failures, row, table

EXAMPLES = [{"input": f"Question {number}?", "target_scores": {"yes": 1, "no": 0, "maybe": 0}} for number in range(9)]


def test_a_prompt_has_bigbenchs_defaults() -> None:
    task = parse_task("a", {"examples": [*EXAMPLES, {"input": "?", "target_scores": {"x": 1, "y": 1}}]})
    assert len(task.documents) == 9, "two best choices leave none to be right"
    assert (task.description, task.separator) == ("", "\n")
    listed = ["".join(f"\n  choice: {choice}" for choice in document.choices) for document in task.documents]
    questions = [f"\nQ: Question {number}?" for number in range(9)]
    found = [document.text.removesuffix(f"{each}\nA: ") for document, each in zip(task.documents, listed, strict=True)]
    assert sorted(found) == questions != found, "documents are shuffled"
    for document in task.documents:
        assert document.choices[document.gold] == "yes"
    assert len({document.gold for document in task.documents}) > 1, "the best choice must not always come first"


def test_a_task_may_have_texts_of_its_own() -> None:
    raw = {
        "task_prefix": "Say yes or no.\n",
        "example_input_prefix": "Input: ",
        "example_output_prefix": " Output: ",
        "append_choices_to_input": False,
        "few_shot_example_separator": "\n\n",
        "examples": EXAMPLES[:1],
    }
    task = parse_task("a", raw)
    assert (task.description, task.separator) == ("Say yes or no.\n", "\n\n")
    assert task.documents[0].text == "Input: Question 0? Output: "


def test_files_of_an_earlier_run_are_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CACHE", tmp_path)
    (tmp_path / "bigbench").mkdir()
    (tmp_path / "bigbench" / "a.b.json").write_text(json.dumps({"examples": EXAMPLES}))
    assert len(read_task("a/b").documents) == 9
    (tmp_path / "lee").mkdir()
    (tmp_path / "lee" / "lee.cor").write_bytes("one\ncaf\xe9\n".encode("latin-1"))
    (tmp_path / "lee" / "similarities0-1.txt").write_text("1 0.4\n0 1\n")
    texts, judged = read_lee()
    assert texts == ["one", "café"]
    assert judged.tolist() == [[1, 0.4], [0.4, 1]]


def test_tasks_of_both_programs_are_fetched_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    package, content = tmp_path / "package.tar.gz", json.dumps({"examples": EXAMPLES}).encode()
    with tarfile.open(package, "w:gz") as archive:
        for name in {*data.TASKS, *data.HARNESS_TASKS}:
            member = tarfile.TarInfo(f"bigbench-1.0.0/bigbench/benchmark_tasks/{name}/task.json")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    fetched = []

    def source(requirement: str, folder: Path) -> Path:
        fetched.append(requirement)
        return package

    monkeypatch.setattr(data, "_source", source)
    assert all(len(read_task(name).documents) == 9 for name in (*data.TASKS, *data.HARNESS_TASKS))
    assert fetched == ["bigbench==1.0.0"]


def test_equal_values_share_a_rank() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # scipy.stats.spearmanr


def a_row(**changes: Any) -> dict[str, Any]:
    runs = {
        "prefixwise": Run(changes.get("accuracy", 0.5), np.array([-1.0, changes.get("logprob", -2.0)]), 2, 0.5, 0.5),
        "local-completions": Run(0.5, np.array([-1.0, -2.0]), 2, 1.0, 1.0),
        "hf": Run(0.5, np.array([-1.0, -2.0]), 2, changes.get("hf_seconds", 5.0), 5.0),
    }
    return row("a task", "shared", runs)


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"accuracy": 1.0}, "accuracies differ"),
        ({"logprob": -2.001}, "log-likelihoods differ"),
        ({"hf_seconds": 3.0}, r"6\.0 x hf, goal 8\.0"),
    ],
)
def test_a_run_fails_where_answers_differ_or_it_is_too_slow(changes: dict[str, Any], failure: str) -> None:
    assert failures([a_row()]) == []
    (found,) = failures([a_row(**changes)])
    assert re.search(failure, found)
    assert "| a task | shared | 2 | 0.500 | 0.0e+00 | 4.00 | 2.00 | 0.40 | 10.0 |" in table([a_row()])


def test_a_task_of_the_harness_takes_its_examples_from_other_documents(tmp_path: Path) -> None:
    write_task(parse_task("group/name", {"examples": EXAMPLES * 10}), tmp_path)
    settings = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.yaml"))]
    assert [each["task"] for each in settings] == ["bigbench_name_default", "bigbench_name_first_n"]
    files = settings[0]["dataset_kwargs"]["data_files"]
    sizes = {split: len(Path(path).read_text().splitlines()) for split, path in files.items()}
    assert sizes == {"test": 90 - NUM_EXAMPLES, "train": NUM_EXAMPLES}


def test_parts_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    parts, made = Parts(tmp_path / "parts", 50, {"dtype": "float32"}), []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"seconds": 2.5}

    for _ in range(2):
        assert parts.found("group/name.own.hf.0-50", make) == {"seconds": 2.5}
    assert len(made) == 1
    assert sorted(path.name for path in parts.folder.iterdir()) == ["facts.json", "group.name.own.hf.0-50.json"]
    other = Parts(parts.folder, 50, {"dtype": "bfloat16"})
    for name in ("group/name.own.hf.0-50", "group/name.own.hf.50-100"):
        with pytest.raises(
            SystemExit, match=r"must be used with .*float32.*, got .*bfloat16.*: expected another folder"
        ):
            other.found(name, make)
    assert len(made) == 1


def test_a_run_is_the_sum_of_its_parts() -> None:
    first, second = Run(0.5, np.array([-1.0, -2.0]), 2, 3.0, 4.0), Run(1.0, np.array([-5.0]), 1, 1.0, 1.0)
    found = Run.of_parts([first, second])
    assert found.accuracy == pytest.approx(2 / 3)
    assert (found.num_documents, found.seconds, found.cpu_seconds) == (3, 4, 5)
    assert found.logprobs.tolist() == [-1, -2, -5]
    alone = row("a", "own", {"hf": found})
    assert (alone["max_difference"], alone["ratio"], failures([alone])) == ({}, {}, [])
    assert "| 0.667 |" in table([alone])
