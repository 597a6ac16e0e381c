"""The documentation site: it builds without a warning, which every broken link and every page outside the menu is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import prefixwise

pytest.importorskip("material", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]


def test_it_builds_strictly_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    explained = {each.rpartition(".")[2] for each in re.findall(r'id="(prefixwise\.[\w.]+)"', reference)}
    assert explained >= {"score", "rerank", *prefixwise.__all__} - {"__version__"}
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 10_000
    assert (tmp_path / "prefixwise.d.ts").is_file()
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'data-md-color-scheme="slate"' in start, "dark mode"
    assert '"provider": "mike"' in start, "the menu of versions"
    pages = list(tmp_path.rglob("index.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(r'<(?:script|img)[^>]* src="(https?:[^"]*)"', page.read_text(encoding="utf-8"))
        assert loaded == [], page
