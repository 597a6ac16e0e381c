"""`bench load` from the command line: against the fake server, and against `prefixwise serve`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from prefixwise.bench.files import read_artifact
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadResult
from prefixwise.cli.bench.load import bench_load
from tests.bench.run.slow_server import slow_server, wait_for_calls
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
    monkeypatch.setattr("prefixwise.cli.main.app", app)
    return run_main


def last_object(ran: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.out.splitlines()[-1])
    return found


def test_an_open_loop_gives_figures_and_an_artifact(bench: Bench, fake_url: str, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    options = ["--rate=100", "--num-requests=30", "--warmup-requests=4", "--p99-bound-ms=60000", "--seed=5"]
    options.append("--client-processes=2")
    ran = bench(f"--url={fake_url}/v1/score", *SMALL, *options, "--api-key=secret", f"--output-json={path}")
    assert ran.status == 0, ran.err
    result = read_artifact(path, LoadResult)
    assert (result.url, result.mode, result.rate_qps, result.seed) == (fake_url, "open", 100.0, 5)
    assert result.geometry.label_token_ids == [0, 1]
    assert result.warmup is not None and result.warmup.arrivals == 4
    assert (result.measured.arrivals, result.measured.answered, result.measured.errors_by_code) == (30, 30, {})
    assert [client.sent for client in result.measured.client_processes] == [15, 15]
    assert result.server_config["model"]["vocab_size"] == 512
    said = last_object(ran)
    assert said["output_json"] == str(path)
    assert said["measured"]["items_per_sec"] == result.measured.items_per_sec
    lines = ran.err.splitlines()
    assert lines[0] == f"server {fake_url}: fake-model, fake, cpu, float32"
    assert lines[1] == "labels are [0, 1]: the vocabulary of 512 has no [9454, 2753]"
    assert lines[2].startswith("[1/2] load: warm-up, 100 requests/s, 4 arrivals")
    names = [line.split("  ")[0] for line in lines[4:16]]
    assert names[:6] == ["metric", "sent", "answered", "items", "latency", "service latency"]
    assert "30 of 30 arrivals" in lines[5]
    assert names[10] == "client CPU" and "2 processes, " in lines[14]
    assert lines[15].endswith("within 60,000 ms (100.0% of arrivals; p99 bound met)")


def test_errors_are_counted_by_code_and_nothing_answered_is_a_failure(bench: Bench, fake_url: str) -> None:
    """Without its key the server tells nothing of itself, either."""
    command = (f"--url={fake_url}", *SMALL, "--mode=closed", "--num-requests=5", "--warmup-requests=0")
    refused = bench(*command)
    assert refused.status == 2
    assert "error: the server does not report the size of its vocabulary" in refused.err
    ran = bench(*command, "--vocab-size=512")
    assert ran.status == 1
    measured = last_object(ran)["measured"]
    assert (measured["errors_by_code"], measured["answered"]) == ({"invalid_api_key": 5}, 0)
    assert "answered no request" in ran.err


def test_a_bound_that_no_rate_meets_is_a_failure(bench: Bench, fake_url: str) -> None:
    command = (f"--url={fake_url}", *SMALL, "--api-key=secret", "--num-requests=1", "--warmup-requests=0")
    ran = bench(*command, "--rate=100000", "--p99-bound-ms=0.001", "--find-rate", "--min-arrivals=1")
    assert ran.status == 1
    assert "no rate met the bound, down to 24.4141 requests/s" in ran.err
    assert len(last_object(ran)["rate_search"]) == 2 * 13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--mode open needs --rate"),
        (("--rate=1", "--concurrency=2"), "--concurrency is for --mode closed"),
        (("--mode=closed", "--rate=1"), "--rate is for --mode open"),
        (("--mode=closed", "--find-rate"), "--find-rate is for --mode open"),
        (("--mode=closed", "--max-in-flight=8"), "--max-in-flight is for --mode open"),
        (("--rate=1", "--find-rate"), "--find-rate needs --p99-bound-ms"),
        (("--rate=1", "--min-arrivals=3"), "--min-arrivals is for --find-rate"),
        (("--rate=0",), "--rate"),
        (("--rate=inf",), "expected a finite number, got inf"),
        (("--rate=1", "--duration-sec=nan"), "--duration-sec"),
        (("--geometry=large",), "--geometry"),
    ],
)
def test_options_that_do_not_go_together_are_misuse(bench: Bench, options: tuple[str, ...], message: str) -> None:
    ran = bench("--url=http://127.0.0.1:9", *options)
    assert ran.status == 2
    assert message in ran.err.splitlines()[0]


def test_nobody_there_is_said_before_anything_runs(bench: Bench) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ran = bench(f"--url={url}", "--rate=1")
    assert (ran.status, ran.out) == (1, "")
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error: cannot reach {url}: ")


def test_a_proxy_of_the_environment_is_not_asked(bench: Bench, fake_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    ran = bench(f"--url={fake_url}", *SMALL, "--api-key=secret", "--mode=closed", "--num-requests=2")
    assert ran.status == 0, ran.err


def test_a_client_that_is_the_limit_is_said_loudly(
    bench: Bench, fake_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is busy for 60 ms whenever it has made a request sends late."""
    make = RequestMaker.body

    def make_slowly(self: RequestMaker, number: int) -> bytes:
        time.sleep(0.06)
        return make(self, number)

    monkeypatch.setattr(RequestMaker, "body", make_slowly)
    command = (f"--url={fake_url}", *SMALL, "--api-key=secret", "--warmup-requests=0", "--rate=100")
    ran = bench(*command, "--num-requests=15")
    measured = last_object(ran)["measured"]
    assert measured["client_limited"] is True
    assert measured["qps_sent"] < 17.5 < measured["qps_offered"]
    assert "note: CLIENT LIMITED: this machine sent late" in ran.err


@pytest.mark.parametrize(
    ("options", "probes"),
    [
        (("--rate=40", "--duration-sec=60"), 0),
        (("--mode=closed", "--duration-sec=60"), 0),
        (("--rate=10", "--find-rate", "--p99-bound-ms=60000", "--min-arrivals=20", "--num-requests=20"), 1),
    ],
)
def test_an_interrupt_keeps_what_was_done(tmp_path: Path, options: tuple[str, ...], probes: int) -> None:
    """The search is interrupted in its second probe, which takes a second; the others after some requests."""
    path = tmp_path / "load.json"
    shape = ("--num-items=2", "--query-tokens=20", "--item-tokens=5", "--warmup-requests=0")
    with slow_server(0.01) as url:
        command = [sys.executable, "-m", "prefixwise", "bench", "load", f"--url={url}", *shape, *options]
        process = subprocess.Popen(
            [*command, f"--output-json={path}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        begun = 0
        for line in process.stderr:
            begun += "load: trying" in line or "load: measuring" in line
            if begun > probes:
                break
        if not probes:
            wait_for_calls(url, 30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    result = read_artifact(path, LoadResult)
    assert result.cut_short
    assert result.notes[0].startswith("cut short")
    assert "note: cut short" in err
    assert json.loads(out.splitlines()[-1])["cut_short"] is True
    assert result.measured.answered >= 10
    assert bool(result.rate_search) == bool(probes)


def test_labels_of_the_user_must_be_known_to_the_model(bench: Bench, fake_url: str) -> None:
    ran = bench(f"--url={fake_url}", "--api-key=secret", "--rate=1", "--label-token-ids=3,512")
    assert ran.status == 2
    assert "--label-token-ids must be from 0 to 511, got [3, 512]" in ran.err


def test_a_real_server_under_the_small_geometry(bench: Bench, checkpoint_of: Callable[[str], Path]) -> None:
    with real_server(f"--model-path={checkpoint_of('qwen3')}", "--backend=fake") as server:
        closed = bench(f"--url={server.url}", "--geometry=small", "--mode=closed", "--num-requests=10")
        ran = bench(f"--url={server.url}", "--geometry=small", "--num-requests=20", "--seed=1")
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
