"""What the log says, for people and for machines."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from prefixwise.server.logs import JsonFormatter, TextFormatter, fields_of, log_configuration
from tests.server.app_client import IDS_REQUEST, AppClient

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


class Lines(logging.Handler):
    """What a formatter makes of every record."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _listen(formatter: logging.Formatter) -> Iterator[list[str]]:
    handler = Lines(formatter)
    log = logging.getLogger("prefixwise")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture
def text() -> Iterator[list[str]]:
    yield from _listen(TextFormatter())


@pytest.fixture
def objects() -> Iterator[list[str]]:
    yield from _listen(JsonFormatter())


def test_a_request_is_one_line(client: AppClient, text: list[str]) -> None:
    client.post("/v1/score", IDS_REQUEST, headers={"X-Request-Id": "r-1"})
    (line,) = text
    assert re.fullmatch(
        rf"{TIME} INFO prefixwise: request id=r-1 method=POST route=/v1/score status=200 items=3 prompt_tokens=6 "
        r"labels=2 algorithm=\w+ cached_tokens=0 queue_ms=[\d.]+ device_ms=[\d.]+ total_ms=[\d.]+",
        line,
    ), line


def test_a_request_is_one_object(client: AppClient, objects: list[str]) -> None:
    client.post("/v1/score", {**IDS_REQUEST, "query": []}, headers={"X-Request-Id": 'say "hi" = 1'})
    (line,) = objects
    shown = json.loads(line)
    assert re.fullmatch(TIME, shown.pop("time"))
    assert shown.pop("total_ms") >= 0
    assert shown == {
        "level": "INFO",
        "logger": "prefixwise",
        "message": "request",
        "id": 'say "hi" = 1',
        "method": "POST",
        "route": "/v1/score",
        "status": 400,
    }


def test_values_that_are_not_plain_words_are_quoted(client: AppClient, text: list[str]) -> None:
    client.get("/no%0Ane%20x", headers={"X-Request-Id": 'a="b"'})
    (line,) = text
    assert "\\n" in line
    assert "\n" not in line
    assert 'id="a=\\"b\\""' in line
    assert "route=other" in line


def test_what_machines_ask_every_few_seconds_and_the_pages_files_are_quiet(client: AppClient, text: list[str]) -> None:
    client.get("/health")
    client.get("/metrics")
    client.get("/page/main.js")
    assert text == []
    client.get("/")
    assert len(text) == 1


def test_neither_bodies_nor_query_strings_are_logged(client: AppClient, text: list[str]) -> None:
    client.post("/v1/score?key=hush", {**IDS_REQUEST, "secret": "hush"})
    client.get("/none?key=hush")
    assert len(text) == 2
    assert "hush" not in "".join(text)


def test_the_configuration_is_one_record(text: list[str]) -> None:
    log_configuration({"dtype": "float32", "names": ("a", "b"), "key": None}, as_json=False)
    (record,) = text
    assert record.splitlines()[1:] == ["  dtype  float32", "  names  a, b", "  key    none"]


def test_the_configuration_is_one_object(objects: list[str]) -> None:
    log_configuration({"dtype": "float32", "names": ("a", "b")}, as_json=True)
    (line,) = objects
    assert json.loads(line)["configuration"] == {"dtype": "float32", "names": ["a", "b"]}


def test_a_traceback_stays_in_its_record(text: list[str], objects: list[str]) -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("prefixwise").exception("failed", extra=fields_of(id="r-2"))
    assert text[0].splitlines()[0].endswith("ERROR prefixwise: failed id=r-2")
    assert text[0].endswith("ValueError: odd")
    shown = json.loads(objects[0])
    assert shown["id"] == "r-2"
    assert "ValueError: odd" in shown["exception"]
