"""Dequantised weights on disk: the same bits as without them, and never in the way."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from prefixwise import Scorer
from prefixwise.models.safetensors import MappedTensor
from prefixwise.models.sources import open_checkpoint
from prefixwise.models.weight_cache import WEIGHT_CACHE_VARIABLE, weight_cache_folder, with_bfloat16_weights
from tests.checkpoints import make_gguf, make_hf_checkpoint

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 40, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folder_of_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_checkpoint(tmp_path_factory.mktemp("hf") / "llama", "llama", **SHAPE)


@pytest.fixture(scope="module")
def model(folder_of_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Llama's family, whose file has rows in another order than we do."""
    return make_gguf(folder_of_model, tmp_path_factory.mktemp("gguf") / "model.gguf", "Q4_1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WEIGHT_CACHE_VARIABLE, str(tmp_path / "weights"))
    return tmp_path / "weights"


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "prefixwise")


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def all_scores(model: Path, **options: Any) -> list[list[float]]:
    with Scorer(model, device="cpu", dtype="bfloat16", **options) as scorer:
        return scorer.score([1, 2, 3], [[4], [5, 6]], label_token_ids=[7, 8]).scores


def test_matrices_have_the_bits_that_pytorch_rounds_to_and_vectors_stay(model: Path, folder: Path) -> None:
    plain, cached = open_checkpoint(model), with_bfloat16_weights(open_checkpoint(model))
    assert cached.tensors.keys() == plain.tensors.keys()
    assert not cached.quantised
    for name, tensor in plain.tensors.items():
        numbers = torch.from_numpy(np.array(tensor.read_rows(0, tensor.shape[0])))
        got = cached.tensors[name].read_rows(0, tensor.shape[0])
        if numbers.dim() == 2:
            assert cached.tensors[name].dtype == "bfloat16"
            numbers = numbers.bfloat16().view(torch.uint16)
        np.testing.assert_array_equal(got, numbers.numpy(), err_msg=name)


def test_scores_are_the_same_bit_for_bit(model: Path, folder: Path) -> None:
    without = all_scores(model, backend="torch", weight_cache=False)
    assert not folder.exists()
    made = all_scores(model, backend="torch")
    file = only_file(folder)
    made_at = file.stat().st_mtime_ns
    assert made == all_scores(model, backend="torch") == without
    assert file.stat().st_mtime_ns == made_at


def test_jax_has_the_same_weights_bit_for_bit(model: Path, folder: Path) -> None:
    import jax

    def weights(*, weight_cache: bool) -> list[Any]:
        with Scorer(model, backend="jax", device="cpu", dtype="bfloat16", weight_cache=weight_cache) as scorer:
            leaves = jax.tree.leaves(scorer.engine.backend._runner.weights)  # type: ignore[attr-defined]
            return [np.asarray(leaf).tobytes() for leaf in leaves]

    without = weights(weight_cache=False)
    assert not folder.exists()
    assert weights(weight_cache=True) == without
    assert only_file(folder)
    assert len(without) > 5


def test_it_is_read_and_not_the_source(model: Path, folder: Path) -> None:
    with_bfloat16_weights(open_checkpoint(model))
    last = with_bfloat16_weights(open_checkpoint(model)).tensors["layers.1.v"]
    assert isinstance(last, MappedTensor)
    assert last.path == only_file(folder)


def test_the_first_use_says_what_it_wrote_and_how_to_turn_it_off(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_bfloat16_weights(open_checkpoint(model))
    with_bfloat16_weights(open_checkpoint(model))
    (said,) = caplog.messages
    assert said.startswith(f"wrote 1 MB to {only_file(folder)}, ")
    assert said.endswith("turn off with --no-weight-cache or PREFIXWISE_WEIGHT_CACHE=off")


def test_others_can_read_it_too(model: Path, folder: Path) -> None:
    with_bfloat16_weights(open_checkpoint(model))
    with safe_open(only_file(folder), "pt") as file:
        assert file.metadata()["source"] == model.name
        assert file.get_tensor("embedding").dtype == torch.bfloat16


@pytest.mark.parametrize("keep", [0, 7, 40, 5_000, -1])
def test_a_file_cut_short_is_made_again(model: Path, folder: Path, keep: int) -> None:
    with_bfloat16_weights(open_checkpoint(model))
    file = only_file(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert with_bfloat16_weights(open_checkpoint(model)).tensors["embedding"].dtype == "bfloat16"
    assert only_file(folder).read_bytes() == whole


def zero_a_page(content: bytearray) -> None:
    start = len(content) // 2
    content[start : start + 4096] = bytes(4096)


def zero_all_weights(content: bytearray) -> None:
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = bytes(len(content) - start)


def flip(position: int) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        content[position] ^= 1

    return change


def swap_two_matrices(content: bytearray) -> None:
    """In the header: every byte of the data stays as it is."""
    names = (b'"layers.0.k"', b'"layers.0.v"')
    first, second = (content.index(name) for name in names)
    content[first : first + 12], content[second : second + 12] = names[1], names[0]


@pytest.mark.parametrize(
    "change",
    [zero_a_page, zero_all_weights, swap_two_matrices, flip(-1), flip(-200_001), flip(60)],
    ids=["zeroed page", "zeroed weights", "swapped names", "last bit", "a bit", "a bit of the header"],
)
def test_a_damaged_file_is_made_again_with_a_warning(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture, change: Callable[[bytearray], None]
) -> None:
    with_bfloat16_weights(open_checkpoint(model))
    file = only_file(folder)
    whole, content = file.read_bytes(), bytearray(file.read_bytes())
    change(content)
    assert content != whole
    file.write_bytes(content)
    caplog.clear()
    with_bfloat16_weights(open_checkpoint(model))
    assert only_file(folder).read_bytes() == whole
    assert caplog.messages[0].startswith(f"the weight cache's file {file} is damaged and not used: ")
    assert caplog.messages[1].startswith("wrote 1 MB")


def test_a_disk_that_does_not_keep_what_is_written_leaves_the_source(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = iter(range(10_000))  # so that no checksum is found a second time
    monkeypatch.setattr("prefixwise.models.weight_cache.zlib.crc32", lambda *_: next(numbers))
    checkpoint = open_checkpoint(model)
    assert with_bfloat16_weights(checkpoint) is checkpoint
    assert "do not fit their checksums" in caplog.messages[-1]


def test_a_file_of_another_model_is_not_taken(folder_of_model: Path, model: Path, folder: Path, tmp_path: Path) -> None:
    other = make_gguf(folder_of_model, tmp_path / "other.gguf", "Q8_0")
    with_bfloat16_weights(open_checkpoint(model))
    mine = only_file(folder)
    right = mine.read_bytes()
    with_bfloat16_weights(open_checkpoint(other))
    (theirs,) = set(folder.iterdir()) - {mine}
    theirs.replace(mine)
    with_bfloat16_weights(open_checkpoint(model))
    assert mine.read_bytes() == right


def test_a_source_replaced_in_place_with_the_same_size_and_time_is_dequantised_anew(
    folder_of_model: Path, folder: Path, tmp_path: Path
) -> None:
    source = make_gguf(folder_of_model, tmp_path / "model.gguf", "Q4_1")
    with_bfloat16_weights(open_checkpoint(source))
    status = source.stat()
    content = bytearray(source.read_bytes())
    content[-300] ^= 0x80
    source.write_bytes(content)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (source.stat().st_size, source.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    with_bfloat16_weights(open_checkpoint(source))
    assert len(list(folder.iterdir())) == 2


def test_a_source_that_was_only_touched_keeps_its_file(folder_of_model: Path, folder: Path, tmp_path: Path) -> None:
    source = make_gguf(folder_of_model, tmp_path / "model.gguf", "Q4_1")
    with_bfloat16_weights(open_checkpoint(source))
    os.utime(source, ns=(0, 0))
    with_bfloat16_weights(open_checkpoint(source))
    only_file(folder)


def test_where_nothing_can_be_written_one_line_says_so_and_scores_are_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(WEIGHT_CACHE_VARIABLE, str(tmp_path / "file" / "weights"))
    scores = all_scores(model, backend="torch")
    (said,) = caplog.messages
    assert said.startswith("dequantised weights are not cached: ")
    assert scores == all_scores(model, backend="torch", weight_cache=False)


def test_a_write_that_fails_leaves_nothing(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("prefixwise.host.os.fsync", fail)
    checkpoint = open_checkpoint(model)
    assert with_bfloat16_weights(checkpoint) is checkpoint
    assert caplog.messages == ["dequantised weights are not cached: disk full"]
    assert list(folder.iterdir()) == []


def test_it_does_not_take_the_last_of_a_disk(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Usage:
        free = 2 << 20

    monkeypatch.setattr("prefixwise.models.weight_cache.shutil.disk_usage", lambda _: Usage)
    checkpoint = open_checkpoint(model)
    assert with_bfloat16_weights(checkpoint) is checkpoint
    assert caplog.messages == [f"dequantised weights are not cached: 1 MB are needed in {folder}, where 2 MB are free"]


def test_processes_that_start_at_once_all_have_it_whole(model: Path, folder: Path) -> None:
    code = (
        "import sys, hashlib; from prefixwise.models.sources import open_checkpoint; "
        "from prefixwise.models.weight_cache import with_bfloat16_weights; sys.stdin.read(1); "
        "tensors = with_bfloat16_weights(open_checkpoint(sys.argv[1])).tensors; "
        "read = [tensors[name].read_rows(0, tensors[name].shape[0]).tobytes() for name in sorted(tensors)]; "
        "print(tensors['embedding'].dtype, hashlib.sha256(b''.join(read)).hexdigest())"
    )
    command = [sys.executable, "-c", code, str(model)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("!")
        process.stdin.flush()
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert len(answers) == 1
    assert answers.pop().startswith("bfloat16 ")
    only_file(folder)


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16"])
def test_a_file_that_is_not_quantised_needs_none(
    folder_of_model: Path, folder: Path, tmp_path: Path, quant: str
) -> None:
    checkpoint = open_checkpoint(make_gguf(folder_of_model, tmp_path / "model.gguf", quant))
    assert with_bfloat16_weights(checkpoint) is checkpoint
    assert with_bfloat16_weights(open_checkpoint(folder_of_model)).quantised == frozenset()
    assert not folder.exists()


def test_only_who_computes_in_bfloat16_has_it(model: Path, folder: Path) -> None:
    with Scorer(model, backend="torch", device="cpu", dtype="float32"):
        assert not folder.exists()


class TestFolder:
    def test_it_is_in_the_users_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(WEIGHT_CACHE_VARIABLE)
        monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
        assert weight_cache_folder() == Path("/some/cache/prefixwise/weights")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert weight_cache_folder() == Path.home() / ".cache/prefixwise/weights"

    def test_the_environment_names_another_or_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(WEIGHT_CACHE_VARIABLE, "~/weights")
        assert weight_cache_folder() == Path.home() / "weights"
        monkeypatch.setenv(WEIGHT_CACHE_VARIABLE, "off")
        assert weight_cache_folder() is None
