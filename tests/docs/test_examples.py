"""Scores that README and docs print are those of the embedded model in float32, to the last digit that is printed.

Every CPU agrees on these digits. In bfloat16, the default where the processor has units for it, some differ.
"""

from __future__ import annotations

import io
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefixwise.cli.main import app
from prefixwise.engine.engine import ScoringEngine
from prefixwise.launch.loading import OnProgram, load_engine
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions
from prefixwise.server.service import Service
from tests.server.app_client import AppClient

ROOT = Path(__file__).parents[2]
EXAMPLE_OPTIONS = EngineOptions(dtype="float32")
PAGES = ("README.md", "docs/quickstart.md", "docs/http-api.md", "docs/reranking.md", "docs/migrating.md")
_BLOCK = re.compile(r"```(?:console|text)\n(.*?)```", re.DOTALL)
_CURL = re.compile(
    r"\$ curl -s (?:\$URL|http://127\.0\.0\.1:30000)(/(?:v1/)?(?:score|rerank|generative_scoring)) -d '(.*?)'\n(.*)",
    re.DOTALL,
)
_NUMBER = re.compile(r"\d+\.\d+")
NOT_SHOWN = {"id", "created"}  # of a request, another each time


def blocks(page: str) -> list[str]:
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def printed_requests() -> list[Any]:
    """Route, body and printed answer of every request to score or rerank."""
    found = [(page, _CURL.match(block)) for page in PAGES for block in blocks(page)]
    return [
        pytest.param(*match.groups(), id=f"{page}-{number}")
        for number, (page, match) in enumerate(found)
        if match is not None and not match[3].startswith('{"error"')
    ]


def assert_agrees(found: Any, printed: Any, path: str = "answer") -> None:
    """`printed` has its numbers as they are written."""
    if isinstance(printed, dict):
        assert found.keys() == printed.keys(), path
        for key in printed.keys() - NOT_SHOWN:
            assert_agrees(found[key], printed[key], f"{path}.{key}")
    elif isinstance(printed, list):
        assert len(found) == len(printed), path
        for number, (one, other) in enumerate(zip(found, printed, strict=True)):
            assert_agrees(one, other, f"{path}[{number}]")
    elif isinstance(printed, PrintedNumber):
        assert abs(found - float(printed)) <= printed.half_of_last_digit, f"{path}: {found} is printed as {printed}"
    else:
        assert found == printed, path


class PrintedNumber(str):
    """A number with a decimal point, digit by digit."""

    @property
    def half_of_last_digit(self) -> float:
        mantissa, _, exponent = self.lower().partition("e")
        return 0.501 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def assert_prints(found: str, printed: str) -> None:
    """The same text, and its numbers to the last digit that is printed."""
    assert _NUMBER.sub("#", found).split() == _NUMBER.sub("#", printed).split()
    for one, other in zip(_NUMBER.findall(found), _NUMBER.findall(printed), strict=True):
        assert_agrees(float(one), PrintedNumber(other))


@pytest.fixture(scope="module")
def engine() -> Iterator[ScoringEngine]:
    """One for all examples. Each is its first request: without a KV cache none finds the prefix of another."""
    with closing(load_engine(replace(EXAMPLE_OPTIONS, device="cpu", prefix_cache=False))) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(engine: ScoringEngine) -> Iterator[AppClient]:
    service = Service(ServerOptions())
    service.open(engine)
    yield AppClient(service)
    service.close()


@pytest.mark.parametrize(("route", "body", "answer"), printed_requests())
def test_requests_get_the_answers_that_are_printed(server: AppClient, route: str, body: str, answer: str) -> None:
    one_line = re.sub(r"\n\s*", " ", answer) if '"warnings"' in answer else answer  # a long warning is broken, too
    found = server.post(route, json.loads(body)).json()
    assert_agrees(found, json.loads(one_line, parse_float=PrintedNumber))


def test_the_demo_prints_what_is_printed(demo: str) -> None:
    (printed,) = (block for block in blocks("docs/quickstart.md") if block.startswith("1. "))
    assert_prints(demo, printed)


@pytest.fixture(scope="module")
def demo() -> str:
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(ROOT / "example.py"))
    return output.getvalue()


@pytest.mark.parametrize(("page", "verb"), [("docs/quickstart.md", "score"), ("docs/reranking.md", "rerank")])
def test_commands_print_what_is_printed(
    page: str, verb: str, engine: ScoringEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_engine(options: EngineOptions, on_program: OnProgram | None) -> ScoringEngine:
        assert options == EXAMPLE_OPTIONS
        return engine

    monkeypatch.setattr("prefixwise.cli.run_request.open_engine", open_engine)
    monkeypatch.setattr(engine, "close", lambda: None)  # other examples use it, too
    (block,) = (block for block in blocks(page) if f"$ .venv/bin/prefixwise {verb} " in block)
    files, _, rest = block.partition(f"$ .venv/bin/prefixwise {verb} ")
    (tmp_path / "docs.txt").write_text(files.partition("\n")[2], encoding="utf-8")
    lines = rest.replace("\\\n", " ").splitlines()
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, [verb, *shlex.split(lines[0])], catch_exceptions=False)
    assert ran.exit_code == 0
    assert_prints(ran.stdout, "\n".join(line for line in lines[1:] if not line.startswith("warning: ")))


def test_numbers_are_held_to_the_digits_that_are_printed() -> None:
    assert_prints("score 0.95104 of 3", "score 0.9510  of 3")
    for printed in ("score 0.9511 of 3", "score 0.9509 of 3", "score 0.9510 of 4"):
        with pytest.raises(AssertionError):
            assert_prints("score 0.95104 of 3", printed)
