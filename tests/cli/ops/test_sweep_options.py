"""What `prefixwise ops smoke` and `matrix` refuse before anything runs, and what they say of what stays."""

from __future__ import annotations

import pytest

from prefixwise.cli.ops.collect import collect
from prefixwise.cli.ops.sweep import _collect_command, _told_how_to_go_on, matrix, smoke
from tests.cli.verb_runner import run_verb


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "the port must be 0 to 65535, got 70000"),
        (["--artifact-root", ""], "--artifact-root must be a folder, got nothing"),
        (["--multi-item-mask-impl", "../esc"], "'../esc' is not one of"),
        (["--backend", "tpu"], "'tpu' is not one of"),
        (["--dtype", "float8"], "'float8' is not one of"),
        (["--algorithm", "fast"], "'fast' is not one of"),
        (["--server-flag", "--api-key secret"], "--api-key cannot be a flag of the servers"),
        (["--server-flag=--api-key=secret"], "--api-key cannot be a flag of the servers"),
    ],
)
@pytest.mark.parametrize("verb", [smoke, matrix])
def test_what_would_fail_on_the_target_is_status_2_here(
    verb: object, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_verb(verb, capsys, "--target", "local", *flags)  # type: ignore[arg-type]
    assert (ran.status, words in ran.err) == (2, True), ran.err
    assert "secret" not in ran.err


@pytest.mark.parametrize("flags", [["one", "--list"], ["one", "--all"], ["--list", "--all"]])
def test_one_run_and_all_of_them_exclude_each_other(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_verb(collect, capsys, "--target", "local", *flags)
    assert (ran.status, "exclude each other" in ran.err) == (2, True), ran.err


def test_a_name_from_the_environment_gives_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("ARTIFACT_SUBDIR", "one")
    ran = run_verb(collect, capsys, "--target", "local", "--list", "--artifact-root", str(tmp_path))
    assert (ran.status, ran.out) == (0, '{"target": "local", "runs": []}\n')


def test_the_way_to_fetch_a_run_has_all_that_was_given() -> None:
    plain = "prefixwise ops collect one --target ssh://host"
    assert _collect_command("one", "ssh://host", None, "reports/artifacts") == plain
    assert (
        _collect_command("one", "ssh://host", "my python", "/r") == f"{plain} --python 'my python' --artifact-root /r"
    )


def test_a_sweep_that_is_ended_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), _told_how_to_go_on(["/runs/dense-matrix-1"]):
        raise KeyboardInterrupt
    said = capsys.readouterr().err
    assert "the rows that are done stay in /runs/dense-matrix-1" in said
    assert "--artifact-subdir dense-matrix-1" in said
