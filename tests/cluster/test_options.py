from __future__ import annotations

import json
from typing import Any

import pytest

from prefixwise.cluster.options import API_KEY_VARIABLE, ClusterOptions, ScaleOptions, Secret
from prefixwise.contract.errors import InvalidValueError, PrefixwiseError
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions

CHOSEN = ClusterOptions(
    EngineOptions(model="some/model", dtype="bfloat16", served_names=("a", "b"), prefix_cache=False),
    ServerOptions(port=8000, cors_origins=("*",), request_timeout=5.0),
    ScaleOptions(replicas=2, max_replicas=8, gpus_per_replica=0.5, max_wait_steps=2.0),
)


def test_they_come_back_from_json() -> None:
    assert ClusterOptions.from_json(json.loads(json.dumps(CHOSEN.to_json()))) == CHOSEN


def test_defaults_need_no_words() -> None:
    assert ClusterOptions().to_json() == {}
    assert ClusterOptions.from_json({}) == ClusterOptions()


def test_the_key_is_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ClusterOptions(server=ServerOptions(api_key="secret"))
    assert "secret" not in json.dumps(options.to_json())
    monkeypatch.setenv(API_KEY_VARIABLE, "from the environment")
    assert ClusterOptions().with_key(None).server.api_key == "from the environment"
    assert ClusterOptions().with_key("sent").server.api_key == "sent"
    assert "sent" not in repr(Secret("sent"))
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(PrefixwiseError, match="api_key must be one or more characters"):  # not a replica without a key
        ClusterOptions().with_key(None)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"sclae": {}}, "args must have names out of engine, server, scale, got 'sclae'"),
        ({"engine": {"modle": "x"}}, "engine must have names out of model, .*, got 'modle'"),
        ({"scale": []}, "scale must be a mapping"),
        ({"scale": {"replicas": 0}}, "replicas must be a whole number of at least 1, got 0"),
        ({"scale": {"replicas": 1.5}}, "replicas must be a whole number of at least 1, got"),
        ({"scale": {"replicas": True}}, "replicas must be a whole number of at least 1, got"),
        ({"scale": {"share": 0.5}}, "share must be a number of at least 1, got 0.5"),
        ({"scale": {"replicas": 4, "max_replicas": 2}}, r"max_replicas must be at least replicas \(4\), got 2"),
    ],
)
def test_what_cannot_be_meant_is_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        ClusterOptions.from_json(args)


def test_an_engine_that_cannot_be_is_refused() -> None:
    with pytest.raises(PrefixwiseError, match="max_items_per_request must be"):
        ClusterOptions.from_json({"engine": {"max_items_per_request": 0}})
