"""`prefixwise lm-eval`: which arguments lm_eval gets. tests/test_lm_eval.py runs it where lm_eval is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prefixwise.cli.failures import CommandError
from prefixwise.cli.lm_eval import lm_eval_arguments
from tests.cli.conftest import RunMain


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--tasks", "a", "-f", "5"], ["run", "--tasks", "a", "-f", "5", "--model", "prefixwise"]),
        (
            ["run", "--model=prefixwise", "--tasks=a"],
            ["run", "--model=prefixwise", "--tasks=a", "--model", "prefixwise"],
        ),
        (["--model_args", "dtype=float32"], ["run", "--model_args", "dtype=float32", "--model", "prefixwise"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["validate", "--tasks", "a"], ["validate", "--tasks", "a"]),
    ],
    ids=lambda each: " ".join(each),
)
def test_our_model_is_the_default(given: list[str], passed: list[str]) -> None:
    assert lm_eval_arguments(given) == passed


@pytest.mark.parametrize("given", [["--model", "hf"], ["--model=hf"], ["-M", "hf"], ["-Mhf"], ["run", "--model", "hf"]])
def test_another_model_is_refused(given: list[str]) -> None:
    with pytest.raises(CommandError, match="--model must be prefixwise or left out, got hf"):
        lm_eval_arguments([*given, "--tasks", "a"])


def test_another_model_in_a_file_of_options_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "options.yaml"
    path.write_text("model: hf\n")
    with pytest.raises(CommandError, match="got hf"):
        lm_eval_arguments(["--config", str(path)])
    path.write_text("tasks: [a]\n")
    assert lm_eval_arguments(["-C", str(path)]) == ["run", "-C", str(path), "--model", "prefixwise"]
    with pytest.raises(CommandError, match=r"missing\.yaml cannot be read"):
        lm_eval_arguments(["--config", str(tmp_path / "missing.yaml")])


def test_without_lm_eval_it_names_the_command_that_installs_it(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ran = run_main("lm-eval", "--tasks", "arc_easy", "-f", "5")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(
        "error: lm_eval (lm-evaluation-harness) is not installed\nhint: install it with: pip install"
    )


def test_without_arguments_it_says_what_is_missing(run_main: RunMain) -> None:
    ran = run_main("lm-eval")
    assert ran.status == 2
    assert "Missing argument 'ARGS'" in ran.err
