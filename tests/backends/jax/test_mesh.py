from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from prefixwise.backends.jax.mesh import (
    DATA,
    TENSOR,
    P,
    as_argument,
    make_mesh,
    put_replicated,
    put_sharded,
    start_distributed,
)
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.weights import load_weights
from prefixwise.contract.errors import BackendError
from prefixwise.models.sources import open_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def devices() -> list[jax.Device]:
    found = jax.devices("cpu")
    assert len(found) == 8, "tests/conftest.py asks XLA for eight"
    return found


class TestMakeMesh:
    def test_it_takes_the_first_devices_row_by_row(self, devices: list[jax.Device]) -> None:
        mesh = make_mesh(devices, 2, 3)
        assert mesh.axis_names == (DATA, TENSOR)
        assert mesh.devices.tolist() == [devices[:3], devices[3:6]]

    def test_too_few_devices(self, devices: list[jax.Device]) -> None:
        with pytest.raises(BackendError, match="dp_size=3 and tp_size=4 need 12 devices, got 8"):
            make_mesh(devices, 3, 4)

    @pytest.mark.parametrize(("dp_size", "tp_size"), [(0, 1), (1, 0), (-1, -8)])
    def test_sizes_below_one(self, devices: list[jax.Device], dp_size: int, tp_size: int) -> None:
        with pytest.raises(BackendError, match="must be at least 1, got"):
            make_mesh(devices, dp_size, tp_size)


class TestPut:
    ARRAY = np.arange(24, dtype=np.int32).reshape(8, 3)

    def test_a_replicated_array_is_whole_on_every_device(self, devices: list[jax.Device]) -> None:
        array = put_replicated(make_mesh(devices, 2, 4), self.ARRAY)
        assert len(array.addressable_shards) == 8
        assert all(np.array_equal(shard.data, self.ARRAY) for shard in array.addressable_shards)

    def test_a_sharded_array_is_split_as_its_spec_says(self, devices: list[jax.Device]) -> None:
        array = put_sharded(make_mesh(devices, 2, 4), self.ARRAY, P(TENSOR))
        on_device = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        for number, device in enumerate(devices):
            shard = number % 4
            assert np.array_equal(on_device[device], self.ARRAY[2 * shard : 2 * shard + 2])

    @pytest.mark.parametrize(("dp_size", "tp_size"), [(1, 1), (2, 4)])
    def test_a_program_takes_an_argument_as_its_sharding_says(
        self, devices: list[jax.Device], dp_size: int, tp_size: int
    ) -> None:
        mesh = make_mesh(devices[::-1], dp_size, tp_size)  # not the default device
        sharding = NamedSharding(mesh, P(DATA))
        shape = jax.ShapeDtypeStruct(self.ARRAY.shape, self.ARRAY.dtype, sharding=sharding)
        doubled = jax.jit(lambda x: 2 * x).lower(shape).compile()(as_argument(mesh, self.ARRAY, P(DATA)))
        assert doubled.sharding.device_set == set(mesh.devices.flat)
        assert np.array_equal(doubled, 2 * self.ARRAY)


# What jax or a launcher may say of several processes, and what would make jax ask for a TPU pod.
CLUSTER_VARIABLES = (
    "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID",
    "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID",
    "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_ML_PLATFORM",
)  # fmt: skip


@pytest.fixture
def environment(devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets just these of the variables. Jax is in use already, so joining processes fails rather than to wait."""

    def set_variables(**variables: str) -> None:
        for name in CLUSTER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


class TestStartDistributed:
    @pytest.mark.parametrize(
        "variables",
        [
            {},
            {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node1", "SLURM_NTASKS": "1"},
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # a batch script, not one of the tasks
            {"OMPI_COMM_WORLD_SIZE": "1"},
            {"TPU_WORKER_HOSTNAMES": "localhost"},
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # any pod: jax's detection would warn here
        ],
    )
    def test_one_process_has_nothing_to_join(self, environment: Callable[..., None], variables: dict[str, str]) -> None:
        environment(**variables)
        start_distributed()
        assert not jax.distributed.is_initialized()

    @pytest.mark.parametrize(
        "variables",
        [
            {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"},
            {"OMPI_COMM_WORLD_SIZE": "2"},
            {"TPU_WORKER_HOSTNAMES": "host1,host2"},
            {"MEGASCALE_NUM_SLICES": "2"},
        ],
    )
    def test_several_must_be_joined_before_jax_is_used(
        self, environment: Callable[..., None], variables: dict[str, str]
    ) -> None:
        environment(**variables)
        with pytest.raises(BackendError, match=r"cannot join the processes .* must be called before any JAX calls"):
            start_distributed()

    def test_a_tpu_host_that_is_alone_stays_alone(
        self, environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
        environment(TPU_ML_PLATFORM="JAX")
        start_distributed()
        assert not jax.distributed.is_initialized()

    def test_arguments_go_before_the_environment(self, environment: Callable[..., None]) -> None:
        environment(JAX_COORDINATOR_ADDRESS="there:1", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="1")
        with pytest.raises(BackendError, match="got here:2, 3 and 0: "):
            start_distributed("here:2", 3, 0)

    def test_a_number_that_is_none(self, environment: Callable[..., None]) -> None:
        environment(JAX_NUM_PROCESSES="two")
        with pytest.raises(BackendError, match="JAX_NUM_PROCESSES must be a whole number, got 'two'"):
            start_distributed()


def test_two_processes_hold_one_model(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Two processes with two devices each: one told by arguments, one by the environment."""
    folder = checkpoint_of("qwen2")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.backends.jax.one_process", str(folder), "4"]
    environment = {name: value for name, value in os.environ.items() if name not in CLUSTER_VARIABLES}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    named = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    outs = [tmp_path / "0", tmp_path / "1"]
    processes = [
        subprocess.Popen([*command, str(outs[0]), address, "2", "0"], cwd=ROOT, env=environment),
        subprocess.Popen([*command, str(outs[1])], cwd=ROOT, env=environment | named),
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    checkpoint = open_checkpoint(folder)
    placement = HeadPlacement.plan(checkpoint.config.num_heads, checkpoint.config.num_kv_heads, 4)
    weights = load_weights(checkpoint, "float32", make_mesh(jax.devices("cpu"), 1, 4), placement)
    expected = {jax.tree_util.keystr(path): np.asarray(array) for path, array in jax.tree.leaves_with_path(weights)}
    for out in outs:
        gathered = pickle.loads(out.read_bytes())
        assert np.array_equal(gathered["replicated"], np.arange(5))
        for way in ("host", "donated"):
            assert all(np.array_equal(gathered[way + name], array) for name, array in expected.items())
