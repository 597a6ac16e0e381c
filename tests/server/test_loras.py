"""LoRA adapters over HTTP: chosen by `model`, listed, loaded and unloaded, in one process and with HTTP workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixwise import Scorer
from prefixwise.contract.errors import ModelNotFoundError
from tests.lora_folders import write_adapter
from tests.server.app_client import AppClient, error_of
from tests.server.real_requests import ask_at_once, fetch
from tests.server.server_process import WORKERS, ServerProcess, real_server

BODY: dict[str, Any] = {"query": [1, 2, 3] * 60, "items": [[4, 5], [6]], "label_token_ids": [7, 8]}
VALUE, BAD, MISSING = "invalid_value_error", "invalid_request_error", "missing_parameter_error"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, checkpoint_of: Callable[[str], Path]) -> dict[str, Path]:
    folder, base = tmp_path_factory.mktemp("adapters"), checkpoint_of("qwen3")
    return {
        "first": write_adapter(folder / "first", base, seed=1),
        "second": write_adapter(folder / "second", base, seed=2),
        "broken": write_adapter(folder / "broken", base, use_dora=True),
    }


@pytest.fixture(scope="module")
def expected(checkpoint_of: Callable[[str], Path], adapters: dict[str, Path]) -> dict[str | None, list[Any]]:
    """Scores of the same requests by the Python API."""
    folders = {name: adapters[name] for name in ("first", "second")}
    with Scorer(checkpoint_of("qwen3"), backend="torch", device="cpu", dtype="float32", lora=folders) as scorer:
        return {name: scorer.score(**BODY, lora=name).scores for name in (None, "first", "second")}


@pytest.fixture(scope="module", params=[(), (WORKERS,)], ids=["one process", "workers"])
def server(
    request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path], adapters: dict[str, Path]
) -> Iterator[ServerProcess]:
    options = ("--dtype=float32", "--backend=torch", "--warmup=none", "--max-loras=2", "--allow-runtime-lora-updating")
    with real_server(
        f"--model-path={checkpoint_of('qwen3')}", f"--lora=first={adapters['first']}", *options, *request.param
    ) as running:
        yield running


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return fetch("POST", f"{server.url}{path}", json=body)


def score(server: ServerProcess, model: str | None) -> httpx.Response:
    return post(server, "/v1/score", **BODY, **({} if model is None else {"model": model}))


def test_one_server_with_many_adapters(
    server: ServerProcess, adapters: dict[str, Path], expected: dict[str | None, list[Any]]
) -> None:
    """Loaded and unloaded as vLLM does it; after the answer every worker knows."""
    loaded = post(server, "/v1/load_lora_adapter", lora_name="second", lora_path=str(adapters["second"]))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    names = [None, "first", "second"] * 4
    answers = ask_at_once(server, [{**BODY, **({} if name is None else {"model": name})} for name in names])
    for name, answer in zip(names, answers, strict=True):
        assert answer["scores"] == expected[name]
        assert name is None or answer["model"] == name
    listed = fetch("GET", f"{server.url}/v1/models").json()["data"]
    base = listed[0]["id"]
    assert [(each["id"], each["root"], each["parent"]) for each in listed[1:]] == [
        (name, str(adapters[name]), base) for name in ("first", "second")
    ]
    assert listed[0]["parent"] is None
    removed = post(server, "/v1/unload_lora_adapter", lora_name="second")
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    for _ in range(6):  # whichever worker takes it
        assert error_of(score(server, "second")) == (404, "model_error", "model_not_found", "model")
    # A rerank request for an unknown model is scored by the served one, but not where it may mean an adapter.
    ranked = post(server, "/v1/rerank", model="second", query="a", documents=["b"])
    assert error_of(ranked)[:3] == (404, "model_error", "model_not_found")
    assert score(server, "first").json()["scores"] == expected["first"]


def test_as_sglang(server: ServerProcess, adapters: dict[str, Path]) -> None:
    second = str(adapters["second"])
    loaded = post(server, "/load_lora_adapter", lora_name="second", lora_path=second)
    both = {"first": str(adapters["first"]), "second": second}
    assert loaded.json() == {"success": True, "error_message": "", "loaded_adapters": both}
    again = post(server, "/load_lora_adapter", lora_name="second", lora_path=second)
    assert (again.status_code, again.json()["success"]) == (400, False)
    assert "second" in again.json()["error_message"]
    del both["second"]
    assert post(server, "/unload_lora_adapter", lora_name="second").json()["loaded_adapters"] == both


def test_every_fault_has_its_error(server: ServerProcess, adapters: dict[str, Path]) -> None:
    load, unload, first = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", str(adapters["first"])
    broken = str(adapters["broken"])
    cases: list[tuple[str, dict[str, Any], int, str, str, str]] = [
        (load, {"lora_name": "new", "lora_path": broken}, 400, VALUE, "invalid_lora", "lora_path"),
        (load, {"lora_name": "new", "lora_path": "/nowhere"}, 400, VALUE, "invalid_lora", "lora_path"),
        (load, {"lora_name": "default", "lora_path": first}, 400, VALUE, "invalid_lora_name", "lora_name"),
        (load, {"lora_name": "first", "lora_path": first}, 400, VALUE, "lora_already_loaded", "lora_name"),
        (load, {"lora_path": first}, 400, MISSING, "missing_lora_name", "lora_name"),
        (load, {"lora_name": "new"}, 400, MISSING, "missing_lora_path", "lora_path"),
        (load, {"lora_name": 5, "lora_path": first}, 400, BAD, "invalid_lora_name_type", "lora_name"),
        (load, {"lora_name": "new", "lora_path": 5}, 400, BAD, "invalid_lora_path_type", "lora_path"),
        (
            load,
            {"lora_name": "new", "lora_path": first, "load_inplace": 1},
            *(400, BAD, "invalid_load_inplace_type", "load_inplace"),
        ),
        (unload, {"lora_name": "nobody"}, 404, BAD, "not_found", "lora_name"),
    ]
    for path, body, *wanted in cases:
        assert list(error_of(post(server, path, **body))) == wanted
    assert "use_dora" in post(server, load, lora_name="new", lora_path=broken).text
    taken = post(server, load, lora_name="default", lora_path=first).json()["error"]["message"]
    assert taken.endswith(', got "default" (string)')
    post(server, load, lora_name="second", lora_path=first)
    full = post(server, load, lora_name="third", lora_path=first)
    assert error_of(full) == (400, VALUE, "too_many_loras", "lora_name")
    post(server, unload, lora_name="second")


def test_only_where_it_is_allowed(client: AppClient) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"):
        answer = client.post(path, {"lora_name": "a", "lora_path": "b"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "lora_updating_disabled")


def test_the_client_sends_the_adapter_as_its_model(
    server: ServerProcess, expected: dict[str | None, list[Any]]
) -> None:
    from prefixwise import Client

    with Client(server.url) as client:
        assert client.score(**BODY, lora="first").scores == expected["first"]
        with pytest.raises(ModelNotFoundError):
            client.score(**BODY, lora="nobody")
        assert client.rerank("a", ["b"], lora="first", profile="question-yes-no").model == "first"
