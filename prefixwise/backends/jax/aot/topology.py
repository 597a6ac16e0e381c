"""`v6e:2x2` to the devices of such a slice, described by the compiler: none of them can hold an array."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from jax.experimental import topologies

from prefixwise.backends.jax.aot.chips import CHIPS, Chip
from prefixwise.backends.jax.devices import DeviceChoice
from prefixwise.contract.errors import BackendError

_MOST_CHIPS_OF_A_HOST = 8


@dataclass(frozen=True)
class Slice:
    """Chips of one generation that are wired to each other."""

    name: str
    chip: Chip
    choice: DeviceChoice

    @property
    def num_chips(self) -> int:
        return len(self.choice.devices)


def describe_slice(name: str) -> Slice:
    """Raises BackendError where there is no such slice."""
    found = re.fullmatch(r"(\w+):([1-9]\d*)x([1-9]\d*)", name)
    if found is None or found[1] not in CHIPS:
        generations = " or ".join(CHIPS)
        raise BackendError(f"topology must be a generation ({generations}) and a grid, as in v6e:2x2, got {name!r}")
    chip, grid = CHIPS[found[1]], (int(found[2]), int(found[3]))
    # Left alone, the compiler takes hosts for four chips each, and does not know the slice of one chip.
    hosts = {"chips_per_host_bounds": [*grid, 1]} if prod(grid) <= _MOST_CHIPS_OF_A_HOST else {}
    try:
        devices = topologies.get_topology_desc(name, platform="tpu", **hosts).devices
    except Exception as error:  # jax and its plugins raise what they like
        first_line = str(error).partition("\n")[0]
        raise BackendError(f"topology {name!r} is none that the compiler knows: {first_line}") from error
    return Slice(name, chip, DeviceChoice("tpu", tuple(devices), memory_bytes=chip.hbm_bytes))
