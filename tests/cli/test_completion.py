"""`prefixwise completion`, and what the scripts ask the program for."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import RunMain, run_process

PROGRAM = str(Path(sys.executable).with_name("prefixwise"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(run_main: RunMain, shell: str) -> None:
    ran = run_main("completion", shell)
    assert (ran.status, ran.err) == (0, "")
    assert f"_PREFIXWISE_COMPLETE=complete_{shell}" in ran.out


def test_another_shell_is_a_usage_error(run_main: RunMain) -> None:
    ran = run_main("completion", "csh")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: Invalid value for 'SHELL'")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_verbs_options_and_values(run_main: RunMain, tmp_path: Path) -> None:
    """The script in a real shell; the words are set as bash sets them when a user presses the tab key."""
    (tmp_path / "prefixwise.bash").write_text(run_main("completion", "bash").out)
    lines = (("re",), ("bench", "workload", "--num-i"), ("score", "--dtype", "b"))
    script = f"source {tmp_path}/prefixwise.bash\n"
    for words in lines:
        quoted = " ".join(f"'{word}'" for word in ("prefixwise", *words))
        script += f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _prefixwise_completion {PROGRAM}\n"
        script += 'echo "${COMPREPLY[*]}"\n'
    ran = run_process(["bash", "--norc", "-c", script])
    assert (ran.status, ran.err) == (0, "")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["rerank"],
        ["--num-items"],
        ["bfloat16"],
    ]


def test_an_unfinished_line_of_another_server_is_no_error(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PREFIXWISE_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "prefixwise serve --revision ")
    assert run_main().err == ""


@pytest.mark.parametrize(("shell", "answer"), [("zsh", '"score":"Score items'), ("fish", "score\tScore items")])
def test_other_shells_get_explanations_too(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch, shell: str, answer: str
) -> None:
    monkeypatch.setenv("_PREFIXWISE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "prefixwise sc")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    ran = run_main()
    assert (ran.status, ran.err) == (0, "")
    assert answer in ran.out
