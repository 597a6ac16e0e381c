from __future__ import annotations

import sys

import pytest
import yaml

from prefixwise.cluster.options import ClusterOptions, ScaleOptions
from prefixwise.host import install_command
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions
from tests.cli.conftest import Ran, RunMain, run_process

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

ARGS = ("--model-path", "some/model", "--replicas", "2", "--max-replicas", "8", "--gpus-per-replica", "1")


class TestConfig:
    def test_it_is_what_the_options_say(self, run_main: RunMain) -> None:
        pytest.importorskip("ray")
        ran = run_main("cluster", "config", *ARGS, "--port", "8000", "--host", "0.0.0.0", "--warmup", "none")
        found = yaml.safe_load(ran.out)
        assert ran.status == 0
        assert found["http_options"] == {"host": "0.0.0.0", "port": 8000, "request_timeout_s": 603.0}
        (application,) = found["applications"]
        assert application["import_path"] == "prefixwise.cluster.serve_app:build_app"
        assert ClusterOptions.from_json(application["args"]) == ClusterOptions(
            EngineOptions(model="some/model", watchdog_timeout=300.0),
            ServerOptions(host="0.0.0.0", port=8000),
            ScaleOptions(replicas=2, max_replicas=8, gpus_per_replica=1.0),
        )

    def test_the_key_is_not_printed(self, run_main: RunMain) -> None:
        pytest.importorskip("ray")
        ran = run_main("cluster", "config", "--api-key", "secret")
        assert "secret" not in ran.out + ran.err
        assert "PREFIXWISE_API_KEY" in ran.err

    def test_what_cannot_be_is_refused(self, run_main: RunMain) -> None:
        ran = run_main("cluster", "config", "--replicas", "4", "--max-replicas", "2")
        assert ran.status == 2
        assert "max_replicas must be at least replicas (4), got 2" in ran.err


def run_without(package: str, *args: str) -> Ran:
    program = f"import sys; sys.modules['{package}'] = None; from prefixwise.cli.main import main; main({[*args]})"
    return run_process([sys.executable, "-c", program])


@pytest.mark.parametrize(("package", "extra"), [("ray", "cluster"), ("orjson", "server"), ("starlette", "server")])
@pytest.mark.parametrize("verb", ["serve", "config"])
def test_without_a_package_it_is_one_clear_line(verb: str, package: str, extra: str) -> None:
    if package != "ray":
        pytest.importorskip("ray")
    ran = run_without(package, "cluster", verb)
    first, second = ran.err.splitlines()
    assert (ran.status, first) == (1, f"error: {package} is not installed")
    assert second.endswith(f"needs with: {install_command(extra)}")


@pytest.mark.parametrize("package", ["orjson", "starlette"])
def test_help_needs_no_package_of_the_server(package: str) -> None:
    ran = run_without(package, "cluster", "--help")
    assert (ran.status, ran.err) == (0, "")


def test_an_address_where_nobody_listens_is_told_at_once(run_main: RunMain) -> None:
    pytest.importorskip("ray")
    ran = run_main("cluster", "serve", "--address", "127.0.0.1:9")
    assert ran.status == 1
    assert "no Ray cluster answers at 127.0.0.1:9: Connection refused" in ran.err
