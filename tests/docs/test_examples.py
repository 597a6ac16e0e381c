"""Every block of README and of the pages below is run, and prints what the page prints.

Scores are those of the embedded model in float32, to the last digit that is printed. Every CPU agrees on these digits.
In bfloat16, the default where the processor has units for it, some differ; the pages say so.
"""

from __future__ import annotations

import io
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

import prefixwise
from prefixwise.backends.fake import FakeBackend
from prefixwise.cli.main import app
from prefixwise.contract.classify import parse_classify_request
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.launch.loading import OnProgram, load_engine
from prefixwise.launch.options import EngineOptions
from prefixwise.prompts.profile import parse_profile
from prefixwise.prompts.profile_choice import profile_of_any_model
from prefixwise.server.config import ServerOptions
from prefixwise.server.openapi import openapi_document
from prefixwise.server.service import Service
from tests.docs.printed import ROOT, Block, Step, assert_agrees, assert_prints, blocks, printed_json, steps
from tests.prompts.reranker_tokenizers import LLAMA_GUARD
from tests.server.app_client import AppClient, app_client

EXAMPLE_OPTIONS = EngineOptions(dtype="float32")
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("quickstart", "reranking", "scoring", "batch", "http-api", "migrating")),
)
# Pages whose code is one program, with what it prints below each block.
PROGRAMS = [
    str(path.relative_to(ROOT))
    for folder in ("tutorials", "explanation")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    if blocks(str(path.relative_to(ROOT)))
]
BLOCKS = [block for page in PAGES for block in blocks(page)]
ADDRESSES = ("$URL", "http://127.0.0.1:30000")
OF_THE_MACHINE = ("/server_info", "/v1/prefix")  # their values; a fake model shows the names
TIMED = re.compile(r" in \d+\.\d\d s|items/s")  # what a line on stderr has that says how long something took


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


@pytest.fixture(scope="module")
def fake_server() -> Iterator[AppClient]:
    with app_client() as client:
        yield client


class InProcess(httpx.BaseTransport):
    """Requests of a `Client` to the server of the examples, without a socket."""

    def __init__(self, server: AppClient) -> None:
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        found = self._server.request(
            request.method, request.url.path, content=request.read(), headers=dict(request.headers)
        )
        return httpx.Response(found.status_code, headers=found.headers, content=found.content)


@pytest.fixture
def shared_engine(
    engine: ScoringEngine, server: AppClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ScoringEngine:
    """Whatever opens a model or a server in an example gets this one; the folder is the example's own."""

    def open_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
        assert options.dtype == "float32", "an example that prints scores names its dtype"
        return engine

    monkeypatch.setattr(engine, "close", lambda: None)  # other examples use it, too
    monkeypatch.setattr("prefixwise.cli.run_request.open_engine", open_engine)
    monkeypatch.setattr("prefixwise.batch.worker.open_engine", open_engine)
    monkeypatch.setattr("prefixwise.scorer.load_engine", lambda options, on_program: engine)
    monkeypatch.setattr("httpx.Client", partial(httpx.Client, transport=InProcess(server)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return engine


class Shell:
    """Runs the commands of one block, one after the other."""

    def __init__(self, server: AppClient, fake_server: AppClient) -> None:
        self._server, self._fake_server = server, fake_server
        self._ids: dict[str, str] = {}  # of prefixes: as printed, and as the server made it

    def run(self, step: Step) -> None:
        program, *args = shlex.split(step.command)
        if program == "curl":
            self._curl(args, step.output)
        elif program == "cat":
            self._cat(Path(args[0]), step.output)
        else:
            assert program == ".venv/bin/prefixwise", step.command
            self._prefixwise(args, step.output)

    def _cat(self, path: Path, content: str) -> None:
        """The first time a page shows a file it is the example's input; one that an example has written is compared."""
        if not path.exists():
            path.write_text(content + "\n", encoding="utf-8")
            return
        found, printed = path.read_text(encoding="utf-8").splitlines(), content.splitlines()
        for one, other in zip(found, printed, strict=True):
            assert_agrees(json.loads(one), printed_json(other).value, str(path))

    def _prefixwise(self, args: list[str], output: str) -> None:
        ran = CliRunner().invoke(app, args, catch_exceptions=False)
        notes = [line for line in ran.stderr.splitlines() if not TIMED.search(line)]
        assert ran.exit_code == 0, ran.stderr
        assert_prints("\n".join([*ran.stdout.splitlines(), *notes]), output)

    def _curl(self, args: list[str], output: str) -> None:
        call = dict(zip(args, [*args[1:], ""], strict=True))  # every word with the one behind it
        path = next(arg.removeprefix(each) for arg in args for each in ADDRESSES if arg.startswith(each))
        for shown, made in self._ids.items():
            path = path.replace(shown, made)
        is_of_machine = any(path.startswith(each) for each in OF_THE_MACHINE)
        body, method = call.get("-d"), call.get("-X") or ("POST" if "-d" in call else "GET")
        headers = dict([call["-H"].split(": ")]) if "-H" in call else {}
        client = self._fake_server if is_of_machine else self._server
        response = client.request(method, path, content=body, headers=headers)
        if "-i" in call:
            name, _, value = output.partition(": ")
            assert response.headers[name] == value
            return
        found, printed = response.json(), printed_json(output)
        if path == "/v1/prefix" and method == "POST":
            self._ids[printed.value["id"]] = found["id"]
        assert_agrees(found, printed.value, is_whole=printed.is_whole, values=not is_of_machine)


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "console"], ids=str)
def test_commands_print_what_is_printed(
    block: Block, server: AppClient, fake_server: AppClient, shared_engine: ScoringEngine
) -> None:
    shell = Shell(server, fake_server)
    for step in steps(block.text):
        shell.run(step)


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "python"], ids=str)
@pytest.mark.filterwarnings("ignore::prefixwise.PrefixwiseWarning")
def test_python_runs(block: Block, shared_engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: getattr(prefixwise, name) for name in prefixwise.__all__}  # as the block above it has imported them
    if "path/to/classifier" in block.text:
        monkeypatch.setattr("prefixwise.scorer.load_engine", lambda options, on_program: classifier(shared_engine))
    if "Llama-Guard" in block.text:
        monkeypatch.setattr("prefixwise.scorer.load_engine", lambda options, on_program: guard(shared_engine))
    if "query_embed_overrides" in block.text:
        names |= override_inputs(shared_engine)
    exec(compile(block.text, str(block), "exec"), names)


def classifier(embedded: ScoringEngine) -> ScoringEngine:
    """The embedded model is none: its tokenizer, and three classes by arithmetic."""
    backend = FakeBackend(embedded.backend.config.vocab_size)
    backend.config = replace(backend.config, num_classes=3)
    return ScoringEngine(EngineConfig("classifier"), Scheduler(backend, SchedulerOptions()), embedded.tokenizer)


def guard(embedded: ScoringEngine) -> ScoringEngine:
    """The embedded model's tokenizer with a guard's chat template, and answers by arithmetic."""
    backend = FakeBackend(embedded.backend.config.vocab_size)
    tokenizer = copy(embedded.tokenizer)
    assert tokenizer is not None
    tokenizer.chat_template = LLAMA_GUARD.format(end="<|end_header_id|>")
    config = EngineConfig("guard", profiles=replace(profile_of_any_model(), guard="llama-guard"))
    return ScoringEngine(config, Scheduler(backend, SchedulerOptions()), tokenizer)


def override_inputs(engine: ScoringEngine) -> dict[str, Any]:
    """The names that the example takes as given: a query and two items, the first with a placeholder each."""
    size = engine.backend.config.model_size
    return {
        "scorer": prefixwise.Scorer(dtype="float32"),
        "query_ids": [5, 9],
        "item_ids": [[6, 9], [7]],
        "query_vectors": np.zeros((1, size), np.float32),
        "vectors_0": np.ones((1, size), np.float32),
    }


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: Path(page).stem)
@pytest.mark.filterwarnings("ignore::prefixwise.PrefixwiseWarning")
def test_the_code_of_a_page_prints_what_is_printed(page: str, shared_engine: ScoringEngine) -> None:
    found = blocks(page)
    assert {each.language for each in found} == {"python", "text"}
    code, printed = ("".join(each.text for each in found if each.language == kind) for kind in ("python", "text"))
    with redirect_stdout(io.StringIO()) as output:
        exec(compile(code, page, "exec"), {})
    assert_prints(output.getvalue(), printed)


def test_the_demo_prints_what_is_printed(shared_engine: ScoringEngine) -> None:
    (printed,) = (block.text for block in blocks("docs/quickstart.md") if block.text.startswith("1. "))
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(ROOT / "example.py"))
    assert_prints(output.getvalue(), printed)


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "toml"], ids=str)
def test_a_profile_is_valid(block: Block) -> None:
    assert parse_profile(tomllib.loads(block.text), str(block)).name == "mine"


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "json"], ids=str)
def test_bodies_are_those_of_the_api(block: Block, server: AppClient) -> None:
    """Requests are parsed; of responses that no embedded model can give, the names are compared."""
    body = printed_json(block.text).value
    plain = json.loads(block.text)
    if "items" in body:
        parse_score_request(plain)
    elif "input" in body:
        parse_classify_request(plain)
    elif "algorithm" in body:
        request = {"query": [1] * 328, "items": [[4, 5]], "label_token_ids": [7], "return_debug": True}
        debug = server.post("/v1/score", request).json()["debug"]
        assert_agrees(debug, body, "debug", is_whole=False, values=False)
    else:
        schemas = openapi_document()["components"]["schemas"]
        assert body.keys() <= schemas["ClassifyResponse"]["properties"].keys()


def test_there_is_a_test_for_every_kind_of_block() -> None:
    texts = [block for block in BLOCKS if block.language == "text"]
    assert {block.language for block in BLOCKS} == {"console", "python", "text", "toml", "json"}
    assert [block.page for block in texts] == ["docs/quickstart.md", "docs/migrating.md"]


def test_numbers_are_held_to_the_digits_that_are_printed() -> None:
    assert_prints("score 0.95104 of 3", "score 0.9510  of 3")
    for printed in ("score 0.9511 of 3", "score 0.9509 of 3", "score 0.9510 of 4"):
        with pytest.raises(AssertionError):
            assert_prints("score 0.95104 of 3", printed)


def test_names_that_are_left_out_are_shown_as_dots() -> None:
    printed = printed_json('{"a":1.50, ...\n "c":"labels[0] ..."}')
    found: dict[str, Any] = {"a": 1.501, "b": 2, "c": "labels[0] must be one token"}
    assert_agrees(found, printed.value, is_whole=printed.is_whole)
    for other in ({**found, "a": 1.51}, {**found, "c": "labels[1] must be"}, {"a": 1.5}):
        with pytest.raises(AssertionError):
            assert_agrees(other, printed.value, is_whole=printed.is_whole)
