"""The scripts of `benchmarks/`: what they count, and that `goals` runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contract import floor_flops
from benchmarks.engine_cost import NoDevice, Wave, fit, measure
from benchmarks.goals.__main__ import parse_options, runs_of
from benchmarks.goals.cases import BESIDE_CASES, CASES, FP8_CASES, FULL, HTTP_CASES, SEARCH_CASES, TINY, Settings
from benchmarks.goals.engine_rows import MEMORY_SLACK_BYTES, memory_bound
from benchmarks.goals.fp8_rows import WIDTHS
from benchmarks.goals.table import amount, render
from benchmarks.goals.targets import GOALS, Measured, attempt, judge, missed
from benchmarks.profile import group, idle
from benchmarks.random_checkpoint import QWEN3_06B

ROOT = Path(__file__).parents[1]
GEMM = {"jax": {"contract": 800e12, "full": 750e12}, "torch": {"contract": 700e12, "full": 700e12}}


def rows_of(**found: list[Measured]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["backend"]): row for row in judge(found, GEMM)}


def throughput(name: str, value: float, **more: Any) -> Measured:
    return replace(Measured(name, "a request", value, "items/s", flops=400e12), **more)


def test_the_contract_workload_has_the_work_that_the_design_counts() -> None:
    linear = 28 * 2 * 1024 * ((16 + 8 + 8 + 16) * 128 + 3 * 3072) * 12_000
    prefix, items = 28 * 4 * 16 * 128 * 2000**2 / 2, 28 * 4 * 16 * 128 * 10_000 * 2010
    assert floor_flops(QWEN3_06B, 2000, 500, 20) == pytest.approx(linear + prefix + items)
    assert FULL.contract.flops(QWEN3_06B) == pytest.approx(15.6e12, rel=0.01)


def test_a_cached_prefix_is_not_counted_as_work() -> None:
    whole, kept = FULL.contract.flops(QWEN3_06B), FULL.contract.flops(QWEN3_06B, cached=True)
    assert whole - kept == pytest.approx(floor_flops(QWEN3_06B, 2000, 0, 20))


def test_goals_of_one_backend_are_its_own() -> None:
    rows = rows_of(jax=[throughput("cold", 18_001)], torch=[throughput("cold", 16_499)])
    assert (rows["cold", "jax"]["goal"], rows["cold", "jax"]["met"]) == (18_000, True)
    assert (rows["cold", "torch"]["goal"], rows["cold", "torch"]["met"]) == (16_500, False)
    assert missed(list(rows.values())) == ["cold (torch)"]


@pytest.mark.parametrize(("name", "values", "holder"), [("http", (14, 16), "torch"), ("small", (5, 7), "jax")])
def test_other_goals_are_the_better_backends(name: str, values: tuple[float, float], holder: str) -> None:
    rows = rows_of(jax=[throughput(name, values[0])], torch=[throughput(name, values[1])])
    assert [backend for (_, backend), row in rows.items() if row["goal"] is not None] == [holder]


def test_a_goal_may_depend_on_the_run() -> None:
    rows = rows_of(jax=[throughput("many", 900, bound=1000.0)], torch=[throughput("many", 800, bound=700.0)])
    assert [row["met"] for row in rows.values()] == [False, True]


def test_what_is_not_known_is_not_judged() -> None:
    row = rows_of(jax=[Measured("many memory", "growth", None, "MiB", bound=5.0)])["many memory", "jax"]
    assert (row["measured"], row["met"], row["tflops"], row["fraction_of_gemm"]) == (None, None, None, None)


def test_a_share_of_the_gemm_rate_is_of_the_same_backend_and_size() -> None:
    rows = rows_of(jax=[throughput("cold", 1), throughput("long", 0.5, gemm="full")], torch=[throughput("cold", 1)])
    assert [row["fraction_of_gemm"] for row in rows.values()] == [0.5, pytest.approx(400 / 700, abs=1e-4), 0.5333]


def test_a_figure_that_cannot_be_had_does_not_cost_the_others() -> None:
    errors: dict[str, str] = {}
    assert attempt("cold", lambda: [throughput("cold", 1)], errors) == [throughput("cold", 1)]
    assert attempt("long", lambda: [throughput("long", 1 / 0)], errors) == ()
    assert errors == {"long": "ZeroDivisionError: division by zero"}


def test_memory_may_grow_with_the_items_and_a_little_beside() -> None:
    assert memory_bound((500, 2000, 10_000), (0, 1500, 0)) == 8000 + MEMORY_SLACK_BYTES


def test_the_table_has_a_line_for_every_row() -> None:
    found = {
        "jax": [throughput("cold", 18_400.4, note="27 ms"), Measured("cold fill", "fill", 0.977, "%")],
        "torch": [throughput("cold", 13_000)],
    }
    lines = render(judge(found, GEMM)).splitlines()
    assert lines[0].split() == ["goal", "backend", "measured", "bound", "met", "TFLOP/s", "of", "GEMM"]
    assert lines[1].split("  ")[0] == "cold: a request"
    assert lines[1].endswith("18,400 items/s  >= 18,000  yes    400.0   50.0 %  27 ms")
    assert " NO " in lines[2] and "13,000 items/s" in lines[2]
    assert lines[3].split() == ["cold", "fill:", "fill", "jax", "97.7", "%", ">=", "95.0", "%", "yes", "-", "-"]
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("value", "unit", "shown"), [(0.977, "%", "97.7 %"), (18_400.4, "items/s", "18,400"), (5.128, "ms", "5.13")]
)
def test_amounts_have_the_digits_that_matter(value: float, unit: str, shown: str) -> None:
    assert amount(value, unit) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "nothing"],
        ["--rounds", "0"],
        ["--backend", "fake"],
        ["--only", "cold", "--serve"],
        ["--model-folder", "/tmp/model"],
        *(
            ["--prefix-attention-dtype", "fp8", *more]
            for more in (["--only", "cold"], ["--serve"], ["--backend", "jax"], ["--tiny"])
        ),
    ],
)
def test_goals_refuses_what_it_cannot_measure(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)


def test_flags_after_the_dashes_are_those_of_serve() -> None:
    options = parse_options(["--only", "small", "--", "--http-workers", "4"])
    assert (options.serve, options.flags, options.only) == (True, ["--http-workers", "4"], ["small"])
    assert set(parse_options(["--serve"]).only) == set(HTTP_CASES)
    assert not parse_options([]).serve


def test_every_row_of_the_goals_is_measured_by_a_case() -> None:
    suffixes = ("", " fill", " memory", " p50", " p99", " rate")
    cases = [*(case.replace("fp8_", "fp8 ") for case in CASES), *(f"fp8 width {name}" for name in WIDTHS)]
    assert {goal.name for goal in GOALS} <= {f"{case}{suffix}" for case in cases for suffix in suffixes}
    assert set(FULL.searches) == set(TINY.searches) == set(SEARCH_CASES)
    assert set(FULL.besides) == set(TINY.besides) == set(BESIDE_CASES)


def test_fp8_is_a_run_of_its_own() -> None:
    both = runs_of(Settings("torch", ("cached", "fp8_cold", "fp8_http8"), 1))
    assert [(run.title, run.http_cases) for run in both] == [("torch", ()), ("torch fp8", ("http8",))]
    assert both[1].cases == ("cold", "http8")
    assert [run.title for run in runs_of(Settings("torch", ("fp8_load",), 1))] == ["torch fp8"]
    assert [run.title for run in runs_of(Settings("jax", CASES, 1))] == ["jax"]
    assert parse_options(["--prefix-attention-dtype", "fp8", "--only", "fp8_cold"]).prefix_attention_dtype == "fp8"
    with_attention = Settings("torch", ("cached", "fp8_cold"), 1, prefix_attention_dtype="fp8")
    assert [run.title for run in runs_of(with_attention)] == ["torch", "torch fp8, prefix attention too"]


def test_the_cost_of_a_step_and_of_a_request_is_a_line_through_all_waves() -> None:
    def wave(num_requests: int, num_steps: int) -> Wave:
        seconds = {"scheduler": 300e-6 * num_steps, "device": 40e-6 * num_requests, "answers": 1.0}
        return Wave(num_requests, num_steps, seconds, frozenset({"scheduler", "device"}))

    assert fit([wave(1, 1), wave(32, 1), wave(64, 2)]) == {"us_per_step": 300.0, "us_per_request": 40.0}


def test_waves_run_through_an_engine_whose_device_takes_no_time() -> None:
    waves = measure(NoDevice(), [1, 4], rounds=1)
    assert [wave.num_requests for wave in waves] == [1, 4]
    for wave in waves:
        assert 1 <= wave.num_steps <= wave.num_requests
        assert wave.seconds.keys() == {"scheduler", "device", "answers"}
        assert wave.total > 0


def test_kernels_that_differ_in_a_number_are_one() -> None:
    kernels = [("gemm_1", 0.0, 2000.0), ("gemm_2", 2500.0, 1000.0), ("norm", 10_000.0, 500.0)]
    assert group(kernels, rounds=1) == [
        {"kernel": "gemm_#", "calls": 2.0, "milliseconds": 3.0},
        {"kernel": "norm", "calls": 1.0, "milliseconds": 0.5},
    ]
    assert idle(kernels, rounds=1) == 0.5  # the long gap is one between requests


def test_goals_runs_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "goals.json"
    left_out = {"poisson20", "sglang", *FP8_CASES}  # searches like `poisson`; what needs a GPU
    cases = [case for case in CASES if case not in left_out]
    only = [argument for case in cases for argument in ("--only", case)]
    command = [sys.executable, "-m", "benchmarks.goals", "--tiny", "--backend", "torch", "--output", str(output), *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(output.read_text(encoding="utf-8")) == result
    rows = {row["name"]: row for row in result["rows"]}
    beside = {f"{case} {figure}" for case in BESIDE_CASES for figure in ("p50", "p99", "rate")}
    assert rows.keys() == {*cases, "cold fill", "many memory", "poisson fill", *beside} - set(BESIDE_CASES)
    for name, row in rows.items():
        if name not in ("many memory", "poisson"):  # a CPU does not know the one; a busy machine may meet no rate
            assert row["measured"] > 0, row
    assert rows["cached"]["details"]["cached_tokens"] == 160
    assert rows["cold"]["details"]["cached_tokens"] == 0
    assert rows["http8"]["details"]["answered"] == rows["http8"]["details"]["arrivals"] == 48
    assert result["backends"]["torch"]["errors"] == {}
    assert result["backends"]["torch"]["seconds"].keys() == {"load", "engine", "warm_up", "http"}
