"""The page and the types that are written from the OpenAPI document are those of the API as it is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from prefixwise.server.openapi_operations import OPERATIONS
from prefixwise.server.openapi_schemas import SCHEMAS

DOCS = Path(__file__).parents[2] / "docs"
FILES: dict[str, str] = runpy.run_path(str(DOCS / "write_api_reference.py"))["files"]()


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_make_docs_would_write(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == FILES[name], "run `make docs`"


def test_every_operation_and_every_body_is_there() -> None:
    headings = re.findall(r"^### `?([^`\n]+)", FILES["http-reference.md"], re.MULTILINE)
    operations = [f"{each.method.upper()} {each.path}" for each in OPERATIONS]
    assert sorted(headings) == sorted([*operations, *SCHEMAS])
    declared = re.findall(r"^export type (\w+) =", FILES["prefixwise.d.ts"], re.MULTILINE)
    assert declared == list(SCHEMAS)
