"""Large JSON, parsed in pieces: the same values and the same refusals as `orjson.loads` gives."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from prefixwise.contract.errors import InvalidValueError
from prefixwise.server import json_body
from prefixwise.server.json_body import MAX_JSON_VALUES, parse_json

CHARACTERS = ['"', "\\", "[", "]", "{", "}", ",", ":", "a", "é", "🙂", "\n", " ", "u", "d83d"]
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


def outcome(parse: Any, content: bytes) -> Any:
    try:
        return parse(content)
    except orjson.JSONDecodeError:
        return "refused"


@pytest.mark.parametrize("seed", range(2))
def test_any_json_is_read_as_orjson_reads_it(seed: int, small_pieces: None) -> None:
    rng = random.Random(seed)
    num_refused = 0
    for _ in range(1500):
        value = random_value(rng)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        content = damaged(rng, text.encode())
        expected = outcome(orjson.loads, content)
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
