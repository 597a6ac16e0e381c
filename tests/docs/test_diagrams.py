"""The diagrams of docs/explanation are what the package plans and schedules, and what the pages print."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT: dict[str, Any] = runpy.run_path(str(DOCS / "draw_diagrams.py"))
DIAGRAMS: dict[str, str] = SCRIPT["diagrams"]()


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_what_make_docs_would_draw(name: str) -> None:
    assert (DOCS / "explanation" / name).read_text(encoding="utf-8") == DIAGRAMS[name], "run `make docs`"
    assert ElementTree.fromstring(DIAGRAMS[name]).tag.endswith("svg")


def test_every_diagram_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "explanation").glob("*.md"))
    assert all(f"]({name})" in pages for name in DIAGRAMS)
    assert {path.name for path in (DOCS / "explanation").glob("*.svg")} == DIAGRAMS.keys()


def test_no_item_of_the_mask_sees_another() -> None:
    batch = SCRIPT["packed_batch"]()
    pairs, starts = SCRIPT["visible_pairs"](batch), batch.segment_starts.tolist()
    for start, stop in pairwise(starts[1:]):
        assert (pairs[start:stop, : starts[1]] == 1).all()
        assert not pairs[start:stop, starts[1] : start].any()
        assert not pairs[start:stop, stop:].any()


def test_the_steps_are_as_the_page_says() -> None:
    """All requests are served in the step after they arrive, and the small ones are done in it."""
    steps = [{name: sum(tokens) for name, tokens in step.items()} for step in SCRIPT["steps_of_requests"]()]
    assert list(steps[2]) == ["large", "small 1", "small 2"]
    assert steps[2]["small 1"] == steps[2]["small 2"] == 60 + 120
    assert 256 < steps[3]["medium"] <= 512
    assert "small 1" not in steps[3]
    assert all(900 < sum(step.values()) <= 1024 for step in steps[:4])


def test_only_serial_computes_the_query_with_every_item() -> None:
    tokens = SCRIPT["tokens_of_plans"](500)
    assert tokens["serial"] == 500 * (2000 + 20)
    assert tokens["prefill_extend"] == 2000 + 500 * 20
    assert tokens["prefill_extend"] <= tokens["packed"] < 2 * tokens["prefill_extend"]
