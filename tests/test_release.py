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


def pins() -> dict[str, str]:
    """The versions of constraints.txt that apply to this Python on this machine."""
    requirements = pytest.importorskip("packaging.requirements")
    rows = [row for row in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if row and row[0] != "#"]
    parsed = [requirements.Requirement(row) for row in rows]
    kept = [each for each in parsed if each.marker is None or each.marker.evaluate()]
    assert len({each.name for each in kept}) == len(kept)
    return {each.name: str(each.specifier).removeprefix("==") for each in kept}


def test_the_constraints_hold_every_package_that_we_name_within_its_bounds() -> None:
    import tomllib

    pytest.importorskip("nox")
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    from noxfile import LOCKED

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(row for name in (*LOCKED, "batch", "docs", "test") for row in extras[name])]
    locked = pins()
    for row in map(Requirement, named):
        if row.name != "prefixwise" and (row.marker is None or row.marker.evaluate()):
            assert row.specifier.contains(locked[canonicalize_name(row.name)]), row
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "CONSTRAINTS ?= constraints.txt" in makefile
    assert "--constraint ,$(CONSTRAINTS)" in makefile and "-m pip install" not in makefile


def test_a_package_has_markers_only_where_its_versions_differ() -> None:
    pytest.importorskip("nox")
    from noxfile import without_markers

    locked = "a==1 ; python_version < '3.14'\nb==1 ; python_version < '3.12'\nb==2 ; python_version >= '3.12'\n"
    kept = without_markers(locked).splitlines()[1:]
    assert kept == ["a==1", "b==1 ; python_version < '3.12'", "b==2 ; python_version >= '3.12'"]


def test_the_changelog_begins_with_this_version() -> None:
    from prefixwise import __version__

    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert sections[0] == __version__ and sections == sorted(sections, reverse=True)


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
