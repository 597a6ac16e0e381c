"""`benchmarks.cpu`: how rounds become rows, who is asked when, that peers compute what we do, and that it all runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu.__main__ import machine, parse_options
from benchmarks.cpu.cases import CASES, FULL, Role, draw
from benchmarks.cpu.child import PEERS
from benchmarks.cpu.peer import Round, fastest
from benchmarks.cpu.process import PeerFailedError, running
from benchmarks.cpu.run import LLAMA_MISSING, CpuRun, race
from benchmarks.cpu.table import peer_line, render
from benchmarks.cpu.targets import AGREEMENT, GOALS, Agreement, disagreement, make_row, ratio_row, share_row
from benchmarks.goals.cases import TINY
from tests.checkpoints import make_hf_checkpoint

ROOT = Path(__file__).parents[2]
SHAPE = (40, 6, 5)


def rounds_of(*rates: float, scores: tuple[float, ...] = (0.25, 0.75)) -> list[Round]:
    return [Round(10.0, 10.0 / rate, list(scores)) for rate in rates]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As `benchmarks.random_folder --tiny` writes it, without another process."""
    shape = TINY.model
    folder = make_hf_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        "qwen3",
        vocab_size=shape.vocab_size,
        hidden_size=shape.model_size,
        intermediate_size=shape.mlp_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_size,
    )
    return str(folder)


def test_a_ratio_is_of_the_same_round() -> None:
    row = ratio_row("llama", "a request", rounds_of(90, 20, 100), rounds_of(10, 2, 5))
    assert (row["measured"], row["lowest"], row["highest"]) == (10, 9, 20)
    assert row["values"] == [9, 10, 20]
    assert (row["goal"], row["met"], row["agrees"]) == (8, True, True)


@pytest.mark.parametrize(
    ("name", "value", "met"),
    [("hf-full", 39.9, False), ("hf-full", 40.0, True), ("score", 2.5, True), ("score", 2.6, False)],
)
def test_the_median_is_held_to_the_goal(name: str, value: float, met: bool) -> None:
    assert make_row(name, "a case", [value / 9, value, value * 9], "x")["met"] is met


def test_there_is_a_goal_for_every_case_that_the_table_can_have() -> None:
    rows = {"hf-prefix", "hf-full", *CASES} - {"hf"}
    assert GOALS.keys() == rows


def test_a_baseline_that_computes_something_else_is_no_baseline() -> None:
    row = ratio_row("llama", "a request", rounds_of(90), rounds_of(1, scores=(0.25, 0.25)))
    assert (row["met"], row["agrees"], row["difference"]) == (None, False, {"mean": 0.25, "most": 0.5})
    assert row["note"].startswith(
        "DOES NOT AGREE: probabilities differ by 0.250 in the mean and 0.500 at most, allowed"
    )


def test_one_item_of_many_that_differs_is_enough() -> None:
    ours, peer = (0.5,) * 100, (0.5,) * 99 + (0.9,)
    row = ratio_row("llama", "", rounds_of(90, scores=ours), rounds_of(1, scores=peer))
    assert (row["agrees"], row["difference"]["mean"]) == (False, 0.004)


def test_probabilities_that_are_no_numbers_do_not_agree() -> None:
    assert ratio_row("llama", "", rounds_of(90), rounds_of(1, scores=(0.25, float("nan"))))["agrees"] is False


def test_a_baseline_without_scores_does_not_agree() -> None:
    assert ratio_row("llama", "", rounds_of(90), rounds_of(1, scores=()))["agrees"] is False


def test_a_baseline_that_scores_fewer_items_is_compared_on_these() -> None:
    found = disagreement(rounds_of(1, scores=(0.25, 0.75)), rounds_of(1, scores=(0.375,)))
    assert found == Agreement(0.125, 0.125)


def test_a_share_of_the_gemm_rate_counts_operations() -> None:
    products = [Round(4e12, 2.0), Round(4e12, 4.0)]
    row = share_row("gemm", "a request", [Round(100, 1.0), Round(100, 1.0)], products, flops=6e9)
    assert row["values"] == [0.3, 0.6]
    assert (row["measured"], row["goal"], row["met"]) == (0.45, 0.55, False)


def test_all_peers_get_the_same_requests_and_who_is_first_turns() -> None:
    asked: list[tuple[str, int]] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, seed: int) -> Round:
            asked.append((self.name, seed))
            return Round(1.0, 1.0)

    found = race({name: Fake(name) for name in "abc"}, 4, lambda words: None)
    order = "".join(name for name, _ in asked)
    assert [order[at : at + 3] for at in range(0, 12, 3)] == ["abc", "bca", "cab", "abc"]
    assert [seed for _, seed in asked] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert [len(found[name]) for name in "abc"] == [4, 4, 4]


def test_a_request_is_the_same_in_every_process_and_another_in_every_round() -> None:
    first, again, other = (draw(512, SHAPE, seed) for seed in (1, 1, 2))
    assert (first.query == again.query).all() and (first.items == again.items).all()
    assert (first.query != other.query).any()
    assert (first.query.shape, first.items.shape) == ((40,), (6, 5))
    assert len(set(first.labels)) == 2 and max(first.labels) < 512


def test_a_search_takes_the_fastest_and_tells_all() -> None:
    assert fastest([1, 2, 4], lambda size: {1: 5.0, 2: 9.0, 4: 7.0}[size]) == (2, {"1": 5.0, "2": 9.0, "4": 7.0})


@pytest.mark.parametrize("name", ["hf-prefix", "hf-full"])
def test_hugging_face_computes_what_we_do(name: str, tiny_model: str) -> None:
    ours, peer = (PEERS[each](Role(each, SHAPE, tiny_model, tiny=True)) for each in ("ours", name))
    told = peer.prepare()
    one, other = ours.run(seed=7), peer.run(seed=7)
    assert other.work == told["settings"]["timed_items"] == len(other.scores)
    assert disagreement([one], [other]).is_within(AGREEMENT[name])
    another = disagreement([ours.run(seed=8)], [other])
    assert not another.is_within(AGREEMENT[name]), "another request would have been noticed"


def test_matrix_products_are_counted_whole() -> None:
    peer = PEERS["gemm"](Role("gemm", SHAPE, tiny=True))
    per_row = 2 * 32 * ((4 + 2 * 2) * 16 + 4 * 16 + 3 * 64)
    assert peer.run(seed=1).work in (2 * 120 * per_row, 2 * 3 * 32 * per_row)


def test_a_peer_that_ends_says_why(tmp_path: Path) -> None:
    says = pytest.raises(PeerFailedError, match=r"(?s)ours ended with status 1.*missing")
    with running(Role("ours", SHAPE, str(tmp_path / "missing"), tiny=True), tmp_path) as peer, says:
        peer.wait_until_loaded()


def test_llama_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.cpu.run.find_spec", lambda name: None)
    run = CpuRun(tiny=True, rounds=1, folder=tmp_path, model_folder=None, report=print)
    assert run.measure("llama") == []
    assert (run.skipped, run.errors) == ({"llama": LLAMA_MISSING}, {})


def test_what_fails_costs_its_own_rows_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> float:
        raise PeerFailedError("no embedded model")

    monkeypatch.setattr("benchmarks.cpu.startup.score_seconds", fail)
    monkeypatch.setattr("benchmarks.cpu.startup.serve_seconds", lambda folder: 3.0)
    run = CpuRun(tiny=True, rounds=2, folder=tmp_path, model_folder=None, report=print)
    assert run.measure("score") == []
    assert run.errors == {"score": "no embedded model"}
    assert run.measure("serve")[0]["values"] == [3.0, 3.0]


def test_the_table_has_a_line_for_every_row() -> None:
    rows = [
        ratio_row("hf-prefix", "a request", rounds_of(90, 85), rounds_of(10, 10)),
        share_row("gemm", "a request", [Round(1, 1.0)], [Round(4e12, 1.0)], flops=2e12),
        make_row("serve", "a server", [3.0, 5.5, 4.5], "s"),
    ]
    lines = render(rows).splitlines()
    assert lines[0].split() == ["case", "median", "lowest", "-", "highest", "goal", "met"]
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "hf-prefix: a request 8.75 x 8.50 x - 9.00 x >= 8.00 x yes 87.5 against 10.0 items/s",
        "gemm: a request 50.0 % 50.0 % - 50.0 % >= 55.0 % NO 2.000 of 4.000 TFLOP/s, 1.0 items/s",
        "serve: a server 4.50 s 3.00 s - 5.50 s <= 4.00 s NO",
    ]


def test_a_peer_is_shown_with_its_versions_settings_and_search() -> None:
    found = {"versions": {"torch": "2"}, "settings": {"batch_size": 8}, "items_per_second": {"4": 1.5, "8": 2}}
    shown = peer_line("hf: hf-full", found)
    assert shown == "hf: hf-full: torch 2; batch size 8; items per second: 4 -> 1.5, 8 -> 2"


def test_the_machine_is_named() -> None:
    assert machine()["cpu"] and machine()["cores"] >= 1


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--rounds", "0"]])
def test_it_refuses_what_it_cannot_measure(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert parse_options([]).rounds == FULL.rounds


def measure(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cpu", "--tiny", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["errors"] == {}
    return result


def test_one_case_runs_from_end_to_end(tmp_path: Path, tiny_model: str) -> None:
    output = tmp_path / "cpu.json"
    result = measure("--only", "gemm", "--rounds", "2", "--model-folder", tiny_model, "--output", str(output))
    assert json.loads(output.read_text(encoding="utf-8")) == result
    (row,) = result["rows"]
    assert (row["name"], len(row["values"]), row["goal"]) == ("gemm", 2, None)
    assert row["measured"] > 0
    assert result["peers"].keys() == {"gemm: ours", "gemm: gemm"}


@pytest.mark.slow
def test_all_cases_run_from_end_to_end() -> None:
    result = measure("--rounds", "1")
    names = {row["name"] for row in result["rows"]}
    assert names | ({"llama"} if "llama" in result["skipped"] else set()) == set(GOALS)
    assert all(row["measured"] > 0 for row in result["rows"])
    assert all(row["agrees"] for row in result["rows"] if row["unit"] == "x")
    assert result["peers"]["hf: hf-prefix"]["settings"]["batch_size"] in (2, 4)
