"""The devices of a model: a mesh with the axes `data` and `tensor`, arrays put onto it, and how processes join it.

`data` repeats the weights and splits the batch, `tensor` splits heads, MLP columns and the vocabulary. A mesh may
span processes; each of them holds and fills only the arrays on its own devices.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from prefixwise.contract.errors import BackendError

DATA = "data"
TENSOR = "tensor"

P: Callable[..., PartitionSpec] = PartitionSpec  # jax leaves its constructor without types
set_jax_option: Callable[[str, object], None] = jax.config.update  # and this

log = logging.getLogger("prefixwise")


def make_mesh(devices: Sequence[jax.Device], dp_size: int, tp_size: int) -> Mesh:
    """The first `dp_size` x `tp_size` devices as a mesh; further devices are not used."""
    if dp_size < 1 or tp_size < 1:
        raise BackendError(f"dp_size and tp_size must be at least 1, got dp_size={dp_size} and tp_size={tp_size}")
    num_devices = dp_size * tp_size
    if len(devices) < num_devices:
        raise BackendError(
            f"dp_size={dp_size} and tp_size={tp_size} need {num_devices} devices, got {len(devices)}; "
            "lower one of them, or run where there are more devices"
        )
    used = devices[:num_devices]
    if all(device.process_index != jax.process_index() for device in used):
        raise BackendError(
            f"dp_size={dp_size} and tp_size={tp_size} use the first {num_devices} of {len(devices)} devices, "
            "and none of them belongs to this process; start fewer processes, or use more devices"
        )
    return Mesh(np.asarray(used, dtype=object).reshape(dp_size, tp_size), (DATA, TENSOR))


def put_sharded(mesh: Mesh, array: NDArray[Any], spec: PartitionSpec) -> jax.Array:
    """A host array on the mesh, split as `spec` says. Every process must hold all of it, and all the same.

    On a CPU the device may read the host's memory from then on: do not change the array.
    """
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)  # the same, and faster
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def as_argument(mesh: Mesh, array: NDArray[Any], spec: PartitionSpec) -> jax.Array | NDArray[Any]:
    """A host array as an argument of a compiled program, which takes it split as `spec` says; see `put_sharded`.

    One device gets it with the call, which spares the Python of `device_put`.
    """
    return array if mesh.size == 1 else put_sharded(mesh, array, spec)


def put_replicated(mesh: Mesh, array: NDArray[Any]) -> jax.Array:
    """A host array, whole on every device of the mesh; see `put_sharded`."""
    return put_sharded(mesh, array, P())


def start_distributed(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes of a multi-host run; must come before anything else that touches a device.

    Missing arguments come from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or from the launcher
    where jax knows it (Slurm, Open MPI, TPU pods). Does nothing where none of them names several processes, or where
    the processes have joined before. Raises BackendError where they should join and cannot.
    """
    if jax.distributed.is_initialized():
        return
    given = _Processes(coordinator_address, num_processes, process_id).or_else(_Processes.named(os.environ))
    is_expected = given != _Processes() or _launches_several(os.environ)
    if not is_expected and not _may_be_tpu_pod(os.environ):
        return
    try:
        given.join()
    except (RuntimeError, TypeError, ValueError, KeyError, OSError) as error:  # jax's detection raises all of these
        if not is_expected:
            log.info("running on this host alone: %s", error)
            return
        raise BackendError(
            "cannot join the processes of this run: expected a coordinator address, the number of processes and this "
            f"process's id (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), got {given}: {error}"
        ) from error


@dataclass(frozen=True)
class _Processes:
    """The processes of a run; jax detects what is None."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    @classmethod
    def named(cls, environment: Mapping[str, str]) -> _Processes:
        return cls(
            environment.get("JAX_COORDINATOR_ADDRESS"),
            _integer(environment, "JAX_NUM_PROCESSES"),
            _integer(environment, "JAX_PROCESS_ID"),
        )

    def or_else(self, other: _Processes) -> _Processes:
        return _Processes(
            self.coordinator_address if self.coordinator_address is not None else other.coordinator_address,
            self.num_processes if self.num_processes is not None else other.num_processes,
            self.process_id if self.process_id is not None else other.process_id,
        )

    def join(self) -> None:
        """Use jax's detection only where something is missing: in a Kubernetes pod it warns or fails."""
        parts = (self.coordinator_address, self.num_processes, self.process_id)
        detection = None if None in parts else "deactivate"
        set_jax_option("jax_cpu_collectives_implementation", "gloo")
        set_jax_option("jax_enable_preemption_service", False)  # else jax takes SIGTERM, which ends a server
        jax.distributed.initialize(*parts, cluster_detection_method=detection)
        log.info("process %d of %d", jax.process_index(), jax.process_count())

    def __str__(self) -> str:
        return f"{self.coordinator_address}, {self.num_processes} and {self.process_id}"


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise BackendError(f"{name} must be a whole number, got {text!r}") from None


def _launches_several(environment: Mapping[str, str]) -> bool:
    """Has a launcher that jax knows started several processes?"""
    addresses = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES", ""))
    return (
        ("SLURM_STEP_NODELIST" in environment and (_integer(environment, "SLURM_NTASKS") or 1) > 1)
        or (_integer(environment, "OMPI_COMM_WORLD_SIZE") or 1) > 1
        or (_integer(environment, "MEGASCALE_NUM_SLICES") or 1) > 1
        or "," in addresses
    )


def _may_be_tpu_pod(environment: Mapping[str, str]) -> bool:
    """On a Compute Engine TPU only its metadata server knows whether there are more hosts, and jax asks it.

    Importing jax sets the first of these where there are TPU chips, and the second where there are none.
    """
    return "TPU_ML_PLATFORM" in environment and "TPU_SKIP_MDS_QUERY" not in environment
