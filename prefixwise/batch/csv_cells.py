"""A CSV row as the body of a request: text where the field is text, JSON where it is not.

    query,item,id          one pair
    query,items,labels     items and labels are JSON lists

An empty cell is no value, except in the query and the item.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import dataclass
from typing import IO

from prefixwise.batch.parts import MAX_ROW_BYTES
from prefixwise.batch.records import BYTE_ORDER_MARK, records
from prefixwise.contract.describe import quote
from prefixwise.contract.errors import BatchError, InvalidRequestError

_ITEM = "item"  # makes a row of one pair
_MAY_BE_EMPTY = ("query", _ITEM)
_JSON_FIELDS = frozenset(
    (
        *("items", "labels", "label_token_ids", "apply_softmax", "item_first", "max_tokens_per_item"),
        *("documents", "top_n", "max_tokens_per_doc", "max_chunks_per_doc", "truncate", "priority"),
        *("return_debug", "debug_top_k"),
    )
)


@dataclass(frozen=True)
class CsvColumns:
    """The names in a file's first row."""

    names: tuple[str, ...]

    def body(self, record: bytes) -> dict[str, object]:
        """Raises invalid_csv for a row of another shape, invalid_FIELD_json for a cell that is not JSON."""
        cells = parse_record(record)
        if len(cells) != len(self.names):
            message = f"a row must have {len(self.names)} cells as the first one has, got {len(cells)}"
            raise InvalidRequestError(message, code="invalid_csv")
        named = zip(self.names, cells, strict=True)
        body = {name: _value(name, cell) for name, cell in named if cell or name in _MAY_BE_EMPTY}
        return _with_item_as_items(body)


def read_header(file: IO[bytes], url: str) -> CsvColumns:
    """From the file's beginning. Raises BatchError where it names no columns, or one twice."""
    file.seek(0)
    header = next((each for each in records(file, quoted=True) if not each.is_blank), None)
    if header is None:
        raise BatchError(f"{url}: expected the names of columns in its first row, got an empty file")
    file.seek(header.start)
    content = file.read(min(header.stop - header.start, MAX_ROW_BYTES))
    try:
        names = tuple(name.strip() for name in parse_record(content.removeprefix(BYTE_ORDER_MARK)))
    except InvalidRequestError as error:
        raise BatchError(f"{url}: the names of its columns: {error.message}") from None
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise BatchError(f"{url}: expected every column once, got {quote(twice[0])} more than once")
    return CsvColumns(names)


def parse_record(record: bytes) -> list[str]:
    """The cells of one row. Raises invalid_csv, also where it is more than one row.

    Bytes that are not UTF-8 become surrogates, which no request takes.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # the module's own limit is 131,072 characters
    text = record.decode("utf-8", "surrogateescape")
    try:
        found = [cells for cells in csv.reader(io.StringIO(text, newline=""), strict=True) if cells]
    except csv.Error as error:
        raise InvalidRequestError(f"a row must be CSV, got {quote(text)}: {error}", code="invalid_csv") from None
    if len(found) > 1:
        got = f"{len(found)} in {quote(text)}; lines must end with \\n or \\r\\n, not with \\r alone"
        message = f"a row must be one row of CSV, got {got}"
        raise InvalidRequestError(message, code="invalid_csv")
    return found[0] if found else []


def _value(name: str, cell: str) -> object:
    if name not in _JSON_FIELDS:
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        message = f"{name} must be JSON in a CSV file, got {quote(cell)}: {error}"
        raise InvalidRequestError(message, code="invalid_json", param=name) from None


def _with_item_as_items(body: dict[str, object]) -> dict[str, object]:
    if _ITEM not in body:
        return body
    if "items" in body:
        message = "item and items exclude each other: expected one of them, got both"
        raise InvalidRequestError(message, code="conflicting_parameters", param="items")
    return {**{name: value for name, value in body.items() if name != _ITEM}, "items": [body[_ITEM]]}
