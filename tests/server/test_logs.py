"""What the log says, for people and for machines."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from io import StringIO

import pytest

from prefixwise.server.config import ServerOptions
from prefixwise.server.launch import exit_at_once
from prefixwise.server.logs import JsonFormatter, QueuedHandler, TextFormatter, fields_of, log_configuration
from tests.server.app_client import IDS_REQUEST, AppClient, app_client

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


def test_a_request_whose_response_may_be_too_large_is_logged_with_its_size(text: list[str]) -> None:
    with app_client(ServerOptions(max_response_bytes=1000)) as client:
        client.post("/v1/score", IDS_REQUEST | {"items": [[1]] * 20})
    assert " code=response_too_large items=20 prompt_tokens=23 labels=2 algorithm=packed total_ms=" in text[-1]


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
        "code": "empty_query",
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
    client.post("/v1/score", {**IDS_REQUEST, "label_token_ids": ["hush"]})
    assert [re.findall(r"status=(\d+)(?: code=(\w+))?", line) for line in text] == [
        [("200", "")],
        [("404", "not_found")],
        [("400", "invalid_token_id_type")],
    ]
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


def _record(message: object) -> logging.LogRecord:
    return logging.LogRecord("prefixwise", logging.INFO, __file__, 0, str(message), (), None)


def test_lines_reach_the_stream_in_their_order() -> None:
    stream = StringIO()
    handler = QueuedHandler(stream)
    for number in range(1000):
        handler.handle(_record(number))
    handler.close()
    assert stream.getvalue().split() == [str(number) for number in range(1000)]
    assert handler.dropped == 0


def test_a_stream_that_nobody_reads_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe holds 64 KiB, the queue 10,000 characters; a line has 100."""
    monkeypatch.setattr("prefixwise.server.logs._FLUSH_SECONDS", 0.05)
    reader, writer = os.pipe()
    with os.fdopen(reader, encoding="utf-8") as pipe, os.fdopen(writer, "w", encoding="utf-8") as stream:
        handler = QueuedHandler(stream, max_queued=10_000)
        sent = [f"{number:099d}" for number in range(5000)]
        for line in sent:
            handler.handle(_record(line))
        handler.flush()  # gives up
        assert 4000 < handler.dropped < 5000
        read: list[str] = []
        reported = 0
        while len(read) + reported < 5000:
            line = next(pipe).rstrip("\n")
            if line.endswith("lines of this log were dropped: stderr did not take them in time"):
                reported += int(line.partition(" ")[0])
            else:
                read.append(line)
        assert reported == handler.dropped
        assert read == [line for line in sent if line in set(read)]
        handler.handle(_record("and on"))
        assert next(pipe) == "and on\n"
        handler.close()


def test_a_record_that_cannot_be_formatted_is_a_line() -> None:
    stream = StringIO()
    handler = QueuedHandler(stream)
    handler.handle(logging.LogRecord("prefixwise", logging.INFO, __file__, 0, "%d", ("no number",), None))
    handler.close()
    assert stream.getvalue().startswith("INFO prefixwise: a record cannot be formatted: TypeError(")


def test_a_process_ends_without_the_log_of_the_one_that_has_forked_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is not here: nobody would end the wait."""
    flushed: list[str] = []

    class Log(logging.Handler):
        def flush(self) -> None:
            flushed.append(str(self.name))

    inherited, own = Log(), Log()
    inherited.name, own.name = "inherited", "own"
    monkeypatch.setattr(logging.getLogger(), "handlers", [own])
    monkeypatch.setattr("prefixwise.server.launch.os._exit", lambda status: flushed.append(f"status {status}"))
    exit_at_once(3)
    assert flushed == ["own", "status 3"]


def test_dropped_lines_are_a_metric(client: AppClient, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = QueuedHandler(StringIO(), max_queued=0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    handler.handle(_record("lost"))
    assert "\nprefixwise:log_lines_dropped_total 1.0\n" in client.get("/metrics").text
