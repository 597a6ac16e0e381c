"""`bench load` from the command line: against the fake server, and against a real small one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from itemwise.cli.bench.load import bench_load
from itemwise.harness.artifacts import LoadResult
from itemwise.harness.files import read_artifact
from tests.cli.conftest import Ran, RunMain
from tests.server.server_process import real_server, server_process

SMALL = ("--query-tokens=30", "--num-items=3", "--item-tokens=4")
Bench = Callable[..., Ran]


@pytest.fixture(scope="module")
def fake_url() -> Iterator[str]:
    with server_process("--api-key=secret") as server:
        yield server.url


@pytest.fixture
def bench(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> Bench:
    app = typer.Typer()
    app.command()(bench_load)
    monkeypatch.setattr("itemwise.cli.main.app", app)
    return run_main


def last_object(ran: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.out.splitlines()[-1])
    return found


def test_an_open_loop_gives_figures_and_an_artifact(bench: Bench, fake_url: str, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    options = ("--rate=100", "--num-requests=30", "--warmup-requests=4", "--p99-bound-ms=60000", "--seed=5")
    ran = bench(f"--base-url={fake_url}/v1/score", *SMALL, *options, "--api-key=secret", f"--output-json={path}")
    assert ran.status == 0, ran.err
    result = read_artifact(path, LoadResult)
    assert (result.url, result.mode, result.rate_qps, result.seed) == (fake_url, "open", 100.0, 5)
    assert result.geometry.label_token_ids == [0, 1]
    assert result.warmup is not None and result.warmup.arrivals == 4
    assert (result.measured.arrivals, result.measured.answered, result.measured.errors_by_code) == (30, 30, {})
    assert result.server_config["model"]["vocab_size"] == 512
    said = last_object(ran)
    assert said["output_json"] == str(path)
    assert said["measured"]["items_per_sec"] == result.measured.items_per_sec
    lines = ran.err.splitlines()
    assert lines[0].startswith(f'server {fake_url}: {{"status": "ready"')
    assert lines[1] == "labels are [0, 1]: the vocabulary of 512 has no [9454, 2753]"
    assert lines[2].startswith("[1/2] load: warm-up, 100 requests/s, 4 arrivals")
    names = [line.split("  ")[0] for line in lines[4:14]]
    assert names[:5] == ["sent", "answered", "items", "latency", "service latency"]
    assert "30 of 30 arrivals" in lines[4]
    assert lines[13].endswith("within 60000 ms (100.0% of arrivals; p99 bound met)")


def test_errors_are_counted_by_code_and_nothing_answered_is_a_failure(bench: Bench, fake_url: str) -> None:
    """Without its key the server tells nothing of itself, either."""
    command = (f"--base-url={fake_url}", *SMALL, "--mode=closed", "--num-requests=5", "--warmup-requests=0")
    refused = bench(*command)
    assert refused.status == 2
    assert "error: the server does not tell the size of its vocabulary" in refused.err
    ran = bench(*command, "--vocab-size=512")
    assert ran.status == 1
    measured = last_object(ran)["measured"]
    assert (measured["errors_by_code"], measured["answered"]) == ({"invalid_api_key": 5}, 0)
    assert "answered no request" in ran.err


def test_a_bound_that_no_rate_meets_is_a_failure(bench: Bench, fake_url: str) -> None:
    command = (f"--base-url={fake_url}", *SMALL, "--api-key=secret", "--num-requests=1", "--warmup-requests=0")
    ran = bench(*command, "--rate=100000", "--p99-bound-ms=0.001", "--find-rate")
    assert ran.status == 1
    assert "no rate met the bound, down to 24.4141 requests/s" in ran.err
    assert len(last_object(ran)["rate_search"]) == 13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--mode open needs --rate"),
        (("--rate=1", "--concurrency=2"), "--concurrency is for --mode closed"),
        (("--mode=closed", "--rate=1"), "--rate and --find-rate are for --mode open"),
        (("--mode=closed", "--find-rate"), "--rate and --find-rate are for --mode open"),
        (("--rate=1", "--find-rate"), "--find-rate needs --p99-bound-ms"),
        (("--rate=0",), "--rate"),
        (("--geometry=large",), "--geometry"),
    ],
)
def test_options_that_do_not_go_together_are_misuse(bench: Bench, options: tuple[str, ...], message: str) -> None:
    ran = bench("--base-url=http://127.0.0.1:9", *options)
    assert ran.status == 2
    assert message in ran.err.splitlines()[0]


def test_labels_of_the_user_must_be_known_to_the_model(bench: Bench, fake_url: str) -> None:
    ran = bench(f"--base-url={fake_url}", "--api-key=secret", "--rate=1", "--label-token-ids=3,512")
    assert ran.status == 2
    assert "--label-token-ids must be from 0 to 511, got [3, 512]" in ran.err


def test_a_real_server_under_the_small_geometry(bench: Bench, checkpoint_of: Callable[[str], Path]) -> None:
    with real_server(f"--model-path={checkpoint_of('qwen3')}", "--dtype=float32") as server:
        closed = bench(f"--base-url={server.url}", "--geometry=small", "--mode=closed", "--num-requests=10")
        ran = bench(f"--base-url={server.url}", "--geometry=small", "--num-requests=20", "--seed=1")
    assert (closed.status, ran.status) == (0, 0)
    said = last_object(ran)
    assert said["rate_qps"] == 120.0
    assert said["geometry"] == {
        "query_tokens": 300,
        "num_items": 10,
        "item_tokens": 20,
        "label_token_ids": [0, 1],
        "vocab_size": 512,
        "distinct_queries": 0,
    }
    assert (said["measured"]["answered"], said["measured"]["dropped"]) == (20, 0)
    assert last_object(closed)["concurrency"] == 1
