"""What a release rests on: workflows whose steps are make targets, and a source archive that is the same every time."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    return found


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "nightly", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_is_a_make_target_or_a_named_action(path: Path) -> None:
    for job in jobs(path).values():
        for step in job["steps"]:
            if "run" in step:
                assert re.fullmatch(r"make [a-z-]+", step["run"]), step
                assert step["run"].removeprefix("make ") in TARGETS
            else:
                assert re.fullmatch(r"(actions|pypa)/[a-z-]+@\S+", step["uses"]), step


def test_tests_run_on_both_processors_and_on_every_python_of_the_metadata() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    matrix = jobs(ROOT / ".github" / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]
    assert matrix["python"] == named
    assert any(each.endswith("-arm") for each in matrix["runner"]) and len(matrix["runner"]) == 2


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text("utf-8"))["permissions"] == {"contents": "read"}
        for name, job in jobs(path).items():
            assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {})


def test_a_source_archive_has_no_time_and_no_owner_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("nox")
    from noxfile import normalise

    contents = []
    for number, names in enumerate((("a.py", "b.py"), ("b.py", "a.py"))):
        archive = tmp_path / f"{number}.tar.gz"
        with tarfile.open(archive, "w:gz") as made:
            for name in names:
                source = tmp_path / f"{number}-{name}"
                source.write_text(f"# {name}\n")
                made.add(source, arcname=f"project/{name}")
        normalise(archive, 1_700_000_000)
        contents.append(archive.read_bytes())
        with tarfile.open(archive) as read:
            assert [each.name for each in read.getmembers()] == ["project/a.py", "project/b.py"]
            assert {(each.mtime, each.uid, each.uname) for each in read.getmembers()} == {(1_700_000_000, 0, "")}
    assert contents[0] == contents[1]
