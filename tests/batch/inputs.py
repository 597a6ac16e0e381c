"""Rows for tests, and files of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefixwise.batch.formats import input_format
from prefixwise.batch.parts import InputFile
from prefixwise.batch.storage import find_files


def row(number: int, *, num_queries: int = 7, **fields: Any) -> dict[str, Any]:
    """Any two differ; queries come again, in no order."""
    query = random.Random(number).randrange(num_queries)
    return {"id": f"row-{number}", "query": f"q{query}? ", "items": [f"i{number}", f"x{number}"], **fields}


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [row(number, **fields) for number in range(count)]


def write_jsonl(path: Path, bodies: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def found(path: Path) -> InputFile:
    (file,) = find_files(str(path))
    return InputFile(file.url, file.name, input_format(file.name, None), file.size, file.version)
