"""The folder of a sweep, as the agent makes it or goes on with it: no server is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.remote import folders
from prefixwise.bench.remote.on_target.chunk import begin_sweep
from prefixwise.bench.remote.spec import SweepSpec
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.contract.errors import ArtifactError


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return SweepSpec(
        folder=str(tmp_path / "runs" / "one"),
        chunk_sizes=(2, 4),
        model="embedded",
        query_tokens=8,
        num_items=2,
        item_tokens=2,
    )


def say(line: str) -> None:
    pass


def put_row(folder: str, size: int) -> None:
    row = {
        "chunk_size": size,
        "throughput_items_per_sec": 10.0 * size,
        "latency_p50_ms": 1.0,
        "latency_p99_ms": 1.0,
        "memory_peak_mb": None,
        "status": "ok",
        "error": None,
    }
    folders.chunk_file(Path(folder), size).write_text(json.dumps(row))


def content(folder: str, name: str) -> Any:
    return json.loads((Path(folder) / name).read_text())


def test_rows_without_their_sum_get_it(spec: SweepSpec) -> None:
    begin_sweep(spec, say)
    put_row(spec.folder, 4)
    put_row(spec.folder, 2)
    assert [row["chunk_size"] for row in begin_sweep(spec, say)["done"]] == [2, 4]
    results = content(spec.folder, folders.RESULTS)
    assert [row["chunk_size"] for row in results["results"]] == [2, 4]
    assert results["summary"]["best_chunk_size"] == 4


def test_other_sizes_into_the_same_folder_lose_none(spec: SweepSpec) -> None:
    begin_sweep(spec, say)
    put_row(spec.folder, 2)
    put_row(spec.folder, 6)
    begin_sweep(replace(spec, chunk_sizes=(6,)), say)
    assert [row["chunk_size"] for row in content(spec.folder, folders.RESULTS)["results"]] == [2, 6]
    metadata = content(spec.folder, folders.METADATA)
    assert metadata["chunk_sizes"] == metadata["spec"]["chunk_sizes"] == [2, 4, 6]
    assert "run" not in metadata["spec"]


def test_a_name_that_is_taken_gets_a_number(spec: SweepSpec) -> None:
    named = replace(spec, new_folder=True)
    made = [Path(begin_sweep(named, say)["folder"]).name for _ in range(3)]
    assert made == ["one", "one-2", "one-3"]


def test_half_a_workload_is_made_again(spec: SweepSpec) -> None:
    begin_sweep(spec, say)
    path = Path(spec.folder) / folders.WORKLOAD
    path.write_text("")
    said: list[str] = []
    begin_sweep(spec, said.append)
    assert json.loads(path.read_text())["requests"]
    assert any("renamed to workload.json.broken, and written again" in line for line in said)


def test_what_cannot_begin_leaves_no_folder(spec: SweepSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixwise.bench.remote.on_target.machine.port_is_free", lambda port: False)
    with pytest.raises(TargetError, match="port 9 is taken"):
        begin_sweep(replace(spec, port=9), say)
    assert not Path(spec.folder).exists()


def test_rows_of_nobody_knows_which_sweep_are_not_gone_on_with(spec: SweepSpec) -> None:
    Path(spec.folder).mkdir(parents=True)
    put_row(spec.folder, 2)
    with pytest.raises(ArtifactError, match=r"contains rows, but no run_metadata\.json"):
        begin_sweep(spec, say)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ArtifactError, match="the port must be 0 to 65535, got 70000"):
        SweepSpec(port=70000)
