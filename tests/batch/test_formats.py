from __future__ import annotations

import pytest

from prefixwise.batch.formats import FileFormat, input_format, output_format
from prefixwise.contract.errors import BatchError


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.jsonl", "jsonl"), ("a.ndjson.gz", "jsonl"), ("A.CSV", "csv"), ("a.csv.gz", "csv"), ("a.b.parquet", "parquet")],
)
def test_the_name_says_the_format(name: str, expected: FileFormat) -> None:
    assert input_format(name, None) == expected


def test_what_is_asked_for_comes_before_the_name() -> None:
    assert input_format("a.txt", "csv") == "csv"
    assert output_format("a.txt", "parquet") == "parquet"


@pytest.mark.parametrize("name", ["a.txt", "a", "jsonl", "a.parquet.gz"])
def test_other_names_are_refused_for_input(name: str) -> None:
    with pytest.raises(BatchError, match=name):
        input_format(name, None)


@pytest.mark.parametrize("name", ["a.txt", "a", "a.jsonl.gz"])
def test_other_names_are_refused_for_output(name: str) -> None:
    with pytest.raises(BatchError, match=r"expected a name that ends in \.jsonl, "):
        output_format(name, None)
