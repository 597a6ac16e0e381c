"""Embedding overrides in a request: JSON lists, base64 and NumPy arrays to vectors, and an error for all else."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import jsonschema_rs
import ml_dtypes
import numpy as np
import pytest

from prefixwise.contract.checks import check_embed_overrides
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, MissingParameterError, RequestError
from prefixwise.contract.fields import properties
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.request import SCORE_FIELDS, ScoreRequest

VECTORS = np.array([[0.1, -2.0], [3.5, 1e-3]], np.float32)
SCHEMA = jsonschema_rs.validator_for(properties(SCORE_FIELDS)["query_embed_overrides"])


def parse(**fields: Any) -> ScoreRequest:
    body = {"query": [7, 7], "items": [[7], [1]], "label_token_ids": [1], "embed_override_token_id": 7}
    return parse_score_request({**body, **fields})


def encoded(vectors: Any, dtype: str) -> dict[str, str]:
    return {"base64": b64encode(vectors.tobytes()).decode(), "dtype": dtype}


def checked(dtype: str = "float32", **fields: Any) -> ScoreRequest:
    """By a model of 8 tokens and vectors of 2 numbers."""
    return check_embed_overrides(parse(**fields), 8, 2, dtype)


@pytest.mark.parametrize(
    "given",
    [
        VECTORS.tolist(),
        VECTORS,
        VECTORS.astype(np.float64),
        list(VECTORS),
        encoded(VECTORS, "float32"),
    ],
)
def test_every_form_gives_the_same_vectors(given: object) -> None:
    request = checked(query_embed_overrides=given, item_embed_overrides=[given, None])
    assert request.item_embed_overrides is not None
    assert request.item_embed_overrides[1] is None
    for found in (request.query_embed_overrides, request.item_embed_overrides[0]):
        assert found is not None
        assert found.dtype == np.float32
        assert np.array_equal(found, VECTORS)


def test_bfloat16_is_read_exactly() -> None:
    rounded = VECTORS.astype(ml_dtypes.bfloat16)
    for given in (rounded, encoded(rounded, "bfloat16")):
        found = checked(query_embed_overrides=given).query_embed_overrides
        assert np.array_equal(found, rounded.astype(np.float32))  # type: ignore[arg-type]


def test_absent_and_empty_overrides() -> None:
    request = parse()
    assert request.query_embed_overrides is None
    assert request.item_embed_overrides is None
    assert checked() is not None
    assert checked(query_embed_overrides=[]).query_embed_overrides.shape == (0, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("x", "must be a list of vectors"),
        (3, "must be a list of vectors"),
        ([1.0, 2.0], "query_embed_overrides[0] must be a list of numbers, got 1.0"),
        ([[1, True]], "query_embed_overrides[0][1] must be a number, got True"),
        ([[1, "2"]], 'query_embed_overrides[0][1] must be a number, got "2"'),
        ([[1, None]], "query_embed_overrides[0][1] must be a number, got None"),
        ({"base64": "AAAA"}, 'must be an object of "base64" and "dtype"'),
        ({"base64": "", "dtype": "float32", "shape": [1]}, 'must be an object of "base64" and "dtype"'),
        ({"base64": 3, "dtype": "float32"}, 'must be an object of "base64" and "dtype"'),
        ([np.array(["1", "2"])], "must be of real numbers, not <U1"),
        (np.ones((1, 2, 2)), "must be a list of vectors"),
    ],
)
def test_a_wrong_type(given: object, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(query_embed_overrides=given)
    assert message in str(caught.value)
    assert (caught.value.code, caught.value.param) == ("invalid_query_embed_overrides_type", "query_embed_overrides")
    if not isinstance(given, np.ndarray | list):
        assert not SCHEMA.is_valid(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1, 2], [1]], "must hold vectors of one length, got 2 numbers in [0] and 1 in [1]"),
        ([[1, 2], [1, float("nan")]], "query_embed_overrides[1] must hold finite numbers of float32, got nan"),
        ([[1, 1e39]], "query_embed_overrides[0] must hold finite numbers of float32, got inf"),
        ([[1, 10**400]], "must hold finite numbers of float32, got inf"),
        (encoded(np.array([np.inf], "f4"), "float32"), "must hold finite numbers of float32, got inf"),
        ({"base64": "AAA!", "dtype": "float32"}, "must be base64 text"),
        ({"base64": "AAA", "dtype": "float32"}, "must be base64 text"),
        ({"base64": "ä", "dtype": "float32"}, "must be base64 text"),
        ({"base64": "AAAA", "dtype": "float32"}, "must hold numbers of 4 bytes (float32), got 3 bytes"),
        ({"base64": "AAAA", "dtype": "float64"}, "must be one of float32, bfloat16"),
        ([[1, 2, 3]], "must hold vectors of 2 numbers, the model's hidden size, got 3"),
        ([[]], "must hold vectors of 2 numbers, the model's hidden size, got 0"),
        (encoded(np.ones(3, "f4"), "float32"), "must hold a multiple of 2 numbers, the model's hidden size, got 3"),
        ([[1, 70_000]], "must hold numbers of the model's float16, up to 65504, got 70000"),
    ],
)
def test_a_wrong_value(given: object, message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        checked("float16", query_embed_overrides=given)
    assert message in str(caught.value)
    assert (caught.value.code, caught.value.param) == ("invalid_embed_overrides", "query_embed_overrides")


def test_the_placeholder_token_is_required_and_known() -> None:
    with pytest.raises(MissingParameterError) as missing:
        parse(query_embed_overrides=[], embed_override_token_id=None)
    assert missing.value.code == "missing_embed_override_token_id"
    with pytest.raises(RequestError) as unknown:
        checked(embed_override_token_id=8)
    assert (unknown.value.code, unknown.value.param) == ("token_id_exceeds_vocab", "embed_override_token_id")


def test_every_item_has_an_entry() -> None:
    with pytest.raises(InvalidValueError, match="for each of the 2 items, null for none, got 1") as caught:
        parse(item_embed_overrides=[None])
    assert caught.value.code == "embed_overrides_mismatch"
    with pytest.raises(InvalidRequestError, match="must be a list with null or the vectors of each item"):
        parse(item_embed_overrides={"base64": "", "dtype": "float32"})


@pytest.mark.parametrize("wrong", [[["x"]], [[1, 2, 3]], {"base64": "?", "dtype": "float32"}])
def test_an_item_with_wrong_vectors_is_reported(wrong: object) -> None:
    fields: dict[str, Any] = {"item_embed_overrides": [wrong, [[1, 2]]]}
    with pytest.raises(RequestError) as caught:
        checked(**fields)
    assert (caught.value.item_index, caught.value.param) == (0, "item_embed_overrides")
    request = checked(**fields, on_item_error="report")
    assert list(request.item_errors) == [0]
    assert request.item_embed_overrides is not None
    assert request.item_embed_overrides[0] is None
    assert request.item_embed_overrides[1] is not None
