"""The pages that people write: links lead somewhere, and what the code has is what the pages name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from prefixwise.cli.serve import SECOND_SPELLINGS, SERVE_ENGINE_FLAGS, SERVER_FLAGS
from prefixwise.cluster.options import ScaleOptions
from prefixwise.contract.classify import CLASSIFY_FIELDS
from prefixwise.contract.judge import JUDGE_FIELDS
from prefixwise.contract.request import SCORE_FIELDS
from prefixwise.contract.rerank_request import rerank_fields
from prefixwise.launch.options import EngineOptions
from prefixwise.prompts.cross_encoder import NAME as PROFILE_OF_A_FOLDER
from prefixwise.prompts.profile_choice import builtin_profiles
from prefixwise.server.config import ServerOptions
from prefixwise.server.openapi_errors import ERROR_TABLE
from prefixwise.server.openapi_operations import OPERATIONS
from tests.docs.printed import blocks
from tests.server.app_client import app_client

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
HTTP_API = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
ALL_FLAGS = {**SERVE_ENGINE_FLAGS, **SERVER_FLAGS}
OPERATIONS_PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")

_CODE = re.compile(r"```.*?```", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_route_is_explained() -> None:
    named = set(re.findall(r"`(GET|POST|DELETE) (/[^`\s]*)`", HTTP_API))
    assert named == {(each.method.upper(), each.path) for each in OPERATIONS}, "see the table of docs/http-api.md"


def test_every_profile_is_in_the_table() -> None:
    page = (ROOT / "docs" / "reranking.md").read_text(encoding="utf-8")
    section = page.partition("## Profiles")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    assert named == {*builtin_profiles(), PROFILE_OF_A_FOLDER}, "see the table of docs/reranking.md"


def test_every_error_is_in_the_table() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| ([^|]+) \|", HTTP_API, re.MULTILINE)
    written = [(int(status), kind, tuple(re.findall(r"`(\w+)`", codes))) for status, kind, codes in rows]
    assert written == [(row.status, row.type, row.codes) for row in ERROR_TABLE]


# Raised in packages that a `Scorer` uses, for requests that only a server has.
_OF_SERVERS = {
    *("cancelled", "deadline_exceeded", "deadline_too_short", "queue_full", "queue_too_long"),
    *("engine_restarting", "engine_stalled", "prefix_cache_disabled", "prefix_cache_full"),
    *("empty_prompt", "empty_requests", "invalid_max_tokens", "invalid_rank_fields", "invalid_requests_type"),
    *("no_vocabulary", "too_many_requests", "unsupported_parameter"),
}


def test_every_error_of_a_scorer_is_named() -> None:
    errors = (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8").partition("## Errors")[2]
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", errors)) - {"item_index"}
    folders = ("contract", "prompts", "plan", "engine")
    sources = [path for folder in folders for path in (ROOT / "prefixwise" / folder).rglob("*.py")]
    raised = {code for path in sources for code in re.findall(r'code="(\w+)"', path.read_text(encoding="utf-8"))}
    rows = (*SCORE_FIELDS, *CLASSIFY_FIELDS, *JUDGE_FIELDS, *rerank_fields("native"))
    of_fields = {row.kind.error_code(row.name) for row in rows}
    absent = {f"{what}_{row.name}" for row in rows for what in ("missing", "empty")}
    of_options = {f"invalid_{each.name}" for each in fields(EngineOptions)} | {"invalid_on_program"}
    assert raised >= _OF_SERVERS
    assert raised - _OF_SERVERS <= named
    assert {row.kind.error_code(row.name) for row in rows if row.in_python} <= named
    assert named <= raised | of_fields | absent | of_options


def test_every_metric_is_in_the_table() -> None:
    with app_client() as client:
        shown = client.get("/metrics").text
    families = set(re.findall(r"^# TYPE (\S+)", shown, re.MULTILINE))
    names = {name for name in families if not name.endswith("_created")}
    names.add("prefixwise:process_restarts_total")  # of HTTP workers alone: `tests/server/test_workers.py`
    assert set(re.findall(r"`(prefixwise:\w+)", HTTP_API.partition("## Headers")[0])) == names


def test_queries_name_metrics_that_exist() -> None:
    with app_client() as client:
        shown = client.get("/metrics").text
    (queries,) = (block.text for block in blocks("docs/operations.md") if block.language == "promql")
    named = set(re.findall(r"prefixwise:\w+", queries))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)", shown, re.MULTILINE))
    series = {f"{name}_bucket" if kind == "histogram" else name for name, kind in kinds.items()}
    assert len(named) > 5
    assert named <= series


def test_the_cluster_page_sets_options_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    section = page.partition("### Kubernetes")[2].partition("\n## ")[0]
    engine, scale = (yaml.safe_load(text) for text in re.findall(r"`(\{.+?\})`", section))
    assert engine.keys() <= {each.name for each in fields(EngineOptions)}
    assert scale.keys() <= {each.name for each in fields(ScaleOptions)}
    (worker,) = (yaml.safe_load(block.text) for block in blocks("docs/scaling.md") if block.language == "yaml")
    assert worker["spec"]["containers"]


def flag_names() -> set[str]:
    """Of the server. A switch may have a name for on and one for off."""
    spelled = (flag.name or f"--{field.replace('_', '-')}" for field, flag in ALL_FLAGS.items())
    return {name for each in spelled for name in each.split("/")}


def test_the_flags_of_the_migration_page_are_accepted_as_it_says() -> None:
    """Each flag of SGLang and of the earlier system that has a row is ours, or in the table of theirs."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    of_sglang = page.partition("## SGLang")[2].partition("## vLLM")[0]
    table = (ROOT / "prefixwise" / "cli" / "sglang_flags.toml").read_text(encoding="utf-8")
    known = set(re.findall(r"--[a-z][a-z0-9-]*", table)) | {"--trust-remote-code", "--revision"}
    known |= flag_names() | set(SECOND_SPELLINGS) | {name for flag in ALL_FLAGS.values() for name in flag.other_names}
    named = set(re.findall(r"`(--[a-z][a-z0-9-]*)[ `]", of_sglang))
    assert len(named) > 40
    assert named <= known


def test_every_flag_of_the_server_is_explained() -> None:
    ours = {each.name for options in (EngineOptions, ServerOptions) for each in fields(options)}
    assert ALL_FLAGS.keys() <= ours
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", OPERATIONS_PAGE))
    assert named >= flag_names() | SECOND_SPELLINGS.keys() | {"--trust-remote-code"}
