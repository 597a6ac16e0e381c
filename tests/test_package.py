"""The package as a whole: who may import whom, and what `import prefixwise` costs.

Read from the source, so that an import inside a function counts as much as one at the top.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import prefixwise

ROOT = Path(prefixwise.__file__).parent

# What each room may import of the package, beside itself. Left of `engine` everything is pure.
# docs/architecture.md shows the same table.
ANY = "any"
ALLOWED: dict[str, tuple[str, ...]] = {
    "_version": (),
    "host": (),
    "web": (),
    "contract": (),
    "client": ("contract", "_version"),
    "models": ("contract", "host"),
    "prompts": ("contract", "models"),
    "forward": ("contract", "models"),
    "plan": ("contract", "models", "prompts", "forward"),
    "engine": ("contract", "models", "prompts", "forward", "plan"),
    "backends": ("contract", "models", "forward", "host"),
    "launch": ("contract", "models", "prompts", "forward", "plan", "engine", "backends"),
    "scorer": ("contract", "models", "prompts", "forward", "plan", "engine", "launch"),
    "lm_eval": ("contract", "models", "prompts", "forward", "plan", "engine", "launch", "_version"),
    "aot": ("contract", "models", "prompts", "forward", "plan", "engine", "backends", "launch", "host", "_version"),
    # The server is handed an engine, and does not know how one is made.
    "server": ("contract", "prompts", "engine", "web", "host", "_version"),
    # Messages between its processes hold what requests are made of.
    "server.workers": ("contract", "models", "prompts", "forward", "plan", "engine", "server", "host"),
    # It speaks HTTP to servers; of a model it needs the tokenizer.
    "bench": ("contract", "client", "models", "prompts", "web", "host", "_version"),
    "bench.remote": ("contract", "models", "prompts", "bench", "host", "_version"),
    "batch": ("contract", "client", "models", "engine", "launch", "host", "_version"),
    "cluster": ("contract", "engine", "batch", "server", "launch", "host"),
    "cli": (ANY,),
    "launch_server": ("__main__",),
    "__main__": ("cli",),
}
FRAMEWORKS = {
    "torch": "prefixwise.backends.torch",
    "triton": "prefixwise.backends.torch",
    "jax": "prefixwise.backends.jax",
    "jaxlib": "prefixwise.backends.jax",
    "ray": "prefixwise.cluster",
    "lm_eval": "prefixwise.lm_eval",
}


@dataclass(frozen=True)
class Import:
    """One imported module, where it is imported, and whether importing the importer imports it."""

    importer: str
    imported: str
    line: int
    at_import_time: bool
    for_types: bool = False  # below `if TYPE_CHECKING`

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@cache
def modules() -> dict[str, Path]:
    paths = {path: path.relative_to(ROOT.parent).with_suffix("") for path in sorted(ROOT.rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): path for path, name in paths.items()}


@cache
def imports() -> tuple[Import, ...]:
    found: list[Import] = []
    for module, path in modules().items():
        found += _imports_of(module, ast.parse(path.read_text(encoding="utf-8")), at_import_time=True)
    return tuple(found)


def _imports_of(module: str, node: ast.AST, *, at_import_time: bool, for_types: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        is_deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if isinstance(child, ast.Import | ast.ImportFrom):
            for name in _names(module, child):
                yield Import(module, name, child.lineno, at_import_time, for_types)
        runs_now = at_import_time and not is_deferred and not is_for_types
        yield from _imports_of(module, child, at_import_time=runs_now, for_types=for_types or is_for_types)


def _names(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """`from a import b` is a.b where that is a module of ours, else a."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, f"{module}:{node.lineno} is a relative import; we write them out"
    for alias in node.names:
        submodule = f"{node.module}.{alias.name}"
        yield submodule if submodule in modules() else str(node.module)


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def test_the_source_is_read_as_it_is() -> None:
    """The rules below mean something only if imports are found: three kinds that are surely there."""
    found = {(each.importer, each.imported, each.at_import_time) for each in imports()}
    assert ("prefixwise.backends.torch.backend", "torch", True) in found
    assert ("prefixwise.backends.load", "prefixwise.backends.torch.backend", False) in found
    assert ("prefixwise", "prefixwise.scorer", False) in found


@pytest.mark.parametrize(("framework", "home"), FRAMEWORKS.items())
def test_a_framework_is_imported_in_its_backend_and_nowhere_else(framework: str, home: str) -> None:
    strays = [
        str(each) for each in imports() if is_within(each.imported, framework) and not is_within(each.importer, home)
    ]
    assert strays == []


def test_backends_are_loaded_only_when_chosen() -> None:
    """Nothing imports a framework's room while it is itself imported; of Ray's room what stands on Ray."""
    homes = set(FRAMEWORKS.values())
    strays = [
        str(each)
        for each in imports()
        for home in homes
        if each.at_import_time and is_within(each.imported, home) and not is_within(each.importer, home)
        if home != FRAMEWORKS["ray"] or each.imported in standing_on("ray")
    ]
    assert strays == []


@cache
def standing_on(framework: str) -> frozenset[str]:
    """The modules that cannot be imported without it."""
    at_once = [each for each in imports() if each.at_import_time]
    found: set[str] = set()
    while (
        new := {each.importer for each in at_once if is_within(each.imported, framework) or each.imported in found}
        - found
    ):
        found |= new
    return frozenset(found)


def test_what_stands_on_ray_is_known() -> None:
    assert "prefixwise.cluster.serve_app" in standing_on("ray")
    assert "prefixwise.cluster.options" not in standing_on("ray")


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_stands_before_it(room: str) -> None:
    path = f"prefixwise.{room}"
    assert any(is_within(module, path) for module in modules()), f"{room} is gone"
    allowed = (path, *(f"prefixwise.{other}" for other in ALLOWED[room]))
    inner = [f"prefixwise.{other}" for other in ALLOWED if other.startswith(f"{room}.")]  # has a row of its own
    strays = [
        str(each)
        for each in imports()
        if is_within(each.importer, path) and not any(is_within(each.importer, other) for other in inner)
        if is_within(each.imported, "prefixwise") and ANY not in ALLOWED[room]
        if not any(is_within(each.imported, other) for other in allowed)
        or any(is_within(each.imported, other) for other in inner)
    ]
    assert strays == []


def test_every_room_has_a_row() -> None:
    rooms = {module.split(".")[1] for module in modules() if module != "prefixwise"}
    assert rooms == {room for room in ALLOWED if "." not in room}


def test_the_rows_are_those_of_the_architecture() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| room | may import, beside itself |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    shown = {name.strip("`").replace("/", "."): tuple(re.findall(r"`([\w/]+)`", others)) for name, others in rows}
    assert shown == {room: () if ANY in others else others for room, others in ALLOWED.items()}


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions count; those for the type checker alone do not."""
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for each in imports():
        if each.imported in graph and not each.for_types and each.imported != each.importer:
            graph[each.importer].add(each.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


class TestImport:
    def run(self, code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def test_it_imports_no_framework(self) -> None:
        loaded = self.run("import sys, prefixwise; print(*sys.modules)").split()
        assert not {"torch", "jax", "transformers", "tokenizers", "numpy"} & set(loaded)

    def test_scorer_imports_no_framework_until_a_model_is_loaded(self) -> None:
        loaded = self.run("import sys; from prefixwise import Scorer, ScoreResult; print(*sys.modules)").split()
        assert "prefixwise.engine.engine" in loaded
        assert not {"torch", "jax", "transformers"} & set(loaded)

    def test_public_names_are_all_there(self) -> None:
        assert set(prefixwise.__all__) >= {"AsyncClient", "Client", "PrefixwiseError", "RerankResult", "ScoreResult"}
        assert all(getattr(prefixwise, name) is not None for name in prefixwise.__all__)
        assert prefixwise.Scorer.__module__ == "prefixwise.scorer"

    @pytest.mark.parametrize("name", [name for name in prefixwise.__all__ if name != "__version__"])
    def test_public_names_are_explained(self, name: str) -> None:
        """A class has an example, a result all of its fields, and every method a line at least."""
        kind = getattr(prefixwise, name)
        text = inspect.getdoc(kind) or ""
        if not issubclass(kind, BaseException):
            assert "Examples:" in text
            assert "Args:" in text or "Attributes:" in text
        for field in fields(kind) if is_dataclass(kind) else ():
            assert f"\n    {field.name}: " in text, field.name
        for method, value in inspect.getmembers(kind, lambda each: callable(each) or isinstance(each, property)):
            if not method.startswith("_"):
                assert inspect.getdoc(value), method

    def test_what_public_names_raise_is_public(self) -> None:
        """A user can catch what a docstring names."""
        kinds = (getattr(prefixwise, name) for name in prefixwise.__all__ if name != "__version__")
        texts = [inspect.getdoc(each) or "" for kind in kinds for each in (kind, *vars(kind).values())]
        raised = {error for text in texts for error in re.findall(r"^ +(\w+Error): ", text, re.MULTILINE)}
        assert len(raised) > 3
        assert raised - {"ModuleNotFoundError"} <= set(prefixwise.__all__)

    def test_other_names_are_not(self) -> None:
        with pytest.raises(AttributeError, match="module 'prefixwise' has no attribute 'scoer'"):
            prefixwise.scoer  # noqa: B018


def test_the_long_files_of_the_suite_are_there() -> None:
    """`make test` begins with them: one that was renamed would begin last, and be waited for."""
    root = ROOT.parent
    listed = (root / "tests" / "long_files.txt").read_text(encoding="utf-8").split()
    assert len(set(listed)) == len(listed)
    assert [name for name in listed if not (root / name).is_file()] == []
