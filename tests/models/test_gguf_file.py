from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.gguf_file import read_gguf_file
from tests.checkpoints import finish_gguf

WORDS = ["", "a", "naïve", "你好", "🙂", "Ġthe"]
ALIGNMENT = 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(ALIGNMENT)
    for kind, value in (
        ("uint8", 200),
        ("int8", -3),
        ("uint16", 60_000),
        ("int16", -300),
        ("uint32", 2**32 - 1),
    ):
        getattr(writer, f"add_{kind}")(kind, value)
    for kind, value in (("int32", -(2**31)), ("uint64", 2**63), ("int64", -(2**40))):
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", True)
    writer.add_array("words", WORDS)
    writer.add_array("numbers", [3, 1, 4])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    finish_gguf(writer)
    return tmp_path / "model.gguf"


def test_every_kind_of_metadata_is_read(file: Path) -> None:
    metadata = read_gguf_file(file).metadata
    assert metadata["general.architecture"] == "llama"
    assert (metadata["uint8"], metadata["int8"], metadata["uint16"], metadata["int16"]) == (
        200,
        -3,
        60_000,
        -300,
    )
    assert (metadata["uint32"], metadata["int32"]) == (2**32 - 1, -(2**31))
    assert (metadata["uint64"], metadata["int64"]) == (2**63, -(2**40))
    assert (metadata["float32"], metadata["float64"], metadata["bool"]) == (0.5, 0.1, True)
    assert metadata["words"] == WORDS
    assert metadata["numbers"].tolist() == [3, 1, 4]
    assert [row.tolist() for row in metadata["nested"]] == [[1, 2], [3]]


def test_tensors_lie_where_gguf_finds_them(file: Path) -> None:
    tensors = read_gguf_file(file).tensors
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert set(tensors) == set(expected) == {"matrix", "vector"}
    for name, entry in tensors.items():
        assert entry.offset == expected[name].data_offset
        assert entry.offset % ALIGNMENT == 0
        assert entry.shape == expected[name].data.shape
        assert entry.type_id == expected[name].tensor_type


def test_the_embedded_vocabulary_is_that_of_gguf(embedded_reader: gguf.GGUFReader, embedded_path: Path) -> None:
    metadata = read_gguf_file(embedded_path).metadata
    for key, field in embedded_reader.fields.items():
        if not key.startswith("GGUF."):
            value = metadata[key].tolist() if isinstance(metadata[key], np.ndarray) else metadata[key]
            assert value == field.contents(), key


def test_a_file_cut_anywhere_in_its_header_is_called_truncated(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    end_of_header = min(entry.offset for entry in read_gguf_file(file).tensors.values()) - ALIGNMENT
    cut = tmp_path / "cut.gguf"
    for num_bytes in range(4, end_of_header):
        cut.write_bytes(content[:num_bytes])
        with pytest.raises(ModelLoadError, match=rf"cut.gguf is truncated: its .* past its {num_bytes} bytes$"):
            read_gguf_file(cut)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file, say"])
def test_another_kind_of_file_is_called_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model.gguf is not a GGUF file: expected b'GGUF' at its start, got"):
        read_gguf_file(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])  # the last: a file for the other byte order
def test_an_unsupported_version_is_named(file: Path, version: int) -> None:
    content = bytearray(file.read_bytes())
    content[4:8] = struct.pack("<I", version)
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"is GGUF version {version}; supported: 2, 3"):
        read_gguf_file(file)


def test_metadata_of_an_unknown_type_is_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77) + bytes(8))
    with pytest.raises(ModelLoadError, match=r"is damaged: its metadata cannot be read .*id 77"):
        read_gguf_file(path)


def test_bytes_that_are_no_text_are_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(12))
    with pytest.raises(ModelLoadError, match=r"is damaged: its metadata cannot be read .*utf-8"):
        read_gguf_file(path)


def test_an_alignment_of_nothing_is_called_damaged(file: Path) -> None:
    content = file.read_bytes()
    key = b"general.alignment" + struct.pack("<I", 4)
    file.write_bytes(content.replace(key + struct.pack("<I", ALIGNMENT), key + struct.pack("<I", 0)))
    with pytest.raises(ModelLoadError, match="is damaged: its alignment is 0"):
        read_gguf_file(file)
