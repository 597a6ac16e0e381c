"""`validate self`: the commands it runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from prefixwise.bench.self_check.commands import Command, ModelTokens, Phase, num_steps, phases, workload_command
from prefixwise.bench.self_check.options import SelfCheckOptions

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
            assert set(command.needs) | {name for _, name in command.welcome} <= made, command.title
            assert all(str(tmp_path / name) in command.arguments for name in command.makes), command.title
            made |= set(command.makes)


def test_the_report_has_both_backends(tmp_path: Path) -> None:
    (report,) = (each for each in phases_of(tmp_path, "jax", "torch")[-1].commands if each.title == "report")
    gates = [name for flag, name in report.welcome if flag == "--gate-json"]
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


def _has(command: Command, words: str) -> bool:
    return any(words in argument for argument in command.arguments)


def test_without_two_backends_there_is_nothing_to_compare(tmp_path: Path) -> None:
    verbs = [" ".join(command.arguments[:2]) for command in phases_of(tmp_path, "torch")[-1].commands]
    assert verbs == ["validate models", "bench ab", "bench ab", "bench ab", "bench check"]
