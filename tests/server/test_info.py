"""`/v1/models`, `/server_info` and the health checks."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from prefixwise import __version__
from prefixwise.backends.fake import FakeBackend
from prefixwise.server.config import ServerOptions
from prefixwise.server.routes import info
from tests.server.app_client import IDS_REQUEST, MODEL, AppClient, HeldBackend, app_client, error_of


class TestModels:
    def test_one_entry_for_every_served_name(self) -> None:
        with app_client(ServerOptions(served_model_names=("a", "b"))) as client:
            answer = client.get("/v1/models").json()
        assert answer["object"] == "list"
        assert [entry["id"] for entry in answer["data"]] == ["a", "b"]
        entry = answer["data"][0]
        assert (entry["object"], entry["owned_by"], entry["root"]) == ("model", "prefixwise", MODEL)
        assert entry["max_model_len"] == 4096
        assert isinstance(entry["created"], int)

    def test_without_served_names_the_model_has_its_own_name(self, client: AppClient) -> None:
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == [MODEL]

    @pytest.mark.parametrize("path", ["org/b", "org%2Fb", "org/b/"])
    def test_a_name_may_be_asked_for(self, path: str) -> None:
        with app_client(ServerOptions(served_model_names=("a", "org/b"))) as client:
            assert client.get(f"/v1/models/{path}").json() == client.get("/v1/models").json()["data"][1]
            missing = client.get("/v1/models/org")
        assert error_of(missing) == (404, "model_error", "model_not_found", "model")
        assert '"a", "org/b", got "org"' in missing.json()["message"]

    def test_before_the_model_is_there_its_names_are(self) -> None:
        with app_client(ServerOptions(served_model_names=("a",)), is_ready=False) as client:
            (entry,) = client.get("/v1/models").json()["data"]
        assert (entry["id"], entry["max_model_len"]) == ("a", None)


class TestServerInfo:
    def test_it_shows_status_versions_configuration_and_statistics(self, client: AppClient) -> None:
        client.post("/v1/score", IDS_REQUEST)
        info = client.get("/server_info").json()
        assert info["status"] == "ready"
        assert info["version"] == info["versions"]["prefixwise"] == __version__
        assert info["versions"]["numpy"] == np.__version__
        assert info["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
        assert info["configuration"]["request_timeout"] == 600
        assert info["devices"]["backend"] == "fake"
        assert info["buckets"]["token_budget"] > 0
        assert info["prefix_cache"]["capacity_blocks"] == 1024
        assert info["memory"]["peak_host_bytes"] > 2**20
        assert info["stats"]["items_scored"] >= 3
        assert info["uptime_seconds"] >= 0

    def test_a_backend_that_knows_its_memory_is_asked(self) -> None:
        class Telling(FakeBackend):
            def memory_stats(self) -> dict[str, int]:
                return {"peak_bytes": 77}

            @property
            def num_compilations(self) -> int:
                return 5

        with app_client(backend=Telling()) as client:
            assert client.get("/server_info").json()["memory"]["device"] == {"peak_bytes": 77}
            assert "prefixwise:compilations_total 5.0" in client.get("/metrics").text

    def test_it_shows_the_resolved_configuration_without_the_key(self) -> None:
        with app_client(is_ready=False) as client, app_client() as other:
            client.service.open(other.engine, {"dtype": "float32", "api_key": "hush"})
            info = client.get("/server_info")
        assert info.json()["configuration"] == {"dtype": "float32"}
        assert "hush" not in info.text


class TestHealth:
    def test_sagemaker_asks_for_it_under_a_name_of_its_own(self, client: AppClient) -> None:
        for response in (client.get("/ping"), client.post("/ping")):
            assert (response.status_code, response.json()) == (200, {"status": "ok"})

    def test_a_tiny_request_is_really_scored(self) -> None:
        with app_client(delimiter_token_id=0) as client:
            answer = client.get("/health_generate")
            assert answer.status_code == 200
            assert answer.json()["status"] == "ok"
            assert answer.json()["milliseconds"] >= 0
            assert client.engine.scheduler.stats().items_scored == 1

    def test_a_device_that_hangs_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(info, "GENERATE_SECONDS", 0.05)
        backend = HeldBackend()
        with app_client(backend=backend) as client:
            response = client.get("/health_generate")
            assert error_of(response) == (503, "server_error", "not_ready", None)
            assert int(response.headers["retry-after"]) > 0
            assert client.get("/health").status_code == 200
