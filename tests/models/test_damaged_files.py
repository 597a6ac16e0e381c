"""Damaged model files: each is refused in one line that names it, or read as what was written.

The damage is seeded, so a failure can be repeated: it names its seed. The safetensors library and `gguf` are the
oracles of what a file holds. `slow` runs the same with many more seeds, and atheris where it is installed.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import Checkpoint, StoredTensor
from prefixwise.models.gguf import GgufTensor, open_gguf
from prefixwise.models.hf_folder import open_hf_folder, read_tokenizer_folder
from prefixwise.models.safetensors import open_safetensors
from prefixwise.models.weight_cache import WEIGHT_CACHE_VARIABLE, with_bfloat16_weights
from tests.checkpoints import add_tokenizer, make_gguf
from tests.mutations import damaged, damaged_json, verdict

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (512, 32),
    "model.norm.weight": (32,),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.k_proj.weight": (16, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.mlp.gate_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (32, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 32),
}

EVERYDAY, LONG = 150, 5_000
seeds = pytest.mark.parametrize("num_seeds", [EVERYDAY, pytest.param(LONG, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of 100 KB, with a tokenizer."""
    folder = add_tokenizer(tmp_path_factory.mktemp("whole"), bos=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    numbers = np.random.default_rng(0)
    save_file(
        {name: numbers.standard_normal(shape, np.float32) for name, shape in SHAPES.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A folder of links to it: a test replaces one of them by a damaged file."""
    path = tmp_path / "model"
    path.mkdir()
    for file in whole.iterdir():
        (path / file.name).symlink_to(file)
    return path


@pytest.fixture(scope="module")
def gguf_file(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without its tokenizer, whose 512 tokens would take most of the damage, in blocks of Q8_0."""
    folder = tmp_path_factory.mktemp("gguf")
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(whole / name)
    return make_gguf(folder, folder / "model.gguf", "Q8_0")


def replaced(file: Path, content: bytes) -> Path:
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    return file


def all_rows(tensor: StoredTensor) -> NDArray[Any]:
    return tensor.read_rows(0, tensor.shape[0])


def same_tensors(first: Checkpoint, second: Checkpoint) -> bool:
    return first.tensors.keys() == second.tensors.keys() and all(
        np.array_equal(all_rows(tensor), all_rows(second.tensors[name]), equal_nan=True)
        for name, tensor in first.tensors.items()
    )


def per_seed(num_seeds: int) -> Iterator[Random]:
    for seed in range(num_seeds):
        try:
            yield Random(seed)
        except GeneratorExit:  # the test failed
            print(f"seed {seed}")
            raise


class TestSafetensors:
    @seeds
    def test_what_the_library_refuses_is_refused_and_the_rest_is_read_alike(
        self, whole: Path, tmp_path: Path, num_seeds: int
    ) -> None:
        content = (whole / "model.safetensors").read_bytes()
        header_end = 8 + int.from_bytes(content[:8], "little")
        num_read = 0
        for random in per_seed(num_seeds):
            stop = random.choice((8, header_end, header_end, len(content)))
            changed = damaged(content, random, stop=stop)
            file = replaced(tmp_path / "model.safetensors", changed)
            tensors = verdict(file, lambda: open_safetensors(file), ModelLoadError)  # noqa: B023
            try:
                expected = read_by_library(changed)
            except SafetensorError:
                assert tensors is None
                continue
            if tensors is not None:
                num_read += 1
                assert tensors.keys() == expected.keys()
                for name, tensor in tensors.items():
                    assert all_rows(tensor).tobytes() == bytes(expected[name]["data"])
        assert num_read > num_seeds // 20  # the oracle was asked

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            ([[0, 8], [4, 12]], "begins at byte .*, expected .*without gaps or overlaps"),
            ([[0, 8], [0, 8]], "begins at byte .*, expected .*without gaps or overlaps"),
            ([[4, 12], [12, 20]], "begins at byte .*, expected .*without gaps or overlaps"),
            ([[0, 8], [8, 16]], "its tensors end at byte .*, the file has"),
            ([[0, 8], [-8, 0]], "its header says .* of tensor 'b'"),
            ([[0.0, 8], [8, 16]], "its header says .* of tensor 'a'"),
        ],
        ids=["overlap", "the same bytes", "a gap before", "bytes after", "negative", "not whole"],
    )
    def test_tensors_that_do_not_cover_the_data_are_refused(
        self, tmp_path: Path, offsets: list[list[int]], message: str
    ) -> None:
        entries = {
            name: {"dtype": "F32", "shape": [2], "data_offsets": each} for name, each in zip("ab", offsets, strict=True)
        }
        file = replaced(tmp_path / "model.safetensors", safetensors_file(json.dumps(entries), bytes(20)))
        with pytest.raises(ModelLoadError, match=f"model.safetensors is damaged: .*{message}"):
            open_safetensors(file)
        with pytest.raises(SafetensorError):
            read_by_library(file.read_bytes())

    @pytest.mark.parametrize(
        "header",
        [
            '{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 0]}}',
            '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
            '{"a": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}',
            '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"b": 1}}',
            '{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            '{"a": ' + "[" * 100_000,
            '{"a": {"dtype": "F32", "shape": [1' + "0" * 5000 + '], "data_offsets": [0, 4]}}',
        ],
        ids=["NaN", "true", "minus zero", "metadata", "half a character", "deep", "thousands of digits"],
    )
    def test_a_header_that_the_library_refuses_is_refused(self, tmp_path: Path, header: str) -> None:
        content = safetensors_file(header, bytes(0 if "[0, 0]" in header else 4))
        file = replaced(tmp_path / "model.safetensors", content)
        assert verdict(file, lambda: open_safetensors(file), ModelLoadError) is None
        with pytest.raises(SafetensorError):
            read_by_library(content)

    def test_utf_16_is_no_header(self, tmp_path: Path) -> None:
        text = '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'.encode("utf-16-le")
        file = replaced(tmp_path / "model.safetensors", len(text).to_bytes(8, "little") + text + bytes(4))
        assert verdict(file, lambda: open_safetensors(file), ModelLoadError) is None

    def test_a_name_that_occurs_twice_is_refused(self, tmp_path: Path) -> None:
        entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
        file = replaced(tmp_path / "m.safetensors", safetensors_file(f'{{"a": {entry}, "a": {entry}}}', bytes(4)))
        with pytest.raises(ModelLoadError, match="'a' occurs twice"):
            open_safetensors(file)

    def test_two_files_may_not_hold_the_same_tensor(self, whole: Path, folder: Path) -> None:
        (folder / "model-2.safetensors").symlink_to(whole / "model.safetensors")
        index = {"weight_map": {name: f"model{part}.safetensors" for name, part in (("a", ""), ("b", "-2"))}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelLoadError, match=r"model.safetensors holds the tensor .* another weight file holds"):
            open_hf_folder(folder, "model")


def read_by_library(content: bytes) -> dict[str, dict[str, Any]]:
    return dict(deserialize(content))  # type: ignore[no-untyped-call]


def safetensors_file(header: str, data: bytes) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


class TestGguf:
    @seeds
    def test_it_is_refused_or_every_tensor_stays_where_it_was(
        self, gguf_file: Path, tmp_path: Path, num_seeds: int
    ) -> None:
        content = gguf_file.read_bytes()
        places = places_of(open_gguf(gguf_file))
        header_end = min(offset for offset, _ in places.values())
        num_read = 0
        for random in per_seed(num_seeds):
            stop = random.choice((24, header_end, header_end, len(content)))
            file = replaced(tmp_path / "model.gguf", damaged(content, random, stop=stop))
            checkpoint = verdict(file, lambda: open_gguf(file), ModelLoadError)  # noqa: B023
            if checkpoint is not None:
                num_read += 1
                found = places_of(checkpoint)
                assert found.keys() == places.keys()
                assert len(file.read_bytes()) == len(content)
                assert found == places
                for name, data in read_by_gguf(file).items():
                    assert read_raw(file, *found[name]) == data
        assert num_read > num_seeds // 20

    def test_offsets_must_follow_each_other(self, gguf_file: Path, tmp_path: Path) -> None:
        content = bytearray(gguf_file.read_bytes())
        name = b"blk.0.attn_k.weight"
        at = content.index(name) + len(name) + 4 + 2 * 8 + 4  # behind its dimensions and its type
        offset = int.from_bytes(content[at : at + 8], "little")
        for moved in (offset + 32, offset - 32, 0, 2**64 - 32):
            content[at : at + 8] = moved.to_bytes(8, "little")
            file = replaced(tmp_path / "model.gguf", bytes(content))
            with pytest.raises(
                ModelLoadError, match=r"model.gguf is (damaged: tensor 'blk.0.attn_k.weight' begins|trunc)"
            ):
                open_gguf(file)

    @pytest.mark.parametrize("num_bytes", [1, 4, 32, 64, 4096])
    def test_bytes_before_the_data_are_noticed(self, gguf_file: Path, tmp_path: Path, num_bytes: int) -> None:
        content = gguf_file.read_bytes()
        start = min(offset for offset, _ in places_of(open_gguf(gguf_file)).values())
        file = replaced(tmp_path / "model.gguf", content[:start] + b"\x3c" * num_bytes + content[start:])
        with pytest.raises(ModelLoadError, match=r"model.gguf is damaged: its tensors end at byte \d+, the file has"):
            open_gguf(file)

    def test_bytes_after_the_last_tensor_are_padding(self, tmp_path: Path) -> None:
        """A file that ends with its last tensor, into which as many bytes were inserted as its padding would take."""
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_tensor("rope_freqs.weight", np.ones(5, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        content = (tmp_path / "model.gguf").read_bytes()
        (entry,) = gguf.GGUFReader(tmp_path / "model.gguf").tensors
        start = int(entry.data_offset)
        unpadded = content[: start + 20]
        file = replaced(tmp_path / "model.gguf", unpadded[:start] + bytes(12) + unpadded[start:])
        with pytest.raises(
            ModelLoadError, match=r"model.gguf is damaged: the bytes after its last tensor are not zero"
        ):
            open_gguf(file)

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({"llama.block_count": float("nan")}, "needs a whole number for 'llama.block_count', got nan"),
            ({"llama.attention.head_count": 2.5}, "needs a whole number for 'llama.attention.head_count', got 2.5"),
            ({"llama.context_length": True}, "needs one number for 'llama.context_length', got a bool"),
            ({"llama.rope.freq_base": float("inf")}, "the rotary embedding must be positive, got inf"),
            ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "norm_eps must be a positive number, got nan"),
        ],
    )
    def test_a_count_is_a_whole_number(self, whole: Path, tmp_path: Path, extra: Any, message: str) -> None:
        file = make_gguf(linked(whole, tmp_path), tmp_path / "model.gguf", extra=extra)
        with pytest.raises(ModelLoadError, match=f"model.gguf: .*{message}"):
            open_gguf(file)

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({"tokenizer.ggml.bos_token_id": 512}, "bos_token_id must be an id below 512, got 512"),
            ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id must be an id below 512, got -1"),
            ({"tokenizer.ggml.add_bos_token": "no"}, "add_bos_token must be true or false"),
            ({"tokenizer.chat_template": 7}, "its chat template must be text, got 7"),
            ({"tokenizer.ggml.tokens": "abc"}, "its tokens must be a list of texts"),
            ({"tokenizer.ggml.token_type": 3}, "token_type must be 512 numbers"),
        ],
    )
    def test_its_tokenizer_has_only_ids_that_exist(self, whole: Path, tmp_path: Path, extra: Any, message: str) -> None:
        file = make_gguf(linked(whole, tmp_path, "tokenizer.json"), tmp_path / "model.gguf", extra=extra)
        with pytest.raises(ModelLoadError, match=f"model.gguf: .*{message}"):
            open_gguf(file).read_tokenizer_files()

    @pytest.mark.parametrize("key", ["model", "tokens"])
    def test_a_tokenizer_without_its_main_parts_is_damaged(self, whole: Path, tmp_path: Path, key: str) -> None:
        file = make_gguf(linked(whole, tmp_path, "tokenizer.json"), tmp_path / "model.gguf")
        name = f"tokenizer.ggml.{key}".encode()
        length = len(name).to_bytes(8, "little")
        content = file.read_bytes()
        assert content.count(length + name) == 1
        replaced(file, content.replace(length + name, length + name[:-1] + b"?"))
        with pytest.raises(ModelLoadError, match=f"model.gguf: its tokenizer lacks '{key}'"):
            open_gguf(file).read_tokenizer_files()

    @seeds
    def test_its_tokenizer_is_refused_or_works(self, whole: Path, tmp_path: Path, num_seeds: int) -> None:
        file = make_gguf(linked(whole, tmp_path, "tokenizer.json"), tmp_path / "model.gguf")
        content = file.read_bytes()
        first = content.index(b"tokenizer.ggml")
        stop = first + 14_000
        num_read = 0
        for random in per_seed(num_seeds // 3):
            replaced(file, damaged(content, random, first=first, stop=stop))
            files = verdict(file, lambda: open_gguf(file).read_tokenizer_files(), ModelLoadError)
            num_read += files is not None
        assert 0 < num_read < num_seeds // 3

    def test_arrays_within_arrays_end_somewhere(self, tmp_path: Path) -> None:
        nested = b"".join((9).to_bytes(4, "little") + (1).to_bytes(8, "little") for _ in range(50_000))
        key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little")
        header = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
        file = replaced(tmp_path / "model.gguf", header + key + nested)
        with pytest.raises(ModelLoadError, match=r"model.gguf is damaged: .*arrays within arrays"):
            open_gguf(file)


def linked(whole: Path, tmp_path: Path, *more: str) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", *more):
        (folder / name).symlink_to(whole / name)
    return folder


def places_of(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """First byte and number of bytes of each tensor, by its canonical name."""
    found = {}
    for name, tensor in checkpoint.tensors.items():
        assert isinstance(tensor, GgufTensor)
        found[name] = (tensor.offset, tensor.shape[0] * tensor.row_bytes)
    return found


def read_raw(file: Path, offset: int, num_bytes: int) -> bytes:
    with file.open("rb") as handle:
        handle.seek(offset)
        return handle.read(num_bytes)


def read_by_gguf(file: Path) -> dict[str, bytes]:
    """The bytes that `gguf` finds for the embedding and the norm."""
    names = {"token_embd.weight": "embedding", "output_norm.weight": "final_norm"}
    return {names[each.name]: each.data.tobytes() for each in gguf.GGUFReader(file).tensors if each.name in names}


class TestFolder:
    @seeds
    def test_a_config_is_refused_or_says_the_same(self, whole: Path, folder: Path, num_seeds: int) -> None:
        """Except for numbers, texts and switches of the right kind, which nothing can tell from what was meant."""
        expected = open_hf_folder(whole, "model").config
        content = (whole / "config.json").read_bytes()
        num_read = 0
        for random in per_seed(num_seeds):
            changed = damaged_json(content, random)
            replaced(folder / "config.json", changed)
            checkpoint = verdict(folder, lambda: open_hf_folder(folder, "model"), ModelLoadError)
            if checkpoint is not None and is_wrong_kind(changed):
                num_read += 1
                assert checkpoint.config == expected, changed
        assert num_read

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5, True, "12", [], {}, -1, 0])
    @pytest.mark.parametrize("key", ["num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings"])
    def test_a_count_is_a_whole_number(self, folder: Path, key: str, value: object) -> None:
        replaced(folder / "config.json", json.dumps(CONFIG | {key: value}).encode())
        assert verdict(folder, lambda: open_hf_folder(folder, "model"), ModelLoadError) is None

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 0, "1e4", [], False])
    @pytest.mark.parametrize("kind", ["default", "linear"])
    def test_a_rotary_embedding_has_positive_numbers(self, folder: Path, kind: str, value: object) -> None:
        rope = {"rope_type": "default", "rope_theta": value}
        if kind == "linear":
            rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": value}
        replaced(folder / "config.json", json.dumps(CONFIG | {"rope_parameters": rope}).encode())
        assert verdict(folder, lambda: open_hf_folder(folder, "model"), ModelLoadError) is None

    @seeds
    def test_an_index_is_refused_or_leads_to_the_same_tensors(self, whole: Path, folder: Path, num_seeds: int) -> None:
        expected = open_hf_folder(whole, "model")
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(SHAPES, "model.safetensors")}
        file = folder / "model.safetensors.index.json"
        num_read = 0
        for random in per_seed(num_seeds):
            replaced(file, damaged_json(json.dumps(index).encode(), random))
            checkpoint = verdict(folder, lambda: open_hf_folder(folder, "model"), ModelLoadError)
            if checkpoint is not None:
                num_read += 1
                assert same_tensors(checkpoint, expected)
        assert num_read

    @pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", "a/model.safetensors"])
    def test_an_index_names_files_beside_it(self, folder: Path, name: str) -> None:
        index = {"weight_map": dict.fromkeys(SHAPES, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelLoadError, match=r"index.json: expected the name of a file beside it, got"):
            open_hf_folder(folder, "model")

    @seeds
    def test_a_tokenizer_is_refused_or_works(self, whole: Path, folder: Path, num_seeds: int) -> None:
        file = folder / "tokenizer.json"
        content = (whole / "tokenizer.json").read_bytes()
        num_read = 0
        for random in per_seed(num_seeds // 2):
            replaced(file, damaged_json(content, random))
            num_read += verdict(folder, lambda: read_tokenizer_folder(folder), ModelLoadError) is not None
        assert 0 < num_read < num_seeds // 2

    def test_a_panic_in_the_library_is_one_line(self, whole: Path, folder: Path) -> None:
        raw = json.loads((whole / "tokenizer.json").read_text())
        raw["post_processor"]["special_tokens"] = {}
        file = replaced(folder / "tokenizer.json", json.dumps(raw).encode())
        with pytest.raises(ModelLoadError, match=r"tokenizer.json cannot be read: no entry found for key"):
            read_tokenizer_folder(folder)
        raw = json.loads((whole / "tokenizer.json").read_text())
        raw["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
        replaced(file, json.dumps(raw).encode())
        with pytest.raises(ModelLoadError, match=r"tokenizer.json cannot be read: Precompiled"):
            read_tokenizer_folder(folder)

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
    def test_the_files_beside_the_tokenizer_count_too(self, folder: Path, name: str) -> None:
        (folder / name).write_text("[" * 100_000)
        with pytest.raises(ModelLoadError, match=f"{name} is not JSON"):
            read_tokenizer_folder(folder)

    def test_a_chat_template_is_text(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(ModelLoadError, match=r"chat_template.jinja cannot be read: 'utf-8' codec"):
            read_tokenizer_folder(folder)

    def test_truncation_in_the_file_does_not_hide_the_ids_before_a_text(self, whole: Path, folder: Path) -> None:
        raw = json.loads((whole / "tokenizer.json").read_text())
        raw["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
        replaced(folder / "tokenizer.json", json.dumps(raw).encode())
        assert read_tokenizer_folder(folder).leading_ids == (0,)


def is_wrong_kind(content: bytes) -> bool:
    """True unless a field of the config got another value of its own kind."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return True
    return all(kinds_differ(found.get(key), value) or found.get(key) == value for key, value in CONFIG.items())


def kinds_differ(found: object, meant: object) -> bool:
    if isinstance(meant, dict) and isinstance(found, dict):
        return all(kinds_differ(found.get(key), value) or found.get(key) == value for key, value in meant.items())
    if found is None or (is_number(found) and is_number(meant)):
        return False
    return type(found) is not type(meant)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class TestWeightCache:
    @seeds
    def test_a_damaged_file_never_changes_a_weight(
        self,
        gguf_file: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        num_seeds: int,
    ) -> None:
        monkeypatch.setenv(WEIGHT_CACHE_VARIABLE, str(tmp_path / "weights"))
        caplog.set_level(logging.ERROR, "prefixwise")  # else a warning for every seed
        checkpoint = open_gguf(gguf_file)
        expected = {
            name: all_rows(tensor).tobytes() for name, tensor in with_bfloat16_weights(checkpoint).tensors.items()
        }
        (file,) = (tmp_path / "weights").iterdir()
        content = file.read_bytes()
        for random in per_seed(num_seeds // 3):
            replaced(file, damaged(content, random))
            tensors = with_bfloat16_weights(checkpoint).tensors
            assert {name: all_rows(tensor).tobytes() for name, tensor in tensors.items()} == expected
            assert file.read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("parser", ["gguf", "safetensors"])
def test_atheris_finds_nothing_in_the_parsers_that_we_wrote(parser: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    command = [
        sys.executable,
        "-m",
        "tests.models.fuzz_parsers",
        parser,
        "-max_total_time=30",
        f"-artifact_prefix={tmp_path}/",
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
