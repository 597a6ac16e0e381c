"""Which programs a request would run, on TPUs that are not attached. No program is compiled here."""

from __future__ import annotations

from importlib import util
from typing import Any

import pytest

from prefixwise.aot import run as aot_run
from prefixwise.aot.options import AotOptions
from prefixwise.aot.run import find_largest_chunk, missing_packages, prepare_compiler, record
from prefixwise.contract.errors import BackendError, InvalidValueError

pytestmark = pytest.mark.usefixtures("restored_environment")
needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="libtpu, the compiler for TPUs, is not installed")


def programs(**options: Any) -> dict[str, int]:
    """Titles and how often they run."""
    return {each.title: each.runs for each in record(AotOptions(model="Qwen3-0.6B", **options)).programs()}


@needs_compiler
def test_the_contracts_request() -> None:
    behind = {"score, 10240 tokens": 1, "labels": 1, "logsumexp": 1}
    assert programs() == {"prefill, 2048 tokens": 1, "extend, 10240 tokens": 1, **behind}


@needs_compiler
def test_log_likelihoods_read_the_vocabulary() -> None:
    """A row for every token of an item, behind one prefix; one pass gives its log-probability and the top tokens."""
    found = programs(prefix_tokens=256, items=20, item_tokens=10, logprobs=5)
    assert found["vocabulary, top 5"] >= 1
    assert "labels" not in found and "logsumexp" not in found
    with pytest.raises(InvalidValueError, match="logprobs must be at least 1, got 0"):
        AotOptions(model="Qwen3-0.6B", logprobs=0)


@needs_compiler
@pytest.mark.parametrize(
    ("mask", "chunk_size", "trunks"),
    [
        (
            "dense",
            32,
            {"sequences, 16384 tokens, dense mask of 4096 columns": 2},
        ),  # six sequences each, and the last four
        ("dense", 64, {"sequences, 14336 tokens, dense mask of 4096 columns": 2}),
        ("segment", 128, {"sequences, 14336 tokens": 1, "sequences, 5120 tokens": 1}),
        ("segment", 500, {"sequences, 12288 tokens": 1}),
    ],
)
def test_packed_sequences_share_forwards_as_the_scheduler_fills_them(mask: Any, chunk_size: int, trunks: Any) -> None:
    found = programs(algorithm="packed", mask=mask, chunk_size=chunk_size)
    assert trunks.items() <= found.items()


@needs_compiler
def test_the_flops_of_the_contract_are_those_of_the_floor() -> None:
    """12,000 tokens through 0.88 GFLOP each, the items over the prefix, the prefix over itself; of the last layer only
    the scored tokens' part."""
    run = record(AotOptions(model="Qwen3-0.6B"))
    trunks = sum(each.work.flops for each in run.programs() if "tokens" in each.title and "score" not in each.title)
    layer = 2 * 12_000 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    rest_of_last = 2 * 12_000 * (1024 * 2048 + 3 * 1024 * 3072)
    pairs = 10_000 * 2000 + 500 * (20 * 21 // 2) + 2000 * 2001 // 2
    assert trunks == 28 * layer - rest_of_last + 28 * 4 * 16 * 128 * pairs
    assert 15e12 < trunks < 15.6e12


@needs_compiler
def test_all_chips_share_the_layers_by_default() -> None:
    choices: tuple[dict[str, Any], ...] = ({}, {"dp_size": 2}, {"tp_size": 2})
    shapes = [
        record(AotOptions(model="Qwen2.5-1.5B-Instruct", topology="v6e:2x4", items=8, **options)).backend.assembly.mesh
        for options in choices
    ]
    assert [dict(mesh.shape) for mesh in shapes] == [
        {"data": 1, "tensor": 8},
        {"data": 2, "tensor": 4},
        {"data": 1, "tensor": 2},
    ]


@needs_compiler
def test_more_chips_than_there_are() -> None:
    with pytest.raises(BackendError, match="tp_size=8 need 8 devices, got 4"):
        record(AotOptions(model="Qwen3-0.6B", topology="v6e:2x2", tp_size=8))


@pytest.mark.parametrize("name", ["prefix_tokens", "items", "item_tokens"])
def test_a_request_without_tokens(name: str) -> None:
    options: Any = {name: 0}
    with pytest.raises(InvalidValueError, match=f"{name} must be at least 1, got 0"):
        AotOptions(model="Qwen3-0.6B", **options)


@needs_compiler
@pytest.mark.parametrize(
    ("algorithm", "items"), [("prefill_extend", 41_216 // 20), ("packed", 39_216 // 20), ("serial", 41_216 // 2020)]
)
def test_the_largest_chunk_is_counted_in_items(monkeypatch: pytest.MonkeyPatch, algorithm: Any, items: int) -> None:
    prepare_compiler()
    from prefixwise.backends.jax.aot import Compilation, RecordingBackend

    monkeypatch.setattr(RecordingBackend, "compile", lambda self, spec: Compilation("compiles", 0.0))
    run = record(AotOptions(model="Qwen3-0.6B", algorithm=algorithm, items=40))
    found = find_largest_chunk(run, lambda done, total, title: None)
    assert (found.items, found.program.num_compiled, found.program.reason) == (items, 1, None)


@pytest.mark.parametrize("package", ["jax", "libtpu"])
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = util.find_spec("numpy")
    monkeypatch.setattr(aot_run, "find_spec", lambda name: None if name == package else found)
    assert missing_packages() == [package]
    with pytest.raises(BackendError, match=rf"needs {package}; install it with: pip install .*jax.tpu"):
        prepare_compiler()
