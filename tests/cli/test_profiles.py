from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from prefixwise.prompts.profile import parse_profile
from prefixwise.prompts.profile_choice import builtin_profiles
from tests.cli.conftest import RunMain
from tests.cli.sample_rerank import PROFILE_FILE, write_profile


def test_the_built_in_ones_are_listed_with_what_they_are_for(run_main: RunMain) -> None:
    ran = run_main("profiles")
    header, *lines = ran.out.splitlines()
    rows, notes = lines[::2], lines[1::2]
    assert (ran.status, ran.err) == (0, "")
    assert header.split() == ["profile", "relevance", "labels", "for", "models", "called"]
    assert [row.split()[0] for row in rows] == list(builtin_profiles())
    assert notes == [f"  {profile.description}" for profile in builtin_profiles().values()]
    by_name = {row.split()[0]: row.split()[1:] for row in rows}
    assert by_name["qwen3-reranker"] == ["softmax", "yes", "no", "*qwen3-reranker*"]
    assert by_name["question-yes-no"] == ["softmax", '"', 'yes"', '"', 'no"', "-"]
    assert by_name["llama-nemotron-rerank"] == ["logit", "-", "any", "llama_bidirec"]
    assert by_name["plain"] == ["from_request", "-", "-"]


def test_json_has_it_all_on_one_line(run_main: RunMain) -> None:
    ran = run_main("profiles", "--json")
    by_name = {entry["name"]: entry for entry in json.loads(ran.out)["profiles"]}
    assert ran.out.count("\n") == 1
    assert list(by_name) == list(builtin_profiles())
    assert by_name["mxbai-rerank-v2"] == {
        "name": "mxbai-rerank-v2",
        "description": "mxbai-rerank v2, its package's recipe: the logit of 1 minus that of 0",
        "relevance": "logit_diff",
        "labels": ["1", "0"],
        "label_token_ids": [],
        "instruction": None,
        "recognise": {"names": ["*mxbai-rerank-*-v2*"], "families": ["qwen2"]},
    }


@pytest.mark.parametrize("name", list(builtin_profiles()))
def test_a_built_in_one_is_shown_as_its_file(run_main: RunMain, name: str) -> None:
    ran = run_main("profiles", name)
    assert (ran.status, ran.err) == (0, "")
    assert parse_profile(tomllib.loads(ran.out), "stdout") == builtin_profiles()[name]


def test_a_copy_with_a_name_of_its_own_is_good(run_main: RunMain, tmp_path: Path) -> None:
    copy = run_main("profiles", "qwen3-reranker").out
    path = write_profile(tmp_path, copy)
    assert 'name "qwen3-reranker" is taken; choose another name' in run_main("profiles", path).err
    path = write_profile(tmp_path, copy.replace('name = "qwen3-reranker"', 'name = "mine"'))
    ran = run_main("profiles", path)
    assert (ran.status, ran.out, ran.err) == (0, f"{path}: ok, profile mine\n", "")


def test_each_file_is_judged_and_one_bad_one_fails(run_main: RunMain, tmp_path: Path) -> None:
    good = write_profile(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text(PROFILE_FILE.replace("{document}", "{documents}"))
    missing = str(tmp_path / "missing.toml")
    ran = run_main("profiles", str(bad), missing, good)
    assert (ran.status, ran.out) == (1, f"{good}: ok, profile mine\n")
    first, second = ran.err.splitlines()
    assert first.startswith(f"error: {bad} is not a profile: prompt.body[1]: unknown placeholder {{documents}}")
    assert second == f"error: {missing} cannot be read: No such file or directory"


def test_a_name_that_nobody_knows_is_an_error_that_lists_the_names(run_main: RunMain) -> None:
    ran = run_main("profiles", "qwen3")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith('error: no profile is called "qwen3"; expected bge-reranker-v2-gemma, ')
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("plain", "chat-yes-no"), "error: a built-in profile is shown alone: expected one name, or files"),
        (("mine.toml", "plain"), "error: a built-in profile is shown alone: expected one name, or files"),
        (("plain", "--json"), "error: --json is for the list: expected it without a name or file"),
    ],
)
def test_arguments_that_do_not_go_together_are_a_usage_error(
    run_main: RunMain, args: tuple[str, ...], error: str
) -> None:
    ran = run_main("profiles", *args)
    assert (ran.status, ran.out, ran.err) == (2, "", f"{error}\n")
