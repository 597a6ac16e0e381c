"""Large JSON, parsed in pieces: the same values and the same refusals as `orjson.loads` gives.

Lone surrogates alone, which `orjson` refuses, are read as `json` reads them.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import orjson
import pytest

from prefixwise.contract.errors import InvalidValueError
from prefixwise.server import json_body
from prefixwise.server.json_body import MAX_JSON_VALUES, parse_json

CHARACTERS = ['"', "\\", "[", "]", "{", "}", ",", ":", "a", "é", "🙂", "\n", " ", "u", "d83d", "\ud83d", "\ude42"]
DAMAGE = b'[]{},:"\\ 1a'


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "PIECE_BYTES", 8)
    monkeypatch.setattr(json_body, "_CHUNK_BYTES", 7)
    monkeypatch.setattr(json_body, "_STRING_BYTES", 13)  # a pair of escapes fits


def random_value(rng: random.Random, depth: int = 0) -> Any:
    def text(length: int) -> str:
        return "".join(rng.choice(CHARACTERS) for _ in range(rng.randrange(length)))

    kind = rng.randrange(7 if depth < 4 else 4)
    if kind == 4:
        return {text(3): random_value(rng, depth + 1) for _ in range(rng.randrange(5))}
    if kind > 4:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    return (rng.randrange(1000), None, text(40), rng.random())[kind]


def damaged(rng: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(rng.randrange(3)):
        place = rng.randrange(len(data) + 1)
        data[place : place + rng.randrange(2)] = bytes(rng.choices(DAMAGE, k=rng.randrange(2)))
    return bytes(data)


def whole(content: bytes) -> Any:
    """In one piece. Here `json` accepts nothing else that orjson refuses."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return json.loads(content)


def outcome(parse: Any, content: bytes) -> Any:
    try:
        return parse(content)
    except ValueError:
        return "refused"


@pytest.mark.parametrize("seed", range(2))
def test_any_json_is_read_as_orjson_reads_it(seed: int, small_pieces: None) -> None:
    rng = random.Random(seed)
    num_refused = 0
    for _ in range(1500):
        value = random_value(rng)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        content = damaged(rng, re.sub("[\ud800-\udfff]", lambda found: json.dumps(found[0])[1:-1], text).encode())
        expected = outcome(whole, content)
        assert outcome(parse_json, content) == expected, content
        num_refused += expected == "refused"
    assert 300 < num_refused < 1200


@pytest.mark.parametrize(
    "content",
    [b'{"a":[1,2,3,4,5,6,7,8,]}', b"[1,2,3,4,5,6,7,8}", b'{"a":1,"b":22222222,}', b"[[[1,2,3,4]],[5,6,7,8]]]", b"[  "],
)
def test_a_broken_list_is_refused(content: bytes, small_pieces: None) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(content + b" " * 9)


@pytest.mark.parametrize("beside", [b"NaN", b"-Infinity", b"9" * 5000, b'"\t"', b"[" * 2000 + b"]" * 2000, b"01"])
def test_beside_a_lone_surrogate_json_is_as_strict(beside: bytes) -> None:
    for lone in (b"\\ud800", b"\\uDC00", b"\\udbffx\\udfff"):
        assert parse_json(b'{"a": "' + lone + b'", "b": 1}') == json.loads(b'{"a": "' + lone + b'", "b": 1}')
        with pytest.raises(orjson.JSONDecodeError):
            parse_json(b'["' + lone + b'", ' + beside + b"]")


def test_numbers_beside_a_lone_surrogate_are_orjsons() -> None:
    numbers = b"18446744073709551616, -9223372036854775808, -0, 1.5e300, 0.1]"
    assert parse_json(b'["\\ud800", ' + numbers) == ["\ud800", *orjson.loads(b"[" + numbers)]


def test_nesting_is_bounded(small_pieces: None) -> None:
    assert parse_json(b"[" * 20 + b"]" * 20) == orjson.loads(b"[" * 20 + b"]" * 20)
    with pytest.raises(orjson.JSONDecodeError, match="levels"):
        parse_json(b"[" * 50 + b"]" * 50)


def test_a_body_has_so_many_values_and_no_more() -> None:
    """In strings nothing counts."""
    values = b"[" + b"1," * (MAX_JSON_VALUES - 1) + b"1]"
    assert len(parse_json(values)) == MAX_JSON_VALUES  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=f"at most {MAX_JSON_VALUES} values") as caught:
        parse_json(values[:-1] + b",1]" + b" ")
    assert caught.value.code == "too_many_values"
    assert parse_json(b'["' + b'\\",[{:' * MAX_JSON_VALUES + b'"]') == ['",[{:' * MAX_JSON_VALUES]
