"""Generations of TPUs, by their published figures. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One chip, which is one device."""

    generation: str  # as a topology spells it
    title: str
    hbm_bytes: int
    flops_per_second: dict[str, float]  # of dense products, by dtype; those of float32 are not published
    bytes_per_second: float  # of HBM


CHIPS = {
    chip.generation: chip
    for chip in (
        Chip("v5e", "TPU v5e", 16 << 30, {"bfloat16": 197e12}, 819e9),
        Chip("v6e", "TPU v6e (Trillium)", 32 << 30, {"bfloat16": 918e12}, 1640e9),
    )
}
