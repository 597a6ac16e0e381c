"""`validate self`: the commands it runs, and what becomes of one that fails."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from itemwise.harness.artifacts import SelfCheck, Workload
from itemwise.harness.files import read_artifact
from itemwise.harness.self_check import Phase, SelfCheckOptions, SelfCheckRun, phases
from tests.harness.checks.samples import workload

WORKLOAD = Workload.model_validate(workload())


def phases_of(tmp_path: Path, *backends: str) -> list[Phase]:
    return list(phases(SelfCheckOptions(tmp_path, "some/model", backends), WORKLOAD))


@pytest.mark.parametrize("backends", [("jax", "torch"), ("torch",)])
def test_as_many_commands_as_the_bar_says(tmp_path: Path, backends: tuple[str, ...]) -> None:
    options = SelfCheckOptions(tmp_path, backends=backends)
    found = phases_of(tmp_path, *backends)
    assert 1 + sum(len(phase.commands) for phase in found) == options.steps
    titles = [command.title for phase in found for command in phase.commands]
    assert len(set(titles)) == len(titles)


def test_the_serial_baseline_is_clean_and_the_multi_item_server_has_the_workloads_delimiter(tmp_path: Path) -> None:
    flags = {phase.server: shlex.join(phase.flags) for phase in phases_of(tmp_path, "jax") if phase.server}
    assert set(flags) == {"jax-multi", "jax-native", "jax-serial"}
    assert "--algorithm serial --disable-radix-cache" in flags["jax-serial"]
    delimiter = f"--multi-item-scoring-delimiter {WORKLOAD.delimiter_token_id}"
    assert f"{delimiter} --disable-radix-cache" in flags["jax-multi"]
    assert flags["jax-native"].endswith(delimiter)
    assert all("--backend jax --dtype float32 --model-path some/model" in each for each in flags.values())


def test_flags_for_servers_reach_every_one_of_them(tmp_path: Path) -> None:
    options = SelfCheckOptions(tmp_path, server_flags=("--device=cpu", "--warmup=fast"))
    found = list(phases(options, WORKLOAD))
    assert all("--device=cpu" in phase.flags for phase in found if phase.server)
    (ab,) = (command for command in found[-1].commands if command.arguments[1] == "ab")
    assert ab.arguments[-2:] == ("--server-args", "--device=cpu --warmup=fast")


def test_without_two_backends_there_is_nothing_to_compare(tmp_path: Path) -> None:
    last = phases_of(tmp_path, "torch")[-1]
    assert [command.arguments[:2] for command in last.commands] == [("bench", "ab"), ("bench", "check")]


def test_a_model_that_is_not_there_is_the_end(tmp_path: Path) -> None:
    titles: list[str] = []
    verdict = SelfCheckRun(SelfCheckOptions(tmp_path, "/nowhere/model"), titles.append)()
    assert titles == ["workload"]
    assert not verdict.all_pass
    assert verdict.steps[0].status != 0
    assert "/nowhere/model" in (verdict.steps[0].detail or "")
    assert read_artifact(tmp_path / "self_check.json", SelfCheck) == verdict


def test_servers_that_do_not_start_are_told_and_the_rest_goes_on(
    tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    flags = ("--no-such-flag",)
    options = SelfCheckOptions(
        tmp_path, str(checkpoint_of("qwen3")), ("torch",), num_items=2, timed_runs=1, server_flags=flags
    )
    verdict = SelfCheckRun(options, lambda title: None)()
    steps = {step.title: step for step in verdict.steps}
    assert len(steps) == options.steps
    assert not verdict.all_pass
    assert "the server ended with status 2" in (steps["pytorch portable matrix"].detail or "")
    assert "pytorch_multi.json cannot be read" in (steps["pytorch combine"].detail or "")
    assert (steps["workload"].status, steps["check of all artifacts"].status) == (0, 0)
    assert json.loads((tmp_path / "workload.json").read_text())["num_items"] == 2


@pytest.mark.slow
def test_everything_passes_on_a_small_model(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    verdict = SelfCheckRun(SelfCheckOptions(tmp_path, str(checkpoint_of("qwen3"))), lambda title: None)()
    assert verdict.all_pass, [step for step in verdict.steps if step.status]
    assert "<svg" in (tmp_path / "report.html").read_text()
