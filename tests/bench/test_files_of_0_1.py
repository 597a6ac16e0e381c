"""Files that prefixwise 0.1.0 wrote are read, checked and reported; the table of docs/artifacts.md says since when.

`tests/fixtures/artifacts-0.1.0.json` has a file of every kind of 0.1.0 by its name, as the code of 0.1.0 wrote it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prefixwise import __version__
from prefixwise.batch.manifest import Manifest, check_same_job
from prefixwise.bench.files import read_artifact, write_artifact
from prefixwise.bench.kinds.registry import KINDS, MODELED_KINDS, ArtifactKind, kind_named
from prefixwise.bench.run.check import check_file
from prefixwise.contract.errors import BatchError

ROOT = Path(__file__).parents[2]
WRITTEN: dict[str, Any] = json.loads((ROOT / "tests" / "fixtures" / "artifacts-0.1.0.json").read_text("utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, document in WRITTEN.items():
        (tmp_path / name).write_text(json.dumps(document))
    return tmp_path


def kind_of(path: Path) -> ArtifactKind:
    report = check_file(path, is_artifact=True)
    assert report.kind is not None and report.is_valid, (path.name, report.errors)
    return kind_named(report.kind)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_of_0_1_is_valid_shown_and_written_in_the_present_shape(folder: Path, name: str) -> None:
    kind = kind_of(folder / name)
    assert kind.model is not None
    artifact = read_artifact(folder / name, kind.model)
    if kind.report_of_path is not None:
        assert kind.report_of_path(folder / name).title
    elif kind.report is not None:
        assert kind.report(artifact, name).title
    if kind.name != "comparison":  # `bench compare` makes one anew; nothing reads and writes it
        write_artifact(folder / name, artifact)
        assert kind_of(folder / name) == kind


def test_the_table_has_every_kind_its_version_and_the_release_that_wrote_it_first(folder: Path) -> None:
    of_0_1 = {kind_of(folder / name).name for name in WRITTEN}
    page = (ROOT / "docs" / "artifacts.md").read_text("utf-8").partition("## Versions")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (\S+) \| ([\d.]+) \| (.+) \|$", page, re.MULTILINE)
    wanted = [
        (
            kind.name,
            f"`{kind.schema_version}`" if kind.schema_version else "none",
            "0.1.0" if kind.name in of_0_1 else "0.2.0",
        )
        for kind in MODELED_KINDS
    ]
    assert [row[:3] for row in rows] == wanted
    assert all(row[3] == ("yes" if row[0] in of_0_1 else "\u2013") for row in rows)
    assert len(of_0_1) == 14 and len(KINDS) > len(of_0_1)


def test_a_batch_job_of_0_1_is_recognised_and_its_rest_is_not_mixed_with_new_scores() -> None:
    content = b'{"format": 1, "options": {"prefixwise": "0.1.0", "id_field": "id"}, "files": [], "parts": []}'
    begun = Manifest.from_json(content, "out.parts/manifest.json")
    asked = Manifest((), {"prefixwise": __version__, "id_field": "id"})
    with pytest.raises(BatchError, match=f'prefixwise was "0.1.0", got "{__version__}"'):
        check_same_job(begun, asked)
