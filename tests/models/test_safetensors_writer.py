from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from prefixwise.models.safetensors_writer import bfloat16_bits, write_bfloat16_safetensors


def test_numbers_are_rounded_as_pytorch_rounds_them() -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    edges = [0, 0x80000000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x00000001, 0x007FFFFF]
    numbers = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    expected = torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(bfloat16_bits(numbers), expected)


def test_what_is_no_number_stays_none() -> None:
    numbers = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert torch.from_numpy(bfloat16_bits(numbers)).view(torch.bfloat16).isnan().all()


def test_parts_that_a_killed_process_left_are_removed_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    path = tmp_path / "m[1].safetensors"
    old, young, of_another = (tmp_path / name for name in (f"{path.name}.1.part", f"{path.name}.2.part", "n.1.part"))
    for part in (old, young, of_another):
        part.touch()
    for part in (old, of_another):
        os.utime(part, (0, 0))
    write_bfloat16_safetensors(path, {}, {})
    assert set(tmp_path.iterdir()) == {path, young, of_another}
