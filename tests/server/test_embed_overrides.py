"""Embedding overrides over HTTP, on a backend where the vector (c, 0, ...) is token c."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from tests.server.app_client import AppClient, expected_logits

VECTOR = [9.0, *[0.0] * 7]
REQUEST: dict[str, Any] = {
    "query": [1, 2, 3],
    "items": [[2, 5], [6], [2]],
    "label_token_ids": [7, 8],
    "score_mode": "logit",
    "embed_override_token_id": 2,
    "query_embed_overrides": [VECTOR],
    "item_embed_overrides": [[VECTOR], None, None],
}
EXPECTED = expected_logits([1, 9, 3], [[9, 5], [6], [2]], [7, 8])


def in_base64(dtype: str) -> dict[str, str]:
    data = np.array(VECTOR, "<f4").tobytes()
    if dtype == "bfloat16":
        data = np.frombuffer(data, "<u2")[1::2].tobytes()
    return {"base64": b64encode(data).decode(), "dtype": dtype}


@pytest.mark.parametrize("vectors", [[VECTOR], in_base64("float32"), in_base64("bfloat16")], ids=str)
def test_the_scores_are_of_the_vectors(client: AppClient, vectors: object) -> None:
    body = {**REQUEST, "query_embed_overrides": vectors, "item_embed_overrides": [vectors, None, None]}
    response = client.post("/v1/score", body)
    assert response.json()["scores"] == EXPECTED
    assert "warnings" not in response.json()


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"embed_override_token_id": None}, "missing_embed_override_token_id", "embed_override_token_id"),
        ({"embed_override_token_id": 10**9}, "token_id_exceeds_vocab", "embed_override_token_id"),
        ({"embed_override_token_id": -1}, "invalid_embed_override_token_id", "embed_override_token_id"),
        ({"query_embed_overrides": [VECTOR] * 2}, "embed_overrides_mismatch", "query_embed_overrides"),
        ({"query_embed_overrides": [[1.0]]}, "invalid_embed_overrides", "query_embed_overrides"),
        ({"query_embed_overrides": "AAAA"}, "invalid_query_embed_overrides_type", "query_embed_overrides"),
        ({"item_embed_overrides": [None]}, "embed_overrides_mismatch", "item_embed_overrides"),
        ({"item_embed_overrides": [None, None, [VECTOR] * 2]}, "embed_overrides_mismatch", "item_embed_overrides"),
    ],
)
def test_wrong_overrides_are_clear_errors(client: AppClient, fields: dict[str, Any], code: str, param: str) -> None:
    error = client.post("/v1/score", {**REQUEST, **fields}).json()["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_an_item_with_wrong_vectors_fails_by_itself(client: AppClient) -> None:
    body = {**REQUEST, "item_embed_overrides": [[VECTOR], [VECTOR], None], "on_item_error": "report"}
    answer = client.post("/v1/score", body).json()
    assert answer["scores"] == [EXPECTED[0], None, EXPECTED[2]]
    assert [(each["index"], each["code"]) for each in answer["item_errors"]] == [(1, "embed_overrides_mismatch")]


@pytest.mark.parametrize("path", ["/v1/prefix", "/v1/rerank"])
def test_other_routes_refuse_them(client: AppClient, path: str) -> None:
    body = {"query": "a", "documents": ["b"]} if path == "/v1/rerank" else {"query": [1, 2, 3]}
    error = client.post(path, {**body, "query_embed_overrides": [VECTOR]}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "query_embed_overrides")
