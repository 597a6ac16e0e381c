"""Profiles by name and by path."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from prefixwise.contract.errors import ProfileError
from prefixwise.prompts.profile_files import builtin_profile, builtin_profiles, find_profile, read_profile

MINE = """
name = "mine"
relevance = "logit_diff"
labels = ["1", "0"]
[prompt]
body = ["{query}", "{document}"]
"""
NAMES = ["bge-reranker-v2-gemma", "chat-yes-no", "mxbai-rerank-v2", "plain", "question-yes-no", "qwen3-reranker"]


def write(folder: Path, content: str | bytes, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_ours_are_legal_and_known_by_their_names() -> None:
    assert list(builtin_profiles()) == NAMES
    assert all(profile.name == name for name, profile in builtin_profiles().items())
    assert all(profile.description for profile in builtin_profiles().values())


def test_what_ours_fall_back_on_is_ours_too() -> None:
    named = [profile.without_chat_template for profile in builtin_profiles().values() if profile.chat]
    assert [builtin_profile(name).chat for name in named if name is not None] == [False]


def test_a_name_finds_one_of_ours() -> None:
    assert find_profile("qwen3-reranker") is builtin_profile("qwen3-reranker")


def test_an_unknown_name_is_told_all_names() -> None:
    with pytest.raises(ProfileError) as caught:
        find_profile("qwen-reranker")
    assert str(caught.value) == (
        f'no profile is called "qwen-reranker"; expected {", ".join(NAMES)}, or a path that ends in .toml'
    )


@pytest.mark.parametrize("as_text", [True, False])
def test_a_path_finds_a_users_file(as_text: bool, tmp_path: Path) -> None:
    path = write(tmp_path, MINE)
    profile = find_profile(str(path) if as_text else path)
    assert (profile.name, profile.labels) == ("mine", ("1", "0"))


def test_a_path_may_have_any_name(tmp_path: Path) -> None:
    assert find_profile(write(tmp_path, MINE, "qwen3-reranker")).name == "mine"
    assert find_profile(str(tmp_path / "qwen3-reranker")).name == "mine"


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, MINE)
    assert find_profile("~/mine.toml").name == "mine"


def test_a_home_that_nobody_has_is_named() -> None:
    with pytest.raises(ProfileError, match=r"mine\.toml cannot be read"):
        find_profile("~nobody-is-called-so/mine.toml")


@pytest.mark.parametrize("name", ["nothing.toml", "none/there.toml"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=f"{name} cannot be read: No such file or directory"):
        find_profile(str(tmp_path / name))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        find_profile(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("name = mine", "is not TOML: "),
        ('{"name": "mine"}', "is not TOML: "),
        (MINE + 'name = "twice"', "is no profile: prompt.name is unknown"),
        ('name = "a"\nname = "b"', "is not TOML: "),
        (b"name = '\xff'", "is not UTF-8: "),
        ("", "is no profile: "),
        (
            MINE.replace("{document}", "{text}"),
            "unknown placeholder {text}; expected {query}, {document}, {instruction}",
        ),
        (MINE.replace('"1", "0"', '"1"'), 'labels: relevance "logit_diff" takes 2, got 1'),
    ],
)
def test_a_file_that_is_no_profile_is_told_why(content: str | bytes, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ProfileError) as caught:
        find_profile(path)
    assert str(caught.value).startswith(f"{path} is no")
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["plain", "qwen3-reranker"])
def test_a_name_of_ours_is_taken(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, MINE.replace("mine", name))
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(caught.value) == f'{path} is no profile: name "{name}" is taken; call it otherwise'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "default"}, 'name "default" is taken'),
        ({"relevance": "from_request", "labels": []}, 'relevance "from_request" is that of plain'),
        (
            {
                "prompt": {
                    "chat": True,
                    "body": ["{query}", "{document}"],
                    "after": ["?"],
                    "without_chat_template": "no",
                }
            },
            'prompt.without_chat_template must be one of bge-reranker-v2-gemma, .*, got "no"',
        ),
    ],
)
def test_what_only_our_own_files_may_say(change: dict[str, object], message: str, tmp_path: Path) -> None:
    data = {**tomllib.loads(MINE), **change}
    path = tmp_path / "mine.toml"
    path.write_text(toml_text(data))
    with pytest.raises(ProfileError, match=message):
        read_profile(path)


def toml_text(data: dict[str, object]) -> str:
    """JSON's values are TOML's, but for objects."""
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if key not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines)
