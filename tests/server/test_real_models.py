"""Every kind of model that loads is served, on both backends and with every warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from prefixwise.forward.backend import Warmup
from prefixwise.launch.loading import load_engine, resolved_config
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions
from prefixwise.server.service import Service
from tests.checkpoints import add_tokenizer, make_bidirectional, make_classifier, make_gguf, make_hf_checkpoint
from tests.server.app_client import AppClient
from tests.server.server_process import real_server

KINDS = {
    "causal": 0,
    "gguf": 0,
    "bidirectional": 1,
    "one label": 1,
    "reward model": 1,
    "two labels": 2,
    "five labels": 5,
}
WARMUPS: tuple[Warmup, ...] = ("full", "fast", "none")


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """JAX compiles for every model. Every day: each kind, one classifier and a causal one after a whole warm-up."""
    if test != "test_every_kind_of_model_is_served" or parameters["cpu"] != "jax":
        return False
    kind, warmup = parameters["kind"], parameters["warmup"]
    return bool(warmup != ("full" if kind in ("causal", "five labels") else "none"))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By its kind. Their contexts are so short that JAX has one bucket."""
    base, made = tmp_path_factory.mktemp("models"), {}
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    causal = make_hf_checkpoint(base / "causal", "qwen3", max_position_embeddings=511, **sizes)
    made["causal"] = add_tokenizer(causal)

    def make(kind: str) -> Path:
        if kind == "gguf":
            return make_gguf(causal, base / "model.gguf")
        if kind == "bidirectional":
            return make_bidirectional(base / kind, max_position_embeddings=511, **sizes)
        rows = np.random.default_rng(0).standard_normal((KINDS[kind], 32), np.float32)
        problem = {"problem_type": "regression"} if kind == "reward model" else {}
        return add_tokenizer(make_classifier(base / kind.replace(" ", "-"), causal, rows, **problem))

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make(kind)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def shared_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The models differ in their heads alone, so most of their programs are compiled once."""
    pytest.importorskip("jax")
    from tests.backends.jax.compilations import own_cache

    with own_cache():
        yield tmp_path_factory.mktemp("programs")


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_served(
    kind: str, warmup: Warmup, cpu: dict[str, Any], model_of: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    small: dict[str, Any] = {"token_budget": 512, "prefix_cache_bytes": 1 << 22, "mask": "segment"}
    options = EngineOptions(model=model_of(kind), **cpu, dtype="float32", warmup=warmup, **small)
    if cpu["backend"] == "jax":
        options = replace(options, compilation_cache_dir=request.getfixturevalue("shared_programs"))
    with closing(load_engine(options)) as engine:
        service = Service(ServerOptions())
        service.open(engine, resolved_config(options, engine))
        check_routes(AppClient(service), KINDS[kind])
        service.close()


def check_routes(server: AppClient, num_classes: int) -> None:
    for path in ("/health", "/health_generate", "/v1/models", "/server_info", "/info"):
        assert server.get(path).status_code == 200, path
    body = {"query": "Is this document relevant? ", "items": ["yes", "The quick brown fox"]}
    labels = {} if num_classes else {"label_token_ids": [5, 6]}
    scored = server.post("/v1/score", {**body, **labels, "return_pooled_hidden_states": True}).json()
    assert [len(row) for row in scored["scores"]] == [num_classes or 2] * 2
    assert [len(state) for state in scored["pooled_hidden_states"]] == [32, 32]
    classified = server.post("/classify", {"input": body["items"]})
    assert classified.status_code == (200 if num_classes else 400)
    reranked = server.post("/v1/rerank", {"query": "a", "documents": ["b"], "profile": "question-yes-no"})
    assert reranked.status_code == (400 if num_classes > 2 else 200), reranked.text


def test_a_bidirectional_reranker_starts_from_the_command_line(model_of: Callable[[str], Path]) -> None:
    with real_server(f"--model-path={model_of('bidirectional')}", "--dtype=float32", "--backend=torch") as server:
        body = {"query": "a", "documents": ["The quick brown fox", "yes", "no no no"], "return_debug": True}
        found = httpx.post(f"{server.url}/v1/rerank", json=body, timeout=60).json()
        assert (found["meta"]["profile"], len(found["results"])) == ("llama-nemotron-rerank", 3)
        assert "no prefix can be shared" in found["meta"]["debug"]["reason"]
        pinned = httpx.post(f"{server.url}/v1/prefix", json={"query": "a"}, timeout=60)
        assert (pinned.status_code, pinned.json()["error"]["code"]) == (400, "prefix_cache_disabled")


def test_a_classifier_starts_from_the_command_line(model_of: Callable[[str], Path]) -> None:
    with real_server(f"--model-path={model_of('one label')}", "--dtype=float32", "--backend=torch") as server:
        found = httpx.post(f"{server.url}/classify", json={"input": ["a", "b"]}, timeout=60).json()
        assert [each["label"] for each in found["data"]] == ["LABEL_0", "LABEL_0"]
        assert all(0 <= each["probs"][0] <= 1 for each in found["data"])
        docs = httpx.post(f"{server.url}/v1/rerank", json={"query": "a", "documents": ["b"]}, timeout=60)
        assert (docs.status_code, docs.json()["error"]["code"]) == (400, "invalid_profile")
        warning = f"WARNING prefixwise: rerank requests that name no profile are refused: {docs.json()['message']}"
        assert any(line.endswith(warning) for line in server.log)
