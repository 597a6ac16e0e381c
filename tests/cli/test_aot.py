from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from prefixwise.aot import run as aot_run
from prefixwise.aot.matrix import MatrixFile
from prefixwise.aot.options import MATRIX_CASES, MATRIX_MODELS, MATRIX_TOPOLOGIES
from prefixwise.aot.run import missing_packages
from prefixwise.cli import aot as aot_module
from prefixwise.forward.backend import DEFAULT_TOKEN_BUDGETS
from prefixwise.host import install_command
from tests.cli.conftest import REAL_PROGRAM, RunMain, run_process

needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="libtpu, the compiler for TPUs, is not installed")
pytestmark = pytest.mark.usefixtures("restored_environment")
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 300,
}
SMALL = ("--prefix-tokens", "130", "--num-items", "8", "--item-tokens", "5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@needs_compiler
def test_json_reports_every_program(folder: Path) -> None:
    ran = run_process(
        [*REAL_PROGRAM, "aot", "--model", str(folder), "--topology", "v6e:1x2", *SMALL, "--json", "--no-largest-chunk"]
    )
    assert ran.status == 0, ran.err
    assert [line.partition("] ")[2] for line in ran.err.splitlines()] == [
        "compiling prefill, 256 tokens",
        "compiling extend, 256 tokens",
        "compiling score, 256 tokens",
        "compiling labels",
        "compiling logsumexp",
    ]
    body = json.loads(ran.out)
    assert (body["slice"]["topology"], body["slice"]["tensor"], body["algorithm"]) == ("v6e:1x2", 2, "prefill_extend")
    assert body["largest_chunk"] is None
    prefill, extend, *_ = body["programs"]
    assert (prefill["program"], extend["program"]) == ("prefill, 256 tokens", "extend, 256 tokens")
    for program in (prefill, extend):
        assert (program["outcome"], program["reason"], program["runs"]) == ("compiles", None, 1)
        assert program["collectives"] == {"all-reduce": 3}
        assert program["kernel_vmem_bytes"] > 0
        assert program["hbm_bytes"]["arguments"] > body["slice"]["prefix_pool_bytes"]
        assert 0 < program["estimated_seconds"] < 0.001
    assert 2 * extend["flops"] < prefill["flops"] < 4 * extend["flops"], "130 tokens and 40"
    assert body["estimate"]["note"].startswith("an estimate")
    assert body["versions"].keys() == {"prefixwise", "jax", "jaxlib", "libtpu"}


@needs_compiler
def test_a_table_with_the_programs_that_do_not_fit(
    folder: Path, run_main: RunMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV cache that is larger than the chip: every program that takes it is reported, and no chunk fits."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    monkeypatch.setitem(DEFAULT_TOKEN_BUDGETS, "tpu", 512)  # two sizes to search
    kv_cache = str(40 << 30)
    ran = run_main("aot", "--model", str(folder), *SMALL, "--prefix-cache-bytes", kv_cache, "--quiet")
    lines = ran.out.splitlines()
    assert (ran.status, ran.err) == (1, "")
    assert lines[0] == f"{folder} in bfloat16 on v6e:1x1 (data 1 x tensor 1): 130 + 8 x 5 tokens, prefill_extend"
    rows = {line[:20].strip(): line for line in lines[2:7]}
    assert "out of memory" in rows["prefill, 256 tokens"]
    assert "out of memory" in rows["extend, 256 tokens"]
    assert "compiles" in rows["score, 256 tokens"]
    assert any(line.startswith("extend, 256 tokens: ") and "HBM" in line for line in lines)
    assert any(line.startswith("largest chunk: none fits (found by compiling 2 ") for line in lines)
    assert lines[-1].startswith("estimate: ")


@needs_compiler
@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--model", "no-such-model"), 1, "error: no model of the name 'no-such-model': expected a folder"),
        (("--model", "Qwen3-0.6B", "--topology", "v3:2x2"), 1, "error: topology must be a generation (v5e or v6e)"),
        (("--model", "Qwen3-0.6B", "--topology", "v6e:1x1", "--tp-size", "2"), 1, "tp_size=2 need 2 devices, got 1"),
        (("--model", "Qwen3-0.6B", "--attention", "hopper"), 1, "error: attention 'hopper' cannot run here"),
        (("--model", "Qwen3-0.6B", "--num-items", "0"), 2, "--num-items"),
        (("--model", "Qwen3-0.6B", "--dtype", "int8"), 2, "--dtype"),
        (("--model", "Qwen3-0.6B", "--prefix-tokens", "99999"), 1, "hint: prefixwise aot --help lists the options"),
        ((), 2, "error: Missing option '--model'."),
    ],
)
def test_an_error_is_one_line(run_main: RunMain, options: tuple[str, ...], status: int, message: str) -> None:
    ran = run_main("aot", *options)
    assert (ran.status, ran.out) == (status, "")
    assert message in ran.err
    assert ran.err.startswith("error: ")


@pytest.mark.parametrize("verb", [("--model", "Qwen3-0.6B"), ("matrix", "--output-json", "matrix.json")])
def test_a_missing_compiler_is_named_with_the_command_that_installs_it(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    found = util.find_spec("numpy")
    monkeypatch.setattr(aot_run, "find_spec", lambda name: None if name == "libtpu" else found)
    ran = run_main("aot", *verb)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.splitlines() == [
        "error: libtpu is not installed",
        f"hint: install what compiles for TPUs with: {install_command('tpu-aot')}",
    ]


def row(model: str, topology: str, case: str, outcome: str = "compiles") -> dict[str, Any]:
    fits = outcome == "compiles"
    return {
        "model": model,
        "topology": topology,
        "case": case,
        "outcome": outcome,
        "runs": 2,
        "reason": None if fits else "too large",
        "hbm_bytes": {"total": 3 << 30} if fits else None,
        "estimated_seconds": 0.02,
    }


class TestMatrix:
    def test_the_number_of_programs(self) -> None:
        assert len(MATRIX_MODELS) * len(MATRIX_TOPOLOGIES) * len(MATRIX_CASES) == 144

    def test_rows_are_written_one_by_one_and_not_computed_again(
        self, run_main: RunMain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(aot_module, "check_compiler", lambda: None)
        monkeypatch.setattr(aot_module, "versions", lambda: {"jax": "1"})
        output = tmp_path / "matrix.json"
        made: list[str] = []

        def make(model: str, topology: str, case: Any) -> dict[str, Any]:
            if len(made) == 2:
                made.append("cut short")
                raise KeyboardInterrupt
            made.append(case.name)
            return row(model, topology, case.name, "out of memory" if case.kind == "prefill" else "compiles")

        monkeypatch.setattr(aot_module, "matrix_row", make)
        args = ("aot", "matrix", "--output-json", str(output), "--models", "a", "--topologies", "v6e:1x1")
        assert run_main(*args).status == 130
        assert len(MatrixFile.open(output).rows) == 2
        markdown = tmp_path / "matrix.md"
        ran = run_main(*args, "--output-markdown", str(markdown), "--quiet")
        assert (ran.status, ran.err) == (0, ""), "out of memory is an answer"
        assert made == [
            MATRIX_CASES[0].name,
            MATRIX_CASES[1].name,
            "cut short",
            *(case.name for case in MATRIX_CASES[2:]),
        ]
        assert "a      v6e:1x1  3.0, 10.0 ms" in ran.out
        assert "a on v6e:1x1, prefill: too large" in ran.out
        assert markdown.read_text().splitlines()[2].startswith("| a | v6e:1x1 | 3.0, 10.0 ms |")
        assert json.loads(output.read_text())["rows"][0]["versions"] == {"jax": "1"}

    def test_a_program_that_fails_is_the_status(
        self, run_main: RunMain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(aot_module, "check_compiler", lambda: None)
        file = MatrixFile.open(tmp_path / "matrix.json")
        for case in MATRIX_CASES:
            file.add(row("a", "v6e:1x1", case.name, "fails"), {})
        args = ("--output-json", str(file.path), "--models", "a", "--topologies", "v6e:1x1", "--quiet")
        assert run_main("aot", "matrix", *args).status == 1

    @pytest.mark.parametrize("content", ["", "[]", '{"rows": [1]}', '{"rows": {}}x'])
    def test_a_file_that_is_something_else(
        self, run_main: RunMain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
    ) -> None:
        monkeypatch.setattr(aot_module, "check_compiler", lambda: None)
        file = tmp_path / "other.json"
        file.write_text(content)
        ran = run_main("aot", "matrix", "--output-json", str(file))
        assert ran.status == 1
        assert "must be a file of `prefixwise aot matrix`, or not exist yet" in ran.err
        assert file.read_text() == content
