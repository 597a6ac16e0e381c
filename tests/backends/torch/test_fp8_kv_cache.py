"""The KV cache in FP8, and that of prefix attention in FP8, without a device: codes and scales, bytes of a block, and
what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.torch.cuda.kv_cache import KVCache
from prefixwise.backends.torch.devices import count_kv_blocks, kv_block_bytes
from prefixwise.backends.torch.fp8 import KVFormat, dequantise_heads, quantise_heads, round_to_fp8
from prefixwise.backends.torch.kernel_choice import check_kv_format
from prefixwise.contract.errors import BackendError
from prefixwise.forward.fp8 import FP8_MAX
from prefixwise.forward.tiles import KEY_TILE
from prefixwise.models.config import ModelConfig

FORMATS: tuple[KVFormat, ...] = get_args(KVFormat)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class TestCodes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
    def test_a_number_is_rounded_once_to_four_bits(self, dtype: torch.dtype, size: float) -> None:
        heads = (size * torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
        codes, exponents = quantise_heads(heads)
        found = dequantise_heads(codes, exponents, torch.float32)
        assert torch.equal(dequantise_heads(codes, exponents, dtype).float(), found), "a number of the dtype"
        largest = heads.float().abs().amax(-1, keepdim=True)
        bound = torch.maximum(heads.float().abs() * 2**-4, largest * 2**-17)  # or half a step of the smallest numbers
        assert ((found - heads.float()).abs() <= bound).all()
        assert (codes.float().abs().amax(-1) >= FP8_MAX / 2).all(), "the least scale"

    def test_the_scale_is_the_least_power_of_two_that_fits(self) -> None:
        largest = torch.tensor([448.0, 448.0 + 2, 447.0, 1.75, 1.7578125, 2.0**-130, 0.0])
        codes, exponents = quantise_heads(largest[:, None].repeat(1, 8))
        assert exponents.tolist() == [127, 128, 127, 119, 120, 1, 1]
        assert torch.isfinite(codes.float()).all()
        assert not codes[-1].float().any()

    def test_without_a_scale_large_numbers_become_the_largest_code(self) -> None:
        numbers = torch.tensor([448.0, 449.0, -1e30, float("inf"), 0.3, 1.0625, 2.0**-10, 0.0])
        assert round_to_fp8(numbers).tolist() == [448, 448, -448, 448, 0.3125, 1, 0, 0]
        assert round_to_fp8(torch.tensor(float("nan"))).isnan()

    def test_a_head_is_alone_with_its_scale(self) -> None:
        heads = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
        codes, exponents = quantise_heads(heads)
        heads[1, 0] *= 1000
        heads[2, 1] = float("nan")
        others = torch.tensor([[True, True], [False, True], [True, False], [True, True]])
        again, same = quantise_heads(heads)
        assert torch.equal(again.view(torch.uint8)[others], codes.view(torch.uint8)[others])
        assert torch.equal(same[others], exponents[others])
        assert torch.isnan(dequantise_heads(again, same, torch.bfloat16)[2, 1]).all()


class TestMemory:
    @pytest.mark.parametrize(("head_size", "times"), [(128, 1.98), (64, 1.96), (256, 1.99)])
    def test_twice_the_blocks_fit_and_scales_count(self, head_size: int, times: float) -> None:
        config, room = replace(QWEN3_06B, head_size=head_size), 8 << 30
        dense, fp8 = (
            count_kv_blocks(kv_block_bytes(config, torch.bfloat16, kv_format), CPU, room) for kv_format in FORMATS[:2]
        )
        assert times < fp8 / dense < 2

    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_a_block_takes_what_is_counted(self, kv_format: KVFormat) -> None:
        config, num_pages = replace(QWEN3_06B, num_layers=3, num_kv_heads=2, head_size=32), 5
        cache = KVCache(
            num_layers=3, num_pages=num_pages, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, device=CPU,
            kv_format=kv_format,
        )  # fmt: skip
        assert cache.num_bytes == num_pages * kv_block_bytes(config, torch.bfloat16, kv_format)
        assert cache.layer(0).has_fp8_queries == (kv_format == "fp8_keys")

    def test_the_contents_of_a_block_are_numbers(self) -> None:
        cache = KVCache(
            num_layers=3, num_pages=4, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, device=CPU, kv_format="fp8"
        )
        _, block = cache.take([KEY_TILE, 5])
        drawn = torch.randn(3, 2, 5, 2, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
        rows = slice(cache.address(block), cache.address(block) + 5)
        codes, exponents = quantise_heads(drawn)
        for number in range(3):
            layer = cache.layer(number)
            assert layer.key_scales is not None
            assert layer.value_scales is not None
            layer.keys[rows], layer.values[rows] = codes[number, 0], codes[number, 1]
            layer.key_scales[:, rows], layer.value_scales[:, rows] = exponents[number, 0].T, exponents[number, 1].T
        assert torch.equal(cache.contents(block), dequantise_heads(codes, exponents, torch.bfloat16))


@pytest.mark.parametrize(
    ("config", "dtype", "device", "needs"),
    [
        (QWEN3_06B, torch.bfloat16, CPU, "a CUDA device, got cpu"),
        (QWEN3_06B, torch.float32, CUDA, "dtype bfloat16 or float16, got torch.float32"),
        (replace(QWEN3_06B, head_size=72), torch.bfloat16, CUDA, "a head_dim that is a multiple of 16, got 72"),
        (replace(QWEN3_06B, pre_norms=False), torch.bfloat16, CUDA, "paged attention, which this model does not have"),
        (replace(QWEN3_06B, is_causal=False), torch.bfloat16, CUDA, "paged attention, which this model does not have"),
        (QWEN3_06B, torch.bfloat16, CUDA, r"compute capability 9\.0 \(Hopper\) or newer, got 8\.0"),
    ],
)
@pytest.mark.parametrize(("kv_format", "option"), [("fp8", "kv_cache_dtype"), ("fp8_keys", "prefix_attention_dtype")])
def test_what_has_no_fp8_kv_cache(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    needs: str,
    kv_format: KVFormat,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(BackendError, match=f"^{option} fp8 needs {needs}.*; expected {option} auto$"):
        check_kv_format(kv_format, config, dtype, device)


def test_products_in_fp8_need_wider_heads_than_codes_with_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    narrow, wider = (replace(QWEN3_06B, head_size=head_size) for head_size in (16, 32))
    check_kv_format("fp8", narrow, torch.bfloat16, CUDA)
    check_kv_format("fp8_keys", wider, torch.bfloat16, CUDA)
    with pytest.raises(BackendError, match=r"^prefix_attention_dtype fp8 needs a head_dim of at least 32, got 16; "):
        check_kv_format("fp8_keys", narrow, torch.bfloat16, CUDA)
