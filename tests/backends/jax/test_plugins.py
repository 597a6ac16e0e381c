"""Whether JAX is worth asking for an accelerator, judged without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from itemwise.backends.jax import plugins
from itemwise.backends.jax.plugins import may_have_accelerator
from tests.cli.conftest import run_process


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A process that has not imported JAX, with these modules and entry points beside it."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for variable in ("JAX_PLATFORMS", "PJRT_NAMES_AND_LIBRARY_PATHS", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)

    def set_up(*modules: str, advertised: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(plugins, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(plugins, "entry_points", lambda group: advertised if group == "jax_plugins" else ())

    return set_up


def test_not_without_a_plugin(machine: Callable[..., None]) -> None:
    machine("jax", "jaxlib", "torch")
    assert not may_have_accelerator()


@pytest.mark.parametrize("module", ["jax_plugins", "libtpu"])
def test_with_a_module_of_a_plugin(machine: Callable[..., None], module: str) -> None:
    machine(module)
    assert may_have_accelerator()


def test_with_an_advertised_plugin(machine: Callable[..., None]) -> None:
    machine(advertised=("some_plugin",))
    assert may_have_accelerator()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("JAX_PLATFORMS", "proxy"), ("PJRT_NAMES_AND_LIBRARY_PATHS", "mine:/lib.so"), ("TPU_LIBRARY_PATH", "/libtpu.so")],
)
def test_where_the_environment_names_one(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    machine()
    monkeypatch.setenv(variable, value)
    assert may_have_accelerator()


def test_not_where_jax_is_held_to_the_cpu(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine("jax_plugins")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not may_have_accelerator()


def test_a_process_that_has_jax_asks_it(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setitem(sys.modules, "jax", sys)
    assert may_have_accelerator()


def test_the_choice_of_pytorch_on_a_cpu_imports_no_framework() -> None:
    code = (
        "import os, sys; os.environ['JAX_PLATFORMS'] = 'cpu'; from itemwise.backends.base import BackendOptions; "
        "from itemwise.backends.load import choose_backend; print(choose_backend(BackendOptions())[0], "
        "*(name for name in ('jax', 'torch') if name in sys.modules))"
    )
    ran = run_process([sys.executable, "-c", code])
    assert (ran.status, ran.out) == (0, "torch\n"), ran.err
