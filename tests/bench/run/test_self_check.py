"""`validate self`: what becomes of its commands."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.self_check import SelfCheck
from prefixwise.bench.options import SelfCheckOptions
from prefixwise.bench.processes import RunningServer, local_server
from prefixwise.bench.run.self_check import (
    SKIPPED,
    Command,
    ModelTokens,
    Phase,
    SelfCheckRun,
    num_steps,
    phases,
    workload_command,
)
from tests.bench.test_processes import TIMEOUT, child_with, is_running
from tests.bench.wrong_server import wrong_server


def quiet(title: str) -> None:
    """Nobody watches."""


def test_a_model_that_is_not_there_is_the_end(tmp_path: Path) -> None:
    titles: list[str] = []
    verdict = SelfCheckRun(SelfCheckOptions(tmp_path, "/nowhere/model"), titles.append)()
    assert titles == ["workload"]
    assert not verdict.all_pass
    assert verdict.steps[0].status != 0
    assert "/nowhere/model" in (verdict.steps[0].detail or "")
    assert read_artifact(tmp_path / "self_check.json", SelfCheck) == verdict


@pytest.fixture
def small(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> SelfCheckOptions:
    """One backend on a small model."""
    model = str(checkpoint_of("qwen3"))
    return SelfCheckOptions(tmp_path, model, ("torch",), num_items=4, client_chunk_sizes=(2, 4), timed_runs=1)


def test_servers_that_do_not_start_are_told_and_what_they_leave_out_is_not_judged(small: SelfCheckOptions) -> None:
    (small.output_dir / "pytorch_multi.json").write_text("what an earlier run left")
    titles: list[str] = []
    verdict = SelfCheckRun(replace(small, server_flags=("--no-such-flag",)), titles.append)()
    steps = {step.title: step for step in verdict.steps}
    assert len(steps) == len(titles) == num_steps(small)
    assert not verdict.all_pass
    assert "the server ended with status 2" in (steps["pytorch-multi server"].detail or "")
    assert "--no-such-flag" in steps["pytorch-multi server"].command
    matrix = steps["pytorch portable matrix"]
    assert (matrix.status, matrix.detail) == (SKIPPED, "not run: pytorch-multi server did not start")
    combine = steps["pytorch combine"]
    assert (combine.status, combine.detail) == (SKIPPED, "not run: there is no pytorch_multi.json, pytorch_serial.json")
    assert steps["model matrix"].status == 1
    assert (steps["workload"].status, steps["check of all artifacts"].status) == (0, 0)
    assert json.loads((small.output_dir / "workload.json").read_text())["num_items"] == 4


@pytest.mark.slow
def test_a_server_that_leaks_fails_the_gate_and_nothing_else_hides_it(small: SelfCheckOptions) -> None:
    @contextmanager
    def serve(flags: Sequence[str], log: Path) -> Iterator[RunningServer]:
        with local_server(flags, log) as good:
            if "serial" in flags:
                yield good
                return
            with wrong_server(good.url, "leak") as url:
                yield replace(good, url=url)

    verdict = SelfCheckRun(replace(small, min_speedup=0.01), quiet, serve)()
    failed = {step.title: step for step in verdict.steps if step.status != 0}
    assert set(failed) == {"pytorch gate"}
    assert "same_length_isolation" in (failed["pytorch gate"].detail or "")
    assert not verdict.all_pass
    assert read_artifact(small.output_dir / "self_check.json", SelfCheck).complete


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGINT])
def test_whatever_ends_it_ends_its_servers_and_leaves_the_steps_that_are_done(
    small: SelfCheckOptions, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "prefixwise", "validate", "self", "--backends=torch", f"--model={small.model}"]
    with subprocess.Popen([*command, f"--output-dir={small.output_dir}"], stderr=subprocess.DEVNULL) as process:
        server = child_with(process.pid, "serve")
        process.send_signal(number)
        assert process.wait(TIMEOUT) == 128 + number
    assert not is_running(server)
    verdict = read_artifact(small.output_dir / "self_check.json", SelfCheck)
    assert [step.title for step in verdict.steps][:1] == ["workload"]
    assert (verdict.complete, verdict.all_pass) == (False, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_command_that_is_ended_stops_the_servers_that_it_has_started(
    small: SelfCheckOptions, number: signal.Signals
) -> None:
    """As `validate self` ends its commands, and a batch system ends us."""
    command = [sys.executable, "-m", "prefixwise", "bench", "ab", "--compare=mask", f"--model={small.model}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        server = child_with(process.pid, "serve")
        process.send_signal(number)
        assert process.wait(TIMEOUT) == 128 + number
    assert not is_running(server)


@pytest.mark.slow
def test_everything_passes_on_a_small_model(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    verdict = SelfCheckRun(SelfCheckOptions(tmp_path, str(checkpoint_of("qwen3"))), quiet)()
    assert verdict.all_pass, [step for step in verdict.steps if step.status]
    assert "<svg" in (tmp_path / "report.html").read_text()


TOKENS = ModelTokens((3, 4), 7)


def phases_of(tmp_path: Path, *backends: str) -> list[Phase]:
    return list(phases(SelfCheckOptions(tmp_path, "some/model", backends), TOKENS))


@pytest.mark.parametrize("backends", [("jax", "torch"), ("torch",)])
def test_as_many_steps_as_the_bar_says(tmp_path: Path, backends: tuple[str, ...]) -> None:
    found = phases_of(tmp_path, *backends)
    assert 1 + sum(phase.num_steps for phase in found) == num_steps(SelfCheckOptions(tmp_path, backends=backends))
    titles = [command.title for phase in found for command in phase.commands]
    assert len(set(titles)) == len(titles)


def test_every_verb_of_the_harness_is_among_them(tmp_path: Path) -> None:
    found = [command for phase in phases_of(tmp_path, "jax", "torch") for command in phase.commands]
    verbs = {" ".join(command.arguments[:2]) for command in [*found, workload_command(SelfCheckOptions(tmp_path))]}
    bench = {f"bench {verb}" for verb in ("workload", "matrix", "compare", "report", "check", "ab", "load")}
    assert verbs == bench | {f"validate {verb}" for verb in ("endpoint", "combine", "gate", "models")}


def test_what_a_command_needs_was_made_before(tmp_path: Path) -> None:
    made = set(workload_command(SelfCheckOptions(tmp_path)).makes)
    for phase in phases_of(tmp_path, "jax", "torch"):
        for command in phase.commands:
            assert set(command.needs) | {name for _, name in command.optional} <= made, command.title
            assert all(str(tmp_path / name) in command.arguments for name in command.makes), command.title
            made |= set(command.makes)


def test_the_report_has_both_backends(tmp_path: Path) -> None:
    (report,) = (each for each in phases_of(tmp_path, "jax", "torch")[-1].commands if each.title == "report")
    gates = [name for flag, name in report.optional if flag == "--gate-json"]
    assert gates == ["jax_gate.json", "pytorch_gate.json"]


def test_the_serial_baseline_is_clean_and_the_multi_item_server_has_the_workloads_delimiter(tmp_path: Path) -> None:
    flags = {phase.server: shlex.join(phase.flags) for phase in phases_of(tmp_path, "jax") if phase.server}
    assert set(flags) == {"jax-multi", "jax-native", "jax-serial"}
    assert "--algorithm serial --disable-radix-cache" in flags["jax-serial"]
    delimiter = "--multi-item-scoring-delimiter 7"
    assert f"{delimiter} --disable-radix-cache" in flags["jax-multi"]
    assert flags["jax-native"].endswith(delimiter)
    assert all("--backend jax --dtype float32 --model-path some/model" in each for each in flags.values())


def test_flags_for_servers_reach_every_one_of_them(tmp_path: Path) -> None:
    options = SelfCheckOptions(tmp_path, server_flags=("--device=cpu", "--warmup=fast"))
    found = list(phases(options, TOKENS))
    assert all("--device=cpu" in phase.flags for phase in found if phase.server)
    with_servers = [each for each in found[-1].commands if each.arguments[1] in ("ab", "models")]
    assert len(with_servers) == 5
    assert all(_has(command, "--device=cpu --warmup=fast") for command in with_servers)


def _has(command: Command, phrase: str) -> bool:
    return any(phrase in argument for argument in command.arguments)


def test_without_two_backends_there_is_nothing_to_compare(tmp_path: Path) -> None:
    verbs = [" ".join(command.arguments[:2]) for command in phases_of(tmp_path, "torch")[-1].commands]
    assert verbs == ["validate models", "bench ab", "bench ab", "bench ab", "bench check"]
