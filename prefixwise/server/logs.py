"""The server's log on stderr: one line per record, as text or, with `--log-json`, as JSON.

    2026-11-15T07:00:00.123Z INFO prefixwise: request id=5f0c... method=POST route=/v1/score status=200 items=10 ...
    {"time": "2026-11-15T07:00:00.123Z", "level": "INFO", "logger": "prefixwise", "message": "request", "id": ...}

A record may carry `fields`, a dict: `name=value` after the message, or keys of the object.

Lines go through a bounded queue to a thread that writes them (`QueuedHandler`): no request waits for a slow stderr.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import TextIO

import orjson

from prefixwise.server.config import ServerOptions
from prefixwise.server.context import HEALTH_PATHS, RequestContext
from prefixwise.server.metrics import OTHER_ROUTE

log = logging.getLogger("prefixwise")

# Logged at level debug: machines ask for them every few seconds, and a visit of a page loads twenty files.
_QUIET_ROUTES = (*HEALTH_PATHS, "/metrics", "/page/{name}")
_PLAIN_WORD = re.compile(r"[!#-<>-~]+")  # printable ASCII without spaces, quotes and equals signs
_MAX_PATH = 200  # characters of a path that matches no route

_MAX_QUEUED = 4 * 2**20  # characters that wait for stderr; lines beyond are dropped
_MAX_WRITE = 64 * 2**10  # characters of one write, or one line if it is longer
_FLUSH_SECONDS = 2.0  # for stderr to take all lines when the process ends


def set_up_logging(options: ServerOptions) -> None:
    """Send all records to stderr in our format; those of other packages from level warning up.

    Where several processes share stderr, one line is one write, which a pipe does not tear apart.
    """
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # our lines do not show them
    handler = QueuedHandler(sys.stderr, max_write=1 if options.http_workers else _MAX_WRITE)
    handler.setFormatter(JsonFormatter() if options.log_json else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    log.setLevel(options.log_level.upper())


def dropped_lines() -> int:
    """How many lines this process has lost because stderr did not take them."""
    return sum(each.dropped for each in logging.getLogger().handlers if isinstance(each, QueuedHandler))


def flush_log() -> None:
    """Wait until stderr has all lines, but not long."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class QueuedHandler(logging.Handler):
    """Writes lines to a stream on a thread of its own. If the stream does not take them, it drops and counts them."""

    def __init__(self, stream: TextIO, max_queued: int = _MAX_QUEUED, max_write: int = _MAX_WRITE) -> None:
        super().__init__()
        self.dropped = 0
        self._max_write = max_write
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._max_queued = max_queued
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        # Characters so far. Only `emit` changes the first, under the handler's lock, and only the thread the second.
        self._num_queued = self._num_written = 0
        self._given_up: int | None = None  # `_num_written` when `flush` waited in vain
        threading.Thread(target=self._write_all, name="prefixwise-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, or drop it. Never waits."""
        try:
            line = self.format(record) + "\n"
        except Exception as error:  # `handleError` would write to stderr
            line = f"{record.levelname} {record.name}: a record cannot be formatted: {error!r}\n"
        if self._num_queued - self._num_written + len(line) > self._max_queued:
            self.dropped += 1
            return
        self._num_queued += len(line)
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until all lines are written, for a short time; not again while the stream takes nothing."""
        if self._given_up == self._num_written:
            return
        written = threading.Event()
        self._lines.put(written)
        if not written.wait(_FLUSH_SECONDS):
            self._given_up = self._num_written

    def close(self) -> None:
        self.flush()
        super().close()

    def _write_all(self) -> None:
        """On the thread: as many lines as there are in one write."""
        reported = 0
        while True:
            lines, written = self._next_lines()
            self._write("".join(lines))
            self._num_written += sum(map(len, lines))
            dropped = self.dropped  # more may be dropped during the write
            if dropped > reported:  # they would be behind these lines
                self._write(self._dropped_line(dropped - reported))
                reported = dropped
            if written is not None:
                written.set()

    def _next_lines(self) -> tuple[list[str], threading.Event | None]:
        """Wait for a line, then take those behind it. The event: somebody waits until these are written."""
        lines: list[str] = []
        size = 0
        entry = self._lines.get()
        while isinstance(entry, str):
            lines.append(entry)
            size += len(entry)
            if size >= self._max_write:
                return lines, None
            try:
                entry = self._lines.get_nowait()
            except Empty:
                return lines, None
        return lines, entry

    def _dropped_line(self, number: int) -> str:
        message = "%d lines of this log were dropped: stderr did not take them in time"
        return self.format(log.makeRecord(log.name, logging.WARNING, __file__, 0, message, (number,), None)) + "\n"

    def _write(self, text: str) -> None:
        try:
            if self._descriptor is None:
                self._stream.write(text)
                self._stream.flush()
                return
            rest = text.encode("utf-8", "backslashreplace")
            while rest:  # not through the stream: its lock would be held while a write waits
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # somebody has made it non-blocking
                    select.select([], [self._descriptor], [])
        except (OSError, ValueError):
            pass  # the terminal is gone, or the stream is closed: there is nobody to tell


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None  # a test's


def fields_of(**fields: object) -> dict[str, object]:
    """For `extra=` of a log call, without the fields that are None."""
    return {"fields": {name: value for name, value in fields.items() if value is not None}}


def log_configuration(configuration: Mapping[str, object], *, as_json: bool) -> None:
    """Log the resolved configuration as one record, so that a run can be repeated from its log."""
    if as_json:
        log.info("configuration", extra=fields_of(configuration=dict(configuration)))
        return
    width = max(map(len, configuration), default=0)
    lines = (f"\n  {name:<{width}}  {_show(value)}" for name, value in configuration.items())
    log.info("configuration:%s", "".join(lines))


def log_request(context: RequestContext, route: str, status: int, seconds: float) -> None:
    """Log one line at the end of a request, never with bodies, keys or query strings."""
    level = logging.DEBUG if route in _QUIET_ROUTES else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields: dict[str, object] = {"id": context.id, "method": context.method, "route": route, "status": status}
    fields["code"] = context.error_code
    if route == OTHER_ROUTE:
        fields["path"] = context.path[:_MAX_PATH]
    stats = context.stats
    if stats is not None:
        fields["requests"] = stats.requests if stats.requests != 1 else None
        fields["items"] = stats.items
        fields["prompt_tokens"] = stats.prompt_tokens
        fields["labels"] = stats.labels
        fields["algorithm"] = stats.algorithm
        fields["cached_tokens"] = stats.cached_tokens
        fields["queue_ms"] = _milliseconds(stats.queue_seconds)
        fields["device_ms"] = _milliseconds(stats.device_seconds)
    fields["total_ms"] = _milliseconds(seconds)
    if context.trace is not None:
        fields.update(context.trace.ids)
    extra = fields_of(**fields)
    log.handle(
        log.makeRecord(log.name, level, __file__, 0, "request", (), None, extra=extra)
    )  # `log.log` would look for the caller's line


class TextFormatter(logging.Formatter):
    """Text, for people."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record.created)} {record.levelname} {record.name}: {record.getMessage()}"
        pairs = [f" {name}={_word(value)}" for name, value in _fields(record).items()]
        return "".join([text, *pairs, _trace(self, record, "\n")])


class JsonFormatter(logging.Formatter):
    """One JSON object per line, for machines."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, object] = {
            "time": _time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        trace = _trace(self, record, "")
        if trace:
            shown["exception"] = trace
        return orjson.dumps(_utf8(shown), default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _time(created: float) -> str:
    seconds = int(created)
    return f"{_second(seconds)}.{int(1000 * (created - seconds)):03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = record.__dict__.get("fields", {})
    return fields


def _trace(formatter: logging.Formatter, record: logging.LogRecord, before: str) -> str:
    return before + formatter.formatException(record.exc_info) if record.exc_info else ""


def _word(value: object) -> str:
    """The value itself if it is one plain word, else a JSON string."""
    if not isinstance(value, str):
        return str(value)
    return value if value.isalnum() or _PLAIN_WORD.fullmatch(value) else orjson.dumps(_utf8(value)).decode()


def _utf8(value: object) -> object:
    """The value with strings that UTF-8 can encode: a path may hold lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _utf8(entry) for name, entry in value.items()}
    return value


def _show(value: object) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
