"""Prometheus, its adapter and Grafana: every name in a query is one that the server exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.deploy import DEPLOY, read_yaml, serve_parameters
from tests.server.app_client import IDS_REQUEST, app_client
from tests.server.server_process import server_process

promql_parser = pytest.importorskip("promql_parser")

Answer = TypeVar("Answer")

MONITORING = DEPLOY / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text("utf-8"))
# Not the server's: labels of scraping, and of histograms.
OTHER_LABELS = {"instance", "job", "namespace", "pod", "le"}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
# What happens rarely has no sample before it happens; prefixwise/server/metrics.py has the labels.
RARE_LABELS = {"prefixwise:requests_refused_total": {"code"}, "prefixwise:connections_refused_total": {"reason"}}


def queries() -> Iterator[tuple[str, str]]:
    """Title and PromQL of everything that asks Prometheus, without the variables of Grafana and the adapter."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")
            yield panel["title"], re.sub(r"\$\w+", ".*", expression)
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"])
            assert found is not None
            yield variable["name"], f"sum by ({found[2]}) ({found[1]})"
    yield "adapter", adapter_query()
    yield "adapter's series", re.sub(r",(namespace|pod)!=\"\"", "", adapter_rule()["seriesQuery"])


def adapter_rule() -> dict[str, Any]:
    (rule,) = read_yaml(MONITORING / "prometheus-adapter.yaml")["rules"]["custom"]
    found: dict[str, Any] = rule
    return found


def adapter_query(group_by: str = "pod", matchers: str = "") -> str:
    query: str = adapter_rule()["metricsQuery"]
    return query.replace("<<.GroupBy>>", group_by).replace("<<.LabelMatchers>>", matchers)


def selectors(node: Any, grouped: frozenset[str] = frozenset()) -> Iterator[tuple[str, set[str]]]:
    """Every metric of an expression, with the labels that it is matched or grouped by."""
    match type(node).__name__:
        case "VectorSelector":
            labels = {each.name: each.value for each in node.matchers.matchers}
            name = node.name or labels.pop("__name__")
            yield name, set(labels) | grouped
        case "MatrixSelector":
            yield from selectors(node.vector_selector, grouped)
        case "AggregateExpr":
            labels_by = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
            yield from selectors(node.expr, grouped | labels_by)
        case "Call":
            for argument in node.args:
                yield from selectors(argument, grouped)
        case "BinaryExpr":
            yield from selectors(node.lhs, grouped)
            yield from selectors(node.rhs, grouped)
        case "ParenExpr":
            yield from selectors(node.expr, grouped)
        case "NumberLiteral":
            return
        case kind:
            raise AssertionError(f"no case for {kind}")


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Names of samples with their labels, from the real /metrics after a request that is scored and one that is not."""
    with app_client() as client:
        assert client.post("/v1/score", IDS_REQUEST).status_code == 200
        assert client.post("/v1/score", {}).status_code == 400
        text = client.get("/metrics").text
    names: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        for suffix in SUFFIXES[kind]:
            names[name if name.endswith(suffix) else name + suffix] = set()
    for name, labels in re.findall(r"^([\w:]+)\{(.*)\} ", text, re.MULTILINE):
        names.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return names | RARE_LABELS


@pytest.mark.parametrize(("title", "query"), list(queries()), ids=lambda value: value[:40])
def test_every_metric_and_label_of_a_query_is_exported(title: str, query: str, exported: dict[str, set[str]]) -> None:
    found = list(selectors(promql_parser.parse(query)))
    assert found
    for name, labels in found:
        assert name in exported
        assert labels - OTHER_LABELS <= exported[name]
        if "le" in labels:
            assert name.endswith("_bucket")


def test_the_dashboard_speaks_of_items_queue_cache_hits_latency_and_errors() -> None:
    titles = " ".join(panel["title"].lower() for panel in DASHBOARD["panels"])
    assert all(word in titles for word in ("items", "queue", "cache hit", "latency", "errors"))


def test_panels_do_not_overlap_and_take_the_data_source_of_the_variable() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & mine
        cells |= mine
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_compose_connects_server_prometheus_and_grafana() -> None:
    services = read_yaml(DEPLOY / "compose.yaml")["services"]
    (job,) = read_yaml(MONITORING / "prometheus.yml")["scrape_configs"]
    port = serve_parameters(services["server"]["command"])["port"]
    assert job["static_configs"] == [{"targets": [f"server:{port}"]}]
    (source,) = read_yaml(MONITORING / "grafana-datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    (provider,) = read_yaml(MONITORING / "grafana-dashboards.yaml")["providers"]
    mounted = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    shown = mounted["./monitoring/grafana-dashboard.json"]
    assert str(Path(shown).parent) == provider["options"]["path"]
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == shown


@pytest.mark.slow  # several seconds of scraping
def test_a_real_prometheus_answers_every_query(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    with server_process() as server:
        target = server.url.removeprefix("http://")
        text = (MONITORING / "prometheus.yml").read_text("utf-8")
        (tmp_path / "prometheus.yml").write_text(
            text.replace("server:30000", target).replace("scrape_interval: 5s", "scrape_interval: 1s"), "utf-8"
        )
        httpx.post(f"{server.url}/v1/score", json=IDS_REQUEST).raise_for_status()
        log = tmp_path / "log"
        with log.open("w") as stderr:
            options = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=127.0.0.1:0")
            prometheus = subprocess.Popen([program, *options], cwd=tmp_path, stderr=stderr)
        try:
            check_answers(prometheus_url(log), server.url)
        finally:
            prometheus.terminate()
            prometheus.wait(30)


def prometheus_url(log: Path) -> str:
    return "http://" + wait_for(lambda: re.search(r"Listening on\"? address=(\S+)", log.read_text("utf-8")))[1]


def check_answers(prometheus: str, server: str) -> None:
    def answer(query: str) -> list[Any]:
        body = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}).raise_for_status().json()
        found: list[Any] = body["data"]["result"]
        return found

    def ask(query: str) -> list[Any]:
        httpx.post(f"{server}/v1/score", json=IDS_REQUEST).raise_for_status()
        return answer(query)

    wait_for(lambda: ask("rate(prefixwise:items_scored_total[1m]) > 0"))
    # Nothing was refused, and nothing failed.
    silent = {"Errors by status", "Refused and given up", "Faults"}
    for title, query in queries():
        assert answer(query) or title in silent, (title, query)
    (queued,) = answer(adapter_query("instance"))
    assert float(queued["value"][1]) >= 0


def wait_for(question: Callable[[], Answer | None]) -> Answer:
    """The first answer that is true."""
    deadline = time.monotonic() + 60
    while True:
        try:
            found = question()
        except httpx.TransportError:
            found = None
        if found:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.2)
