"""One HTTP/1.1 answer, read from its bytes as they come: a status line, headers, and a body of one of three kinds.

    Content-Length: N           N bytes
    Transfer-Encoding: chunked  chunks, each behind its size, until an empty one
    neither                     until the server closes

No input or output here: `http_connection` feeds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_MOST_HEAD_BYTES = 64 * 1024
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?")
_LENGTH = re.compile(r"\d{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")
_NO_BODY = (204, 304)


class BadAnswerError(Exception):
    """Bytes that are no HTTP answer; the connection they came over is of no more use."""


class AnswerReader:
    """For one answer. What it has of it: `status`, `body`, and whether the connection may be used again."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.has_begun = False  # some byte of the answer has come
        self.is_complete = False
        self._keeps = True
        self._buffer = bytearray()
        self._missing = 0  # bytes of the body, or of the chunk
        self._read_more: Callable[[], bool] = self._read_head

    @property
    def may_be_followed(self) -> bool:
        """Is the connection ready for another request? Not where more came than the answer."""
        return self.is_complete and self._keeps and not self._buffer

    def feed(self, data: bytes) -> bool:
        """Is the answer complete? Raises BadAnswerError."""
        self.has_begun = True
        self._buffer += data
        while not self.is_complete and self._read_more():
            pass
        return self.is_complete

    def end(self) -> bool:
        """The server has closed. Is the answer complete?"""
        if self._read_more == self._read_until_closed:
            self.is_complete = True
        return self.is_complete

    # Each step reads what it can, names the one after it, and says whether that may go on at once.

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEAD_BYTES or not b"HTTP/1."[: len(self._buffer)] == self._buffer[:7]:
                raise BadAnswerError(f"expected the head of an HTTP answer, got {bytes(self._buffer[:80])!r}")
            return False
        first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise BadAnswerError(f"expected an HTTP status line, got {first[:80]!r}")
        self.status = int(found[2])
        if self.status >= 200:  # else a word in between: the answer is still to come
            self._choose_body(_headers(lines), is_old=found[1] == b"0")
        return True

    def _choose_body(self, headers: dict[str, str], *, is_old: bool) -> None:
        wish = headers.get("connection", "").lower()
        self._keeps = "keep-alive" in wish if is_old else "close" not in wish
        coding = headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if self.status in _NO_BODY:
            self.is_complete = True
        elif coding:
            if coding != "chunked":
                raise BadAnswerError(f"expected a chunked body, got Transfer-Encoding: {coding}")
            self._read_more = self._read_chunk_size
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise BadAnswerError(f"expected a number as Content-Length, got {length!r}")
            self._missing = int(length)
            self._read_more = self._read_sized
        else:
            self._keeps = False
            self._read_more = self._read_until_closed

    def _read_sized(self) -> bool:
        if len(self._buffer) < self._missing:
            return False
        self.body = self._buffer[: self._missing]
        del self._buffer[: self._missing]
        self.is_complete = True
        return False

    def _read_until_closed(self) -> bool:
        self.body += self._buffer
        self._buffer.clear()
        return False

    def _read_chunk_size(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        found = _CHUNK_SIZE.fullmatch(line)
        if found is None:
            raise BadAnswerError(f"expected the size of a chunk, got {line[:80]!r}")
        self._missing = int(found[1], 16)
        self._read_more = self._read_chunk if self._missing else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        if len(self._buffer) < self._missing + 2:
            return False
        if self._buffer[self._missing : self._missing + 2] != b"\r\n":
            raise BadAnswerError("expected the end of a line behind a chunk")
        self.body += self._buffer[: self._missing]
        del self._buffer[: self._missing + 2]
        self._read_more = self._read_chunk_size
        return True

    def _read_trailer(self) -> bool:
        line = self._take_line()
        self.is_complete = line == b""
        return line is not None

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEAD_BYTES:
                raise BadAnswerError(f"expected a line, got {len(self._buffer)} bytes without an end")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


def _headers(lines: list[bytes]) -> dict[str, str]:
    """By their names in small letters; of one that comes twice, the values with a comma between them."""
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise BadAnswerError(f"expected a header, got {line[:80]!r}")
        key, value = name.strip().lower(), value.strip()
        found[key] = f"{found[key]}, {value}" if key in found and found[key] != value else value
    return found
