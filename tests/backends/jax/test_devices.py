from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from prefixwise.backends.jax.devices import DeviceChoice, kv_cache_tokens, resolve_dtype, set_compilation_cache
from prefixwise.contract.errors import BackendError
from prefixwise.forward.fp8 import check_fp8_device
from prefixwise.forward.tiles import KEY_TILE
from prefixwise.models.config import ModelConfig
from prefixwise.models.sources import open_checkpoint
from tests.backends.jax.compilations import cache_folder, own_cache


@dataclass(frozen=True)
class Chip:
    """Stands for a device of a machine that is not here."""

    platform: str
    device_kind: str
    num_bytes: int | None = None
    process_index: int = 0
    compute_capability: str = "9.0"

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.num_bytes is None else {"bytes_limit": self.num_bytes}


def choice_of(*chips: Any) -> DeviceChoice:
    return DeviceChoice(chips[0].platform, chips)


class TestChoice:
    @pytest.mark.parametrize("device", ["cpu", "auto"])
    def test_all_devices_of_a_kind(self, device: str) -> None:
        if device == "auto" and jax.default_backend() != "cpu":
            pytest.skip("jax sees an accelerator")
        choice = DeviceChoice.resolve(device)
        assert choice.platform == "cpu"
        assert choice.devices == tuple(jax.devices("cpu"))

    def test_one_by_its_number(self) -> None:
        assert DeviceChoice.resolve("cpu:3").devices == (jax.devices("cpu")[3],)

    @pytest.mark.parametrize("device", ["cpu:8", "cpu:-1", "cpu:one"])
    def test_a_number_that_is_none(self, device: str) -> None:
        with pytest.raises(BackendError, match=f"device '{device}' was asked for, but there are 8, counted from 0"):
            DeviceChoice.resolve(device)

    @pytest.mark.parametrize("device", ["tpu", "rocm", "toaster:1"])
    def test_a_device_that_is_not_here(self, device: str) -> None:
        with pytest.raises(BackendError, match=rf"device '{device}' was asked for, but jax does not have it: ."):
            DeviceChoice.resolve(device)

    @pytest.mark.parametrize("device", ["", ":1"])
    def test_a_device_without_a_name(self, device: str) -> None:
        with pytest.raises(BackendError, match=f"unknown device '{device}'; expected auto, cpu"):
            DeviceChoice.resolve(device)

    @pytest.mark.gpu
    def test_cuda_and_gpu_are_one(self) -> None:
        choice = DeviceChoice.resolve("cuda")
        assert choice == DeviceChoice.resolve("gpu") == DeviceChoice.resolve("auto")
        assert choice.platform == "gpu"
        assert DeviceChoice.resolve("cuda:0").devices == choice.devices[:1]

    def test_the_platform_of_a_cuda_device_is_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As jax calls it depends on the version."""
        asked = []

        def fake_devices(kind: str) -> list[Any]:
            asked.append(kind)
            return [Chip("cuda", "NVIDIA H200")]

        monkeypatch.setattr(jax, "devices", fake_devices)
        assert DeviceChoice.resolve("cuda").platform == "gpu"
        assert asked == ["gpu"]

    def test_titles(self) -> None:
        assert DeviceChoice.resolve("cpu").title(1) == "cpu"
        assert DeviceChoice.resolve("cpu").title(8) == "8 x cpu"
        assert choice_of(Chip("tpu", "TPU v5 lite")).title(4) == "4 x tpu (TPU v5 lite)"

    @pytest.mark.parametrize(
        ("chip", "platform"),
        [
            (Chip("gpu", "NVIDIA H200"), "hopper"),
            (Chip("gpu", "NVIDIA A100", compute_capability="8.0"), "gpu"),
            (Chip("gpu", "NVIDIA B200", compute_capability="10.0"), "gpu"),
            (Chip("gpu", "Tesla V100", compute_capability="7.0"), "other gpu"),
            (Chip("gpu", "AMD MI300X", compute_capability="gfx942"), "other gpu"),
            (Chip("tpu", "TPU v5 lite"), "tpu"),
            (Chip("cpu", "cpu"), "cpu"),
        ],
    )
    def test_kernels_are_for_gpus_that_run_them(self, chip: Chip, platform: str) -> None:
        assert choice_of(chip).kernel_platform == platform

    @pytest.mark.parametrize(
        ("chip", "refused"),
        [
            (Chip("gpu", "NVIDIA H200"), None),
            (Chip("gpu", "NVIDIA L4", compute_capability="8.9"), None),
            (Chip("gpu", "NVIDIA B200", compute_capability="10.0"), None),
            (Chip("gpu", "NVIDIA A100", compute_capability="8.0"), "needs compute capability 8.9 .* got 8.0"),
            (Chip("gpu", "AMD MI300X", compute_capability="gfx942"), "needs a CUDA device, got gpu"),
            (Chip("tpu", "TPU v5 lite"), "needs a CUDA device, got tpu"),
        ],
    )
    def test_fp8_is_for_gpus_that_have_it(self, chip: Chip, refused: str | None) -> None:
        choice = choice_of(chip)
        with nullcontext() if refused is None else pytest.raises(BackendError, match=refused):
            check_fp8_device(choice.platform, choice.capability)


class TestDtype:
    @pytest.mark.parametrize(
        ("dtype", "platform", "resolved"),
        [
            ("auto", "cpu", "float32"),
            ("auto", "gpu", "bfloat16"),
            ("auto", "tpu", "bfloat16"),
            ("bfloat16", "cpu", "bfloat16"),
            ("float16", "gpu", "float16"),
        ],
    )
    def test_auto_depends_on_the_device(self, dtype: str, platform: Any, resolved: str) -> None:
        assert resolve_dtype(dtype, platform) == jnp.dtype(resolved)

    @pytest.mark.parametrize("dtype", ["int8", "float64", ""])
    def test_one_that_we_do_not_have(self, dtype: str) -> None:
        with pytest.raises(BackendError, match=r"unknown dtype .*; expected auto, float32, bfloat16, float16"):
            resolve_dtype(dtype, "cpu")


@pytest.fixture(scope="module")
def config(checkpoint_of: Callable[[str], Path]) -> ModelConfig:
    """With a context of 1,023 tokens: eight pages."""
    return open_checkpoint(checkpoint_of("short")).config


class TestPoolTokens:
    TOKEN_BYTES = 1000

    def tokens(self, config: ModelConfig, choice: DeviceChoice, num_bytes: int | None = None) -> int:
        return kv_cache_tokens(config, self.TOKEN_BYTES, choice, num_bytes)

    @pytest.mark.parametrize(
        ("token_bytes", "tokens"),
        [
            (1000, 4096),  # four contexts of eight pages
            (100_000, (256 << 20) // 100_000),  # 256 MiB
            (500_000, 1024),  # one context, of more than that
            (2 << 20, 512),  # of more than 1 GiB: what that holds of it
        ],
    )
    def test_a_cpu(self, config: ModelConfig, token_bytes: int, tokens: int) -> None:
        assert kv_cache_tokens(config, token_bytes, DeviceChoice.resolve("cpu"), None) == tokens

    def test_a_fifth_of_an_accelerator(self, config: ModelConfig) -> None:
        assert self.tokens(config, choice_of(Chip("gpu", "small", 2_500_000))) == 500
        assert self.tokens(config, choice_of(Chip("tpu", "large", 1_000_000_000))) == 200_000

    def test_a_page_at_least_and_a_million_tokens_at_most(self, config: ModelConfig) -> None:
        assert self.tokens(config, choice_of(Chip("gpu", "tiny", 1000))) == KEY_TILE
        assert self.tokens(config, choice_of(Chip("gpu", "H200", 140 << 30))) == 1 << 20

    def test_of_several_processes_each_asks_a_device_of_its_own(self, config: ModelConfig) -> None:
        chips = Chip("gpu", "far", 5_000_000, process_index=1), Chip("gpu", "near", 2_500_000)
        assert self.tokens(config, choice_of(*chips)) == 500

    def test_a_device_that_does_not_report_its_memory(self, config: ModelConfig) -> None:
        assert (
            kv_cache_tokens(config, 10_000, choice_of(Chip("tpu", "silent")), None) == int(0.2 * (16 << 30)) // 10_000
        )

    @pytest.mark.parametrize("num_bytes", [KEY_TILE * 1000, KEY_TILE * 1000 * 2 - 1, KEY_TILE * 1000 * 100])
    def test_whole_pages_of_the_bytes_that_are_given(self, config: ModelConfig, num_bytes: int) -> None:
        pages = num_bytes // (KEY_TILE * self.TOKEN_BYTES)
        assert self.tokens(config, DeviceChoice.resolve("cpu"), num_bytes) == pages * KEY_TILE

    @pytest.mark.parametrize("num_bytes", [0, KEY_TILE * 1000 - 1])
    def test_less_than_a_page(self, config: ModelConfig, num_bytes: int) -> None:
        with pytest.raises(BackendError, match=rf"at least 128000 \(one page of 128 tokens\), got {num_bytes}"):
            self.tokens(config, DeviceChoice.resolve("cpu"), num_bytes)


class TestCompilationCacheFolder:
    def test_none_on_a_cpu_unless_asked_for(self, tmp_path: Path) -> None:
        with own_cache():
            before = cache_folder()
            set_compilation_cache(None, "cpu")
            assert cache_folder() == before
            set_compilation_cache(str(tmp_path / "a" / "b"), "cpu")
            assert cache_folder() == str(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()
        assert cache_folder() == before

    @pytest.mark.parametrize("platform", ["gpu", "tpu"])
    def test_the_users_cache_folder_on_accelerators(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: Any
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with own_cache():
            set_compilation_cache(None, platform)
            assert cache_folder() == str(tmp_path / "prefixwise" / "compiled")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        with own_cache():
            set_compilation_cache(None, platform)
            assert cache_folder() == str(tmp_path / "home" / ".cache" / "prefixwise" / "compiled")

    def test_a_folder_that_jax_was_told_by_others_stays(self, tmp_path: Path) -> None:
        with own_cache():
            set_compilation_cache(str(tmp_path / "theirs"), "gpu")
            set_compilation_cache(None, "gpu")
            assert cache_folder() == str(tmp_path / "theirs")

    def test_a_home_is_written_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        with own_cache():
            set_compilation_cache("~/compiled", "cpu")
            assert cache_folder() == str(tmp_path / "compiled")

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(BackendError, match=r"must be a folder that can be written, got .*file/cache"):
            set_compilation_cache(str(tmp_path / "file" / "cache"), "cpu")

    def test_without_a_home_nothing_is_cached(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with own_cache():
            before = cache_folder()
            set_compilation_cache(None, "gpu")
            assert cache_folder() == before
        assert "compiled programs are not cached on disk: " in caplog.text
