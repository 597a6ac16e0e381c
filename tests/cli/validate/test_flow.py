"""endpoint, combine and gate in their order, on real servers with a real model, and on servers that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.evaluation import EndpointEvaluation
from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial
from prefixwise.bench.kinds.parity import Parity
from tests.bench.wrong_server import Fault, wrong_server
from tests.cli.validate_program import result_of, run_validate
from tests.server.server_process import ServerProcess, real_server

SMALL = ["--item-counts", "1,8", "--timed-runs", "2", "--query-tokens", "48", "--item-tokens", "6"]
SERIAL_FLAGS = ("--algorithm=serial", "--disable-radix-cache")
MULTI_FLAGS = ("--multi-item-scoring-delimiter=511",)


@dataclass(frozen=True)
class Servers:
    """Of one model."""

    model: str
    multi: str
    serial: str


@pytest.fixture(scope="module")
def servers(checkpoint_of: Callable[[str], Path]) -> Iterator[Servers]:
    model = str(checkpoint_of("qwen3"))
    with ExitStack() as stack:

        def start(*flags: str) -> ServerProcess:
            return stack.enter_context(real_server(f"--model-path={model}", "--dtype=float32", *flags, wait=False))

        both = [start(*MULTI_FLAGS), start(*SERIAL_FLAGS)]
        for server in both:
            server.wait_until_ready()
        yield Servers(model, both[0].url, both[1].url)


class Flow:
    """The three commands in one folder."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model

    def evaluate(self, mode: str, url: str) -> None:
        output = self.folder / f"{mode}.json"
        fixed = ("--mode", mode, "--url", f"{url}/v1/score", "--model", self.model, "--output-json", output)
        # A multi-item server tells its delimiter; the serial one must hear of it.
        ran = run_validate("endpoint", *fixed, *SMALL, *(() if mode == "multi" else ("--delimiter-token-id", 511)))
        assert ran.status == 0, ran.err

    def combine(self) -> None:
        inputs = ("--multi-json", self.folder / "multi.json", "--serial-json", self.folder / "serial.json")
        first = ("--output-multi-vs-serial-json", self.folder / "mvs.json")
        second = ("--output-jax-torch-parity-json", self.folder / "parity.json")
        ran = run_validate("combine", *inputs, *first, *second)
        assert ran.status == 0, ran.err

    def failed_gates(self) -> list[str]:
        """Small models on a busy machine are not what the speed-up's bound is about."""
        files = ("--multi-vs-serial-json", self.folder / "mvs.json", "--parity-json", self.folder / "parity.json")
        ran = run_validate("gate", *files, "--speedup-items", 8, "--min-speedup", 0.01)
        failed = [name for name, check in result_of(ran)["checks"].items() if not check["pass"]]
        assert ran.status == bool(failed)
        assert all(name in ran.err for name in failed)
        return failed

    def all_of(self, multi: str, serial: str) -> list[str]:
        self.evaluate("multi", multi)
        self.evaluate("serial", serial)
        self.combine()
        return self.failed_gates()


@pytest.fixture
def flow(tmp_path: Path, servers: Servers) -> Flow:
    return Flow(tmp_path, servers.model)


def test_right_servers_pass_with_figures_of_float32(flow: Flow, servers: Servers) -> None:
    assert flow.all_of(servers.multi, servers.serial) == []
    multi = read_artifact(flow.folder / "multi.json", EndpointEvaluation)
    combined = read_artifact(flow.folder / "mvs.json", MultiVsSerial)
    parity = read_artifact(flow.folder / "parity.json", Parity)
    assert multi.isolation.changed_length_mutation.unchanged_item_abs_diffs == [0.0] * 7
    assert combined.aligned_max_abs_diff is not None and combined.aligned_max_abs_diff < 1e-5
    assert combined.equivalence.max_abs_diff > 1e-3  # a delimiter makes another prompt
    assert parity.max_abs_diff_jax_serial_vs_torch_serial < 1e-5
    assert parity.max_abs_diff_jax_multi_vs_torch_multi_semantic < 1e-5
    assert parity.max_abs_diff_jax_multi_vs_torch_serial == pytest.approx(combined.equivalence.max_abs_diff, abs=1e-5)


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        (
            "leak",
            ["same_length_isolation_zero", "changed_length_isolation_zero", "delimiter_aligned_equiv_le_0p02"],
        ),
        ("drift", ["delimiter_aligned_equiv_le_0p02"]),
    ],
)
def test_a_multi_item_server_that_is_wrong_fails_the_gate_that_is_for_it(
    flow: Flow, servers: Servers, fault: Fault, failed: list[str]
) -> None:
    with wrong_server(servers.multi, fault) as wrong:
        assert flow.all_of(wrong, servers.serial) == failed


def test_a_serial_server_that_drifts_is_found_out_by_transformers(flow: Flow, servers: Servers) -> None:
    with wrong_server(servers.serial, "drift") as wrong:
        failed = flow.all_of(servers.multi, wrong)
    assert failed == ["delimiter_aligned_equiv_le_0p02", "jax_serial_vs_torch_serial_le_0p02"]


def test_a_server_without_the_delimiter_is_told_of_and_is_not_aligned(flow: Flow, servers: Servers) -> None:
    output = flow.folder / "multi.json"
    fixed = ("--mode", "multi", "--url", servers.serial, "--model", servers.model, "--output-json", output)
    ran = run_validate("endpoint", *fixed, *SMALL, "--delimiter-token-id", 511)
    assert "this server has no delimiter, so that the scores aligned with delimiter 511 will differ" in ran.err
    flow.evaluate("serial", servers.serial)
    flow.combine()
    combined = read_artifact(flow.folder / "mvs.json", MultiVsSerial)
    assert combined.equivalence.max_abs_diff == 0.0
    assert flow.failed_gates() == ["delimiter_aligned_equiv_le_0p02"]


@pytest.mark.slow
def test_a_server_on_jax_is_as_good(flow: Flow, servers: Servers) -> None:
    flags = (f"--model-path={servers.model}", "--dtype=float32", "--backend=jax", "--warmup=none", *MULTI_FLAGS)
    with real_server(*flags) as on_jax:
        assert flow.all_of(on_jax.url, servers.serial) == []
