"""The notebooks in examples/ run, and show what they are committed with, to the last digit that is printed.

Their scores are those of the embedded model in float32. Every CPU agrees on these digits.
"""

from __future__ import annotations

import ast
import io
import json
import runpy
from collections.abc import Iterator, Mapping
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
import pandas
import pytest
from matplotlib import pyplot

from prefixwise.engine.engine import ScoringEngine
from prefixwise.launch.loading import OnProgram, load_engine
from prefixwise.launch.options import EngineOptions
from tests.docs.printed import ROOT, assert_prints

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
Cell = dict[str, Any]


def code_cells(notebook: Any) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def committed(path: Path) -> list[Cell]:
    return code_cells(json.loads(path.read_text(encoding="utf-8")))


def shown(cell: Cell) -> str:
    """What a cell shows, as text."""
    texts = (each.get("text") or each["data"]["text/plain"] for each in cell["outputs"])
    return "\n".join("".join(text) for text in texts)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScoringEngine]:
    """One for all notebooks."""
    with closing(load_engine(EngineOptions(dtype="float32", device="cpu"))) as loaded:
        yield loaded


@pytest.fixture
def as_a_kernel(engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables and plots are shown as in a notebook, and the model is loaded already."""

    def open_engine(options: EngineOptions, on_program: OnProgram | None) -> ScoringEngine:
        assert (options.model, options.dtype, options.device) == (None, "float32", "cpu")
        return engine

    def show() -> None:
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            figure.canvas.draw()
            print(repr(figure))
        pyplot.close("all")

    monkeypatch.setattr("prefixwise.scorer.load_engine", open_engine)
    monkeypatch.setattr(engine, "close", lambda: None)  # other notebooks use it, too
    monkeypatch.setattr(pyplot, "show", show)
    backend = matplotlib.get_backend()
    matplotlib.use("agg")
    with pandas.option_context("display.max_columns", 20):
        yield
    matplotlib.use(backend)


def run(source: str, names: dict[str, Any]) -> str:
    """What a cell prints, and its last expression."""
    statements = ast.parse(source)
    last = statements.body.pop() if isinstance(statements.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(statements, "<cell>", "exec"), names)
        value = (
            eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if isinstance(last, ast.Expr) else None
        )
        if value is not None:
            print(repr(value))
    return printed.getvalue()


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["judge", "rerank_with_pandas", "threshold"]


@pytest.mark.usefixtures("as_a_kernel")
def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Every day one is run, and all are looked at."""
    return test == "test_a_notebook_shows_what_it_is_committed_with" and parameters["path"].stem != "judge"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_is_committed_with(path: Path) -> None:
    names: dict[str, Any] = {}
    for cell in committed(path):
        assert_prints(run("".join(cell["source"]), names), shown(cell))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_was_run(path: Path) -> None:
    """From top to bottom, without an error, and with nothing of the machine that ran it."""
    cells = committed(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    assert [cell["metadata"] for cell in cells] == [{}] * len(cells)
    assert path.stat().st_size < 100_000


def test_results_are_shown_with_bars_and_the_threshold_with_a_plot() -> None:
    (result,) = (cell for cell in committed(EXAMPLES / "rerank_with_pandas.ipynb") if "RerankResult" in shown(cell))
    assert "linear-gradient" in "".join(result["outputs"][0]["data"]["text/html"])
    kinds = [
        set(output.get("data", ())) for cell in committed(EXAMPLES / "threshold.ipynb") for output in cell["outputs"]
    ]
    assert {"image/png", "text/plain"} in kinds


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kernel_gives_the_same(path: Path) -> None:
    executed = runpy.run_path(str(EXAMPLES / "run_notebooks.py"))["executed"]
    for cell, before in zip(code_cells(executed(path)), committed(path), strict=True):
        assert_prints(shown(cell), shown(before))
        kinds = [
            [(each["output_type"], set(each.get("data", ()))) for each in one["outputs"]] for one in (cell, before)
        ]
        assert kinds[0] == kinds[1]
