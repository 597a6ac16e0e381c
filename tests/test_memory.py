"""Loading never holds a second copy; scoring allocates nothing that grows with the square of the packed length."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prefixwise import PrefixwiseError, Scorer
from prefixwise.models.sources import open_checkpoint
from tests.peak_memory import growth_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LARGE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
STORED = ("BF16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("F32", "F8_E4M3")))


def write_sparse_checkpoint(folder: Path, stored: str) -> Path:
    """301 million weights, all zero, in a file with holes: large to read, nothing to write."""
    folder.mkdir()
    is_quantised = stored == "F8_E4M3"
    quantization = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(LARGE_CONFIG | (quantization if is_quantised else {})))
    d, f, num_layers = (LARGE_CONFIG[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    layer = {
        "input_layernorm.weight": [d],
        **{f"self_attn.{name}_proj.weight": [d, d] for name in "qkvo"},
        "post_attention_layernorm.weight": [d],
        **{f"mlp.{name}_proj.weight": [f, d] for name in ("gate", "up")},
        "mlp.down_proj.weight": [d, f],
    }
    shapes = {"model.embed_tokens.weight": [32_000, d], "model.norm.weight": [d]}
    for number in range(num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    dtypes = {name: "BF16" if is_quantised and "_proj" not in name else stored for name in shapes}
    for name in [name for name, dtype in dtypes.items() if dtype == "F8_E4M3"]:
        shapes[f"{name}_scale_inv"] = [extent // 128 for extent in shapes[name]]
    header, offset = {}, 0
    for name, shape in shapes.items():
        dtype = dtypes.get(name, "F32")
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + offset)
    return folder


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
class TestLoading:
    @pytest.mark.parametrize("stored", STORED)
    def test_a_folder_needs_little_more_than_its_size(self, tmp_path: Path, stored: str) -> None:
        folder = write_sparse_checkpoint(tmp_path / "large", stored)
        size = 2 * open_checkpoint(folder).config.num_parameters
        assert size >= 500e6
        assert growth_of("load", str(folder), "bfloat16") <= 1.3 * size

    def test_a_quantised_file_needs_little_more_than_its_size(self) -> None:
        size = 4 * open_checkpoint(None).config.num_parameters
        assert size >= 500e6
        assert growth_of("load", "embedded", "float32") <= 1.3 * size


class TestScoring:
    NUM_ITEMS = 200  # 200 + 200 x 99 = 20,000 packed tokens
    PAIRS = 20_000**2  # bytes of the smallest quadratic array there could be: a mask, one byte a pair

    @pytest.mark.parametrize("algorithm", ["packed", "prefill_extend"])
    def test_nothing_quadratic_is_allocated(self, checkpoint_of: Callable[[str], Path], algorithm: str) -> None:
        growth = growth_of("score", str(checkpoint_of("qwen3")), algorithm, "segment", str(self.NUM_ITEMS))
        assert growth <= self.PAIRS / 2

    @pytest.mark.parametrize("num_prompts", [64, pytest.param(2000, marks=pytest.mark.slow)])
    def test_the_logits_of_prompts_are_never_in_memory(
        self, checkpoint_of: Callable[[str], Path], num_prompts: int
    ) -> None:
        """Tokens x vocabulary would be 2 KiB for each token of this small model. A token has its results, and its place
        in the plan."""
        growth = growth_of("logprobs", str(checkpoint_of("qwen3")), str(num_prompts))
        assert growth <= 40_000_000 + 100 * 500 * num_prompts

    def test_dense_refuses_and_says_why(self, checkpoint_of: Callable[[str], Path]) -> None:
        scorer = Scorer(checkpoint_of("qwen3"), dtype="float32", mask="dense", chunk_size=0, token_budget=32_768)
        with pytest.raises(PrefixwiseError) as caught:
            scorer.score(list(range(200)), [[1] * 99] * self.NUM_ITEMS, label_token_ids=[3], algorithm="packed")
        assert "a dense mask must cover at most 16384 packed tokens" in str(caught.value)
        assert "got a sequence of" in str(caught.value)
