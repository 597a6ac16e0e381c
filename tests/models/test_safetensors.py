"""Safetensors files: reading them mapped, and writing them in bfloat16."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.safetensors import open_safetensors
from prefixwise.models.weight_cache import bfloat16_bits, write_bfloat16_safetensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 5, generator=generator)
    tensors = {"f32": values, "f16": values.half(), "bf16": values.bfloat16(), "vector": values[0].clone()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def test_float32_and_float16_are_read_as_they_are(file: Path) -> None:
    from safetensors.torch import load_file

    expected, tensors = load_file(file), open_safetensors(file)
    for name, dtype in (("f32", "float32"), ("f16", "float16"), ("vector", "float32")):
        assert tensors[name].dtype == dtype
        rows = tensors[name].read_rows(0, tensors[name].shape[0])
        np.testing.assert_array_equal(rows, expected[name].numpy())


def test_bfloat16_comes_as_its_bits(file: Path) -> None:
    from safetensors.torch import load_file

    tensor = open_safetensors(file)["bf16"]
    assert tensor.dtype == "bfloat16"
    expected = load_file(file)["bf16"].view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(tensor.read_rows(0, 6), expected)


def test_only_the_asked_rows_are_read(file: Path) -> None:
    tensor = open_safetensors(file)["f32"]
    np.testing.assert_array_equal(tensor.read_rows(2, 4), tensor.read_rows(0, 6)[2:4])
    assert tensor.read_rows(3, 3).shape == (0, 5)


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 100])
def test_a_file_cut_in_its_header_is_called_truncated(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelLoadError, match=rf"model.safetensors is truncated: .* the file has {num_bytes}$"):
        open_safetensors(file)


def test_a_file_cut_in_its_data_names_the_tensor(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    expected = rf"is truncated: tensor '\w+' ends at byte {len(content)}, the file has {len(content) - 1}"
    with pytest.raises(ModelLoadError, match=expected):
        open_safetensors(file)


def test_a_file_that_is_not_safetensors_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((4).to_bytes(8, "little") + b"\x80\x02}q.rest")
    with pytest.raises(ModelLoadError, match="is not a safetensors file: its header is not JSON"):
        open_safetensors(path)


def test_a_header_that_is_no_object_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="its header is not a JSON object"):
        open_safetensors(write_raw(tmp_path / "model.safetensors", [1, 2]))


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(ModelLoadError, match="git-lfs pointer, not the weights; run `git lfs pull`"):
        open_safetensors(path)


def test_an_unsupported_dtype_names_the_tensor_and_the_supported_ones(tmp_path: Path) -> None:
    header = {"q": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [0, 2]}}
    path = write_raw(tmp_path / "model.safetensors", header, b"..")
    with pytest.raises(ModelLoadError, match="tensor 'q' is F8_E5M2; supported: F32, F16, BF16, F8_E4M3, U8"):
        open_safetensors(path)


def test_a_shape_that_does_not_fit_its_bytes_names_the_tensor(tmp_path: Path) -> None:
    header = {"q": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}
    path = write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelLoadError, match=r"tensor 'q' of shape \[2, 2\] needs 16 bytes, has 8"):
        open_safetensors(path)


@pytest.mark.parametrize("entry", [1, {}, {"dtype": "F32", "shape": [2], "data_offsets": [0]}])
def test_a_header_that_describes_no_tensor_is_called_damaged(tmp_path: Path, entry: object) -> None:
    path = write_raw(tmp_path / "model.safetensors", {"q": entry}, bytes(8))
    with pytest.raises(ModelLoadError, match=r"is damaged: its header says .* of tensor 'q'"):
        open_safetensors(path)


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


def test_temporary_files_of_a_killed_process_are_removed_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    path = tmp_path / "m[1].safetensors"
    old, young, of_another = (tmp_path / name for name in (f"{path.name}.1.tmp", f"{path.name}.2.tmp", "n.1.tmp"))
    for part in (old, young, of_another):
        part.touch()
    for part in (old, of_another):
        os.utime(part, (0, 0))
    write_bfloat16_safetensors(path, {}, {})
    assert set(tmp_path.iterdir()) == {path, young, of_another}
