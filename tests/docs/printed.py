"""The examples that pages print: their blocks, the steps of a shell block, and how an answer is compared with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+")
_LEFT_OUT = re.compile(r",\s*\.\.\.\s*(?=[}\]])|(?<=,)\s*\.\.\.(?=\s*\n)")  # at the end of an object, or within it
NOT_COMPARED = {"id", "created", "milliseconds"}  # of a request or a machine, another each time


class Block(NamedTuple):
    """One fenced block of a page."""

    page: str
    number: int  # on its page, from 0
    language: str
    text: str

    def __str__(self) -> str:
        return f"{Path(self.page).stem}-{self.number}-{self.language}"


class Step(NamedTuple):
    """A command of a shell block, and the lines that are printed below it."""

    command: str
    output: str


def blocks(page: str) -> list[Block]:
    found = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [Block(page, number, language, text) for number, (language, text) in enumerate(found)]


def steps(text: str) -> Iterator[Step]:
    """A command ends with its line, or where its quotes and its backslashes end."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        end = 1
        while lines[end - 1].endswith("\\") or "\n".join(lines[:end]).count("'") % 2:
            end += 1
        yield Step("\n".join(lines[:end]).replace("\\\n", " "), "\n".join(lines[end:]))


class PrintedNumber(str):
    """A number with a decimal point, digit by digit."""

    @property
    def half_of_last_digit(self) -> float:
        mantissa, _, exponent = self.lower().partition("e")
        return 0.501 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


class PrintedJson(NamedTuple):
    """JSON whose numbers are as they are written."""

    value: Any
    is_whole: bool  # else some names were left out, as "..."


def printed_json(text: str) -> PrintedJson:
    """A page may break a line within a long text, too."""
    whole = _LEFT_OUT.sub("", text)
    for each in (whole, re.sub(r"\n\s*", " ", whole)):
        try:
            return PrintedJson(json.loads(each, parse_float=PrintedNumber), whole == text)
        except ValueError as error:
            last = error
    raise AssertionError(f"this is no JSON ({last}):\n{text}")


def assert_agrees(
    found: Any, printed: Any, path: str = "answer", *, is_whole: bool = True, values: bool = True
) -> None:
    """`printed` has its numbers as they are written; texts may end in "...". `values` is False: compare names alone."""
    if isinstance(printed, dict):
        names = found.keys() & printed.keys() if not is_whole else found.keys()
        assert names == printed.keys(), path
        for key in printed.keys() - NOT_COMPARED:
            assert_agrees(found[key], printed[key], f"{path}.{key}", is_whole=is_whole, values=values)
    elif isinstance(printed, list):
        assert len(found) == len(printed) or not values, path
        for number, (one, other) in enumerate(zip(found, printed, strict=values)):
            assert_agrees(one, other, f"{path}[{number}]", is_whole=is_whole, values=values)
    elif values and isinstance(printed, PrintedNumber):
        assert abs(found - float(printed)) <= printed.half_of_last_digit, f"{path}: {found} is printed as {printed}"
    elif values and isinstance(printed, str) and printed.endswith("..."):
        assert found.startswith(printed.removesuffix("...")), path
    else:
        assert not values or found == printed, path


def assert_prints(found: str, printed: str) -> None:
    """The same text, and its numbers to the last digit that is printed."""
    assert _NUMBER.sub("#", found).split() == _NUMBER.sub("#", printed).split()
    for one, other in zip(_NUMBER.findall(found), _NUMBER.findall(printed), strict=True):
        assert_agrees(float(one), PrintedNumber(other))
