from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prefixwise.bench.files import (
    now_utc,
    parse_artifact,
    read_artifact,
    read_bytes,
    sha256_of,
    write_artifact,
    write_text,
)
from prefixwise.bench.kinds.comparison.model import Correctness
from prefixwise.bench.kinds.parity import Parity
from prefixwise.contract.errors import ArtifactError

PARITY = Parity(
    model="m",
    max_abs_diff_jax_serial_vs_torch_serial=0.25,
    max_abs_diff_jax_multi_vs_torch_serial=0.5,
    max_abs_diff_jax_multi_vs_torch_multi_semantic=0.0,
)

# Writes over a file and is killed, as if by the machine, when all bytes are written and none is safe.
DIE_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from prefixwise.bench.files import write_text

os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
write_text(Path(sys.argv[1]), "new")
"""


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "parity.json"
    write_artifact(path, PARITY)
    assert read_artifact(path, Parity) == PARITY
    assert path.read_text().endswith("}\n")
    assert [file.name for file in path.parent.iterdir()] == ["parity.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_has_the_contracts_names_and_keeps_unknown_fields(tmp_path: Path) -> None:
    content = {
        "status": "ok",
        "max_abs_diff": None,
        "mean_abs_diff": None,
        "num_compared": 0,
        "pass": False,
        "detail": None,
        "theirs": [1, {"deep": True}],
    }
    gate = parse_artifact(json.dumps(content).encode(), Correctness, "here")
    assert gate.passed is False
    write_artifact(tmp_path / "gate.json", gate)
    assert json.loads((tmp_path / "gate.json").read_text()) == content


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(file: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "parity.json"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(file: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "parity.json"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(ArtifactError, match=r"parity\.json cannot be written: No space left on device"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    write_text(path, "old")
    ended = subprocess.run([sys.executable, "-c", DIE_WHILE_WRITING, str(path)], timeout=60)
    assert ended.returncode == -9
    assert path.read_text() == "old"


@pytest.mark.parametrize("folder", ["file/below", "file"])
def test_a_folder_that_cannot_be_is_one_clear_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / folder / "parity.json"
    with pytest.raises(
        ArtifactError, match=f"^{re.escape(str(path))} cannot be written: (Not a directory|File exists)$"
    ):
        write_artifact(path, PARITY)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root can write to")
def test_an_unwritable_folder_is_one_clear_error() -> None:
    with pytest.raises(ArtifactError, match=r"^/proc/self/parity\.json cannot be written: "):
        write_artifact(Path("/proc/self/parity.json"), PARITY)


def test_a_path_that_is_a_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be written: Is a directory"):
        write_text(tmp_path, "text")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("before", ["old", None])
def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path, before: str | None) -> None:
    target, link = tmp_path / "there" / "real.json", tmp_path / "link.json"
    link.symlink_to(target)
    if before is not None:
        write_text(target, before)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == link.read_text() == "new"


def test_a_link_that_points_to_itself_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(ArtifactError, match="cannot be written: Too many levels of symbolic links"):
        write_text(tmp_path / "link", "text")


def test_numbers_that_json_does_not_have_are_written_as_null(tmp_path: Path) -> None:
    reported = {"rate": float("nan"), "deep": [{"most": float("inf")}, 1.5]}
    write_artifact(tmp_path / "parity.json", PARITY.model_copy(update={"vectors": reported}))
    written = json.loads((tmp_path / "parity.json").read_text(), parse_constant=pytest.fail)
    assert written["vectors"] == {"rate": None, "deep": [{"most": None}, 1.5]}


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"absent\.json cannot be read: No such file or directory"):
        read_bytes(tmp_path / "absent.json")


def test_errors_of_the_schema_name_file_and_fields() -> None:
    content = {
        "model": 5,
        "max_abs_diff_jax_serial_vs_torch_serial": "0.1",
        "max_abs_diff_jax_multi_vs_torch_serial": 0,
    }
    with pytest.raises(ArtifactError) as caught:
        parse_artifact(json.dumps(content).encode(), Parity, "reports/parity.json")
    assert str(caught.value) == (
        "reports/parity.json is no Parity: model: Input should be a valid string; "
        "max_abs_diff_jax_serial_vs_torch_serial: Input should be a valid number; "
        "max_abs_diff_jax_multi_vs_torch_multi_semantic: Field required"
    )


def test_what_is_not_json_is_said_to_be_so() -> None:
    with pytest.raises(ArtifactError, match="here is no Parity: the file: Invalid JSON"):
        parse_artifact(b'{"model": "m", ', Parity, "here")


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_a_figure_is_a_finite_number(number: str) -> None:
    content = PARITY.model_dump_json().replace("0.25", number)
    with pytest.raises(ArtifactError, match="max_abs_diff_jax_serial_vs_torch_serial: Input should be a finite number"):
        parse_artifact(content.encode(), Parity, "here")


def test_the_checksum_is_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file") == hashlib.sha256(b"abc").hexdigest()
    assert sha256_of(tmp_path / "file").startswith("ba7816bf")  # the standard's own example


def test_times_are_spelled_as_the_artifacts_spell_them() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", now_utc())
