"""Whether JAX is worth asking for an accelerator, judged without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from prefixwise.backends.jax import plugins
from prefixwise.backends.jax.plugins import may_have_accelerator, may_have_tpu
from tests.cli.conftest import run_process


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A process that has not imported JAX, with these modules and entry points beside it."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for variable in plugins._VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def set_up(*modules: str, advertised: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(plugins, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(plugins, "entry_points", lambda group: advertised if group == "jax_plugins" else ())

    return set_up


def test_not_without_a_plugin(machine: Callable[..., None]) -> None:
    machine("jax", "jaxlib", "torch")
    assert not may_have_accelerator()


def test_with_a_module_of_a_plugin(machine: Callable[..., None]) -> None:
    machine("jax_plugins")
    assert may_have_accelerator()


@pytest.mark.parametrize("is_there", [False, True])
def test_with_the_library_of_tpus_where_one_may_be(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    machine("libtpu")
    monkeypatch.setattr(plugins, "may_have_tpu", lambda: is_there)
    assert may_have_accelerator() == is_there


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("dev/accel0", "", True),
        ("dev/vfio/3", "", True),
        ("dev/vfio/vfio", "", False),  # of any machine that lends its devices to guests
        ("sys/bus/pci/devices/0000:00:05.0/vendor", "0x1ae0\n", True),
        ("sys/bus/pci/devices/0000:00:05.0/vendor", "0x10de\n", False),
        ("dev/null", "", False),
    ],
)
def test_a_tpu_is_a_device_of_the_machine(tmp_path: Path, name: str, text: str, expected: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert may_have_tpu(tmp_path) == expected


def test_with_an_advertised_plugin(machine: Callable[..., None]) -> None:
    machine(advertised=("some_plugin",))
    assert may_have_accelerator()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_PLATFORMS", "proxy"),
        ("PJRT_NAMES_AND_LIBRARY_PATHS", "mine:/lib.so"),
        ("TPU_LIBRARY_PATH", "/libtpu.so"),
        ("JAX_FORCE_TPU_INIT", "1"),
    ],
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


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_the_choice_of_pytorch_on_a_cpu_imports_no_framework() -> None:
    code = (
        "import os, sys; os.environ['JAX_PLATFORMS'] = 'cpu'; from prefixwise.forward.backend import BackendOptions; "
        "from prefixwise.backends.load import choose_backend; print(choose_backend(BackendOptions())[0], "
        "*(name for name in ('jax', 'torch') if name in sys.modules))"
    )
    ran = run_process([sys.executable, "-c", code])
    assert (ran.status, ran.out) == (0, "torch\n"), ran.err
