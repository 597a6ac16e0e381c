"""Damaged profiles, artifacts and batch files: each is refused in one line that names it, or read.

`tests/models/test_damaged_files.py` has the files of models. Damage that leaves a legal file of the same kind, another
word in a prompt, say, cannot be told from what was meant: what a row or a field says is then what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from prefixwise.batch.formats import input_format
from prefixwise.batch.manifest import Manifest
from prefixwise.batch.parts import PartLimits, RowReader, split_files
from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.score_matrix import ScoreMatrix
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.run.check import check_file
from prefixwise.bench.run.matrix import SweepOptions
from prefixwise.contract.errors import ArtifactError, BatchError, PrefixwiseError, ProfileError, RequestError
from prefixwise.prompts.profile_choice import read_profile
from tests.batch.inputs import found, rows, write_jsonl
from tests.bench.matrix_samples import good_row, write_matrix, write_workload
from tests.mutations import damaged, damaged_json, verdict

EVERYDAY, LONG = 120, 5_000
seeds = pytest.mark.parametrize("num_seeds", [EVERYDAY, pytest.param(LONG, marks=pytest.mark.slow)])

PROFILE = """format = 1
name = "mine"
description = "for my model"
relevance = "softmax"
labels = ["yes", "no"]
instruction = "find it"

[prompt]
before = ["<|x|>system\\n"]
body = [{text = "I: {instruction}\\nQ: {query}", without_instruction = "Q: {query}"}, "D: {document}"]
after = ["\\n"]
special_tokens = ["<|x|>"]
add_bos = true
max_context_len = 100
max_body_len = 50
"""
WRONG_TOML = ("nan", "-inf", "-1", "99999999999999999999", "true", '""', "[]", "{}", "[[[]]]", "1979-05-27", "{a = {}}")


def damaged_profile(content: bytes, random: Random) -> bytes:
    if random.random() < 0.5:
        return damaged(content, random)
    lines = content.decode().splitlines()
    at = random.choice([index for index, line in enumerate(lines) if " = " in line])
    lines[at] = f"{lines[at].partition(' = ')[0]} = {random.choice(WRONG_TOML)}"
    return "\n".join(lines).encode()


@seeds
def test_a_profile(tmp_path: Path, num_seeds: int) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PROFILE)
    assert read_profile(file).name == "mine"
    refused = judge(file, lambda: read_profile(file), damaged_profile, ProfileError, num_seeds)
    assert num_seeds // 4 < refused < num_seeds


def test_a_profile_that_is_nested_deep(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PROFILE + "x = " + "[" * 100_000)
    assert verdict(file, lambda: read_profile(file), ProfileError) is None


@seeds
@pytest.mark.parametrize("kind", ["workload", "matrix"])
def test_an_artifact(tmp_path: Path, kind: str, num_seeds: int) -> None:
    file = tmp_path / f"{kind}.json"
    if kind == "workload":
        write_workload(file)
    else:
        write_matrix(
            file, SweepOptions("jax", "portable", (1, 6), timed_runs=2), (good_row(1, 60.0), good_row(6, 40.0))
        )
    model: Any = Workload if kind == "workload" else ScoreMatrix
    assert check_file(file).kind is not None

    def load() -> object:
        check_file(file)  # reports what it finds, and never fails
        return read_artifact(file, model)

    refused = judge(file, load, damaged_json, ArtifactError, num_seeds // 4)
    assert 0 < refused < num_seeds // 4


@seeds
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_rows_of_a_batch(tmp_path: Path, kind: str, num_seeds: int) -> None:
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write_jsonl(file, rows(6))
    else:
        file.write_text("id,query,items\n" + "".join(f'r{i},"q {i}","[""a"", ""b{i}""]"\n' for i in range(6)))
    whole = {str(row) for row in read_rows(file)}
    read: list[int] = []

    def load() -> object:
        found_rows = read_rows(file)
        assert all(isinstance(row, dict | RequestError) for row in found_rows)
        read.append(len(whole & {str(row) for row in found_rows}))
        return True

    judge(file, load, damaged, BatchError, num_seeds)
    assert sum(read) > 2 * num_seeds  # most rows are what they were


@seeds
def test_a_parquet_file_of_a_batch(tmp_path: Path, num_seeds: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows(6)), file)
    assert len(read_rows(file)) == 6
    refused = judge(file, lambda: read_rows(file), damaged, BatchError, num_seeds // 2)
    assert refused > 0


def read_rows(file: Path) -> list[Any]:
    assert input_format(file.name, None)
    inputs = [found(file)]
    reader = RowReader(inputs)
    try:
        parts = split_files(inputs, PartLimits(num_rows=4))
        return [row.body for part in parts for row in reader.read(part)]
    finally:
        reader.close()


@seeds
def test_the_manifest_of_a_batch(tmp_path: Path, num_seeds: int) -> None:
    inputs = found(write_jsonl(tmp_path / "rows.jsonl", rows(6)))
    manifest = Manifest((inputs,), {"model": "m"}, tuple(split_files([inputs], PartLimits(num_rows=4))))
    file = tmp_path / "manifest.json"
    file.write_bytes(manifest.to_json())

    def load() -> object:
        found_manifest = Manifest.from_json(file.read_bytes(), str(file))
        assert found_manifest.num_rows >= 0
        return found_manifest.key

    refused = judge(file, load, damaged_json, BatchError, num_seeds)
    assert num_seeds // 2 < refused < num_seeds


def judge(
    file: Path,
    load: Callable[[], object],
    damage: Callable[[bytes, Random], bytes],
    error: type[PrefixwiseError],
    num_seeds: int,
) -> int:
    """Load damaged copies of the file; returns how many were refused, each in one line that names the file."""
    content = file.read_bytes()
    refused = 0
    for seed in range(num_seeds):
        file.write_bytes(damage(content, Random(seed)))
        try:
            refused += verdict(file, load, error) is None
        except BaseException:
            print(f"seed {seed}")
            raise
    return refused
