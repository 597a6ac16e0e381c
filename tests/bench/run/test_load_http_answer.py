"""Answers from their bytes, in whatever pieces they come."""

from __future__ import annotations

import pytest

from prefixwise.bench.run.load_http import AnswerReader, BadAnswerError

SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length:  4\r\n\r\nbody"
CHUNKED = (
    b"HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b"3;name=value\r\nbod\r\n00a\r\ny\r\n again.\r\n0\r\nX-Trailer: 1\r\n\r\n"
)


def read(content: bytes, size: int) -> AnswerReader:
    """In pieces of `size` bytes; complete at the last one and no sooner."""
    reader = AnswerReader()
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    assert [reader.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return reader


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_body_of_a_known_length(size: int) -> None:
    reader = read(SIZED, size)
    assert (reader.status, bytes(reader.body), reader.may_be_followed) == (200, b"body", True)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_body_in_chunks(size: int) -> None:
    reader = read(CHUNKED, size)
    assert (reader.status, bytes(reader.body), reader.may_be_followed) == (503, b"body\r\n again.", True)


def test_an_empty_body() -> None:
    assert read(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 5).body == b""
    assert read(b"HTTP/1.1 204 No Content\r\n\r\n", 5).may_be_followed


def test_a_word_in_between_is_not_the_answer() -> None:
    assert read(b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED, 1).status == 200


def test_a_body_until_the_server_closes() -> None:
    reader = AnswerReader()
    assert not reader.feed(b"HTTP/1.1 200 OK\r\n\r\nhalf")
    assert not reader.feed(b" and half")
    assert reader.end()
    assert (bytes(reader.body), reader.may_be_followed) == (b"half and half", False)


@pytest.mark.parametrize("cut", [1, 20, len(SIZED) - 1])
def test_half_an_answer_is_none(cut: int) -> None:
    reader = AnswerReader()
    assert not reader.feed(SIZED[:cut])
    assert not reader.end()
    assert reader.has_begun


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.1 200 OK\r\nconnection: Keep-Alive\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
        (b"HTTP/1.1 200\r\n", True),
    ],
)
def test_the_server_says_whether_the_connection_stays(head: bytes, keeps: bool) -> None:
    assert read(head + b"Content-Length: 1\r\n\r\n.", 1000).may_be_followed is keeps


def test_more_than_the_answer_makes_the_connection_useless() -> None:
    reader = AnswerReader()
    assert reader.feed(SIZED + b"HTTP")
    assert bytes(reader.body) == b"body"
    assert not reader.may_be_followed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "expected the head of an HTTP answer, got b'<html>'"),
        (b"SSH-2.0-x\r\n\r\n", "expected an HTTP status line, got b'SSH-2.0-x'"),
        (b"HTTP/1.1 OK\r\n\r\n", "expected an HTTP status line"),
        (b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", "expected a header, got b'no header'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "expected a number as Content-Length, got 'many'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "expected a number as Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "expected a number as Content-Length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "expected a chunked body, got Transfer-Encoding: gzip"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "expected the size of a chunk, got b'xyz'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc", "expected the end of a line behind a chunk"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "expected the head of an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000, "expected a line, got 70000 bytes"),
    ],
)
def test_what_is_no_answer_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(BadAnswerError) as raised:
        AnswerReader().feed(content)
    assert str(raised.value).startswith(message)
