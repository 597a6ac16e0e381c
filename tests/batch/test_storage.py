from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from prefixwise.batch import storage
from prefixwise.contract.errors import BatchError


@pytest.fixture(params=["local", "remote"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of this machine, and one that is reached by a URL."""
    yield str(tmp_path) if request.param == "local" else f"memory://{uuid4().hex}"


def put(url: str, content: bytes = b"x") -> str:
    storage.write_file(url, content)
    return url


def names(url: str) -> list[str]:
    return [found.name for found in storage.find_files(url)]


def test_files_of_a_folder_are_found_in_order_and_without_what_is_no_data(root: str) -> None:
    for name in ("b.jsonl", "a.csv", "deep/c.jsonl", "_SUCCESS", ".hidden.jsonl", "_temporary/d.jsonl"):
        put(f"{root}/{name}")
    assert names(root) == ["a.csv", "b.jsonl", "deep/c.jsonl"]
    assert names(f"{root}/*.jsonl") == ["b.jsonl"]
    assert names(f"{root}/b.jsonl") == ["b.jsonl"]
    assert [storage.has_many_files(url) for url in (root, f"{root}/*.jsonl", f"{root}/b.jsonl")] == [True, True, False]


def test_what_was_found_can_be_opened(root: str) -> None:
    put(f"{root}/a.jsonl", b"one\ntwo\n")
    (found,) = storage.find_files(root)
    with storage.open_file(found.url) as file:
        file.seek(4)
        assert file.read() == b"two\n"
    assert found.size == 8


def test_a_version_changes_with_the_content(root: str) -> None:
    url = put(f"{root}/a.jsonl", b"one")
    (before,) = storage.find_files(url)
    (same,) = storage.find_files(url)
    put(url, b"two")
    (after,) = storage.find_files(url)
    assert before == same
    assert before.version != after.version


def test_nothing_there_is_said(root: str) -> None:
    with pytest.raises(BatchError, match="no such file or folder"):
        storage.find_files(f"{root}/missing.jsonl")
    put(f"{root}/folder/_SUCCESS")
    with pytest.raises(BatchError, match="expected files of rows, got none"):
        storage.find_files(f"{root}/folder")


def test_what_is_written_has_its_name_only_when_it_is_complete(root: str) -> None:
    url = f"{root}/a.jsonl"
    with storage.writing(url) as file:
        file.write(b"one")
        assert not storage.exists(url)
    assert storage.read_bytes(url) == b"one"


def test_what_fails_while_it_is_written_leaves_nothing_behind(root: str) -> None:
    url = put(f"{root}/a.jsonl", b"old")
    with pytest.raises(KeyboardInterrupt), storage.writing(url) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert storage.read_bytes(url) == b"old"
    assert storage.list_names(root) == ["a.jsonl"]


def test_a_folder_goes_only_when_it_is_empty(root: str) -> None:
    for name in ("a", "b"):
        put(f"{root}/work/{name}")
    storage.remove_files(f"{root}/work", ["a"])
    assert storage.list_names(f"{root}/work") == ["b"]
    storage.remove_files(f"{root}/work", ["b"])
    assert not storage.exists(f"{root}/work/b")
    assert storage.list_names(f"{root}/work") == []
    storage.remove_file(f"{root}/work/b")  # it is gone already


@pytest.mark.parametrize("url", ["nosuch://bucket/a.jsonl", "s3://bucket/a.jsonl"])
def test_a_url_that_nothing_installed_reads_is_one_clear_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(BatchError, match=url):
        storage.find_files(url)


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BatchError, match=r"Not a directory|File exists"):
        storage.write_file(f"{tmp_path}/file/a.jsonl", b"x")


@pytest.mark.parametrize(
    ("url", "source", "is_within"),
    [
        ("a/in.jsonl", "a", True),
        ("a/deep/in.jsonl", "a/", True),
        ("ab/in.jsonl", "a", False),
        ("a/in.jsonl", "a/*.jsonl", True),
        ("a/deep/in.jsonl", "a/*.jsonl", False),
        ("a/deep/in.jsonl", "a/*/*.jsonl", True),
        ("a/deep/er/in.jsonl", "a/**/*.jsonl", True),
        ("a/in.jsonl", "a/**/*.jsonl", True),
        ("a/in.csv", "a/**/*.jsonl", False),
        ("a/in.jsonl", "b/../a/in.jsonl", True),
    ],
)
def test_what_a_source_would_find_is_within_it(tmp_path: Path, url: str, source: str, is_within: bool) -> None:
    assert storage.is_within(f"{tmp_path}/{url}", f"{tmp_path}/{source}") == is_within


def test_a_link_is_the_file_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("x")
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    assert storage.is_within(f"{tmp_path}/link.jsonl", f"{tmp_path}/in.jsonl")


def test_what_is_half_written_may_be_in_another_folder(root: str) -> None:
    with storage.writing(f"{root}/a.jsonl", f"{root}/work") as file:
        file.write(b"one")
        assert "a.jsonl" not in "".join(storage.list_names(root)).replace("work", "")
    assert storage.read_bytes(f"{root}/a.jsonl") == b"one"
    assert storage.list_names(f"{root}/work") == []


def test_one_file_is_found_as_it_is_now(root: str) -> None:
    url = put(f"{root}/a.jsonl", b"one")
    (found,) = storage.find_files(url)
    assert storage.find_file(url) == found
    put(url, b"other")
    assert storage.find_file(url).version != found.version
    with pytest.raises(BatchError, match=r"b\.jsonl"):
        storage.find_file(f"{root}/b.jsonl")
