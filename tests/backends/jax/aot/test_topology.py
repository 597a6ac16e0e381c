from __future__ import annotations

import os
from importlib import util

import pytest

from prefixwise.backends.jax.aot import environment
from prefixwise.backends.jax.aot.chips import CHIPS
from prefixwise.backends.jax.aot.environment import missing_packages, prepare_compiler
from prefixwise.contract.errors import BackendError
from tests.backends.jax.aot.conftest import Describe


@pytest.mark.parametrize(
    "name", ["", "v6e", "v6e:", "v6e:2", "v6e:0x1", "v6e:2x2x2", "v4:2x2", "v7:2x2", "tpu", "v6e:2x2 "]
)
def test_a_topology_that_is_none(describe: Describe, name: str) -> None:
    with pytest.raises(BackendError, match=r"topology must be a generation \(v5e or v6e\) and a grid, as in v6e:2x2"):
        describe(name)


def test_a_grid_that_the_compiler_does_not_know(describe: Describe) -> None:
    with pytest.raises(BackendError, match=r"topology 'v6e:3x5' is none that the compiler knows: ."):
        describe("v6e:3x5")


@pytest.mark.parametrize(("topology", "num_chips"), [("v6e:1x1", 1), ("v5e:2x2", 4), ("v6e:2x4", 8), ("v6e:4x4", 16)])
def test_a_slice_has_the_chips_of_its_grid(describe: Describe, topology: str, num_chips: int) -> None:
    backend = describe(topology)
    chip = CHIPS[topology[:3]]
    assert backend.assembly.mesh.size == num_chips
    assert backend.info.device_kind == "tpu"
    assert {device.platform for device in backend.assembly.mesh.devices.flat} == {"tpu"}
    assert chip.hbm_bytes in (16 << 30, 32 << 30)


def test_a_fifth_of_the_memory_is_for_prefixes(describe: Describe) -> None:
    info = describe("v5e:1x1", prefix_cache_bytes=None).info
    assert info.num_kv_blocks * info.kv_block_bytes <= 0.2 * (16 << 30)
    assert info.attention == "pallas_tpu"


def test_no_tpu_is_looked_for(describe: Describe) -> None:
    describe("v6e:1x1")
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"


@pytest.mark.parametrize("package", ["jax", "libtpu"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = util.find_spec("numpy")
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == package else found)
    assert missing_packages() == [package]
    with pytest.raises(BackendError, match=rf"needs {package}; install it with: pip install .*jax.tpu"):
        prepare_compiler()
