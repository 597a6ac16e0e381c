"""Is a token's output the same, bit for bit, whatever else is in the batch? One layer, no model around it.

Measured: the largest difference of an item's hidden state between itself alone and itself in a batch, over prefix
lengths (splits), item lengths and chunk sizes, for a layer of Qwen3-0.6B's shape with random weights. Once with the row
tiles of `backends/torch/model.py` held to one size, once with one tile of the size of the batch. The first column must
be 0.0 on a CPU; the second shows what it would be without fixed tiles. On a CUDA device the first column has one tile
of a multiple of 256 rows; a backend tries which row counts give the same bits there. The last line is JSON.

    python -m benchmarks.one_layer_isolation [--device cuda] [--wide]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.torch.attention import Attention, TiledAttention
from prefixwise.backends.torch.backend import CPU_TILE_ROWS, CUDA_TOKEN_MULTIPLE
from prefixwise.backends.torch.linear import pad_rows
from prefixwise.backends.torch.model import Transformer
from prefixwise.backends.torch.varlen import VarlenAttention
from prefixwise.backends.torch.weights import LayerWeights, ModelWeights
from prefixwise.backends.torch.workers import Workers
from prefixwise.contract.ragged import ranges, starts_from_lens
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, Layout, Prefix
from prefixwise.models.config import ModelConfig

WORKERS = Workers(None)
SPLITS = (1, 100, 500, 2000)
ITEM_LENS = (1, 5, 20, 33, 130)
CHUNKS = (1, 2, 3, 8, 64)
CONFIG = replace(QWEN3_06B, num_layers=1, vocab_size=1024)
WIDE_CONFIG = replace(CONFIG, model_size=4096, mlp_size=12_288, num_heads=32)  # as in models of 8 billion parameters


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    generator = torch.Generator(device).manual_seed(0)
    d, f, h = config.model_size, config.mlp_size, config.head_size
    n, k = config.num_heads, config.num_kv_heads

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.04).to(dtype)

    ones = torch.ones(d, dtype=dtype, device=device)
    layer = LayerWeights(
        attention_norm=ones,
        qkv=draw((n + 2 * k) * h, d),
        qkv_bias=None,
        qk_norm=ones[:h].expand(n + k, h),
        o=draw(d, n * h),
        mlp_norm=ones,
        gate_up=draw(2 * f, d),
        down=draw(d, f),
    )
    embedding = draw(config.vocab_size, d)
    return ModelWeights(embedding, (layer,), ones, embedding)


def packed_batch(prefix_len: int, item_lens: list[int], seeds: list[int]) -> ForwardBatch:
    """One packed sequence; item i's tokens follow from seeds[i] alone."""
    block_starts = range(0, prefix_len, KV_BLOCK_SIZE)
    lens = np.array([*(min(KV_BLOCK_SIZE, prefix_len - start) for start in block_starts), *item_lens], np.int64)
    prefix_lens = np.array([*block_starts, *(prefix_len for _ in item_lens)], np.int64)
    runs = zip([0, *seeds], [prefix_len, *item_lens], strict=True)
    pieces = [np.random.default_rng(seed).integers(0, 1024, length) for seed, length in runs]
    starts = starts_from_lens(lens)
    return ForwardBatch(
        layout=Layout.PACKED,
        token_ids=np.concatenate(pieces).astype(np.int32),
        positions=ranges(prefix_lens, lens).astype(np.int32),
        segment_starts=starts,
        prefix_index=np.where(prefix_lens > 0, 0, -1),
        prefix_lens=prefix_lens,
        prefixes=(Prefix(segment=0),),
        sequence_starts=starts[[0, -1]],
        score_tokens=starts[len(block_starts) + 1 :] - 1,
        label_ids=np.zeros((len(item_lens), 1), np.int32),
    )


def hidden_states(transformer: Transformer, batch: ForwardBatch, multiple: int) -> torch.Tensor:
    weights = transformer.weights.embedding
    tiled = weights.device.type == "cpu" or weights.dtype == torch.float32
    attention: Attention = (
        TiledAttention(batch, weights.device, transformer.config.num_heads // 8, WORKERS, dtype=weights.dtype)
        if tiled
        else VarlenAttention(batch, weights.device)
    )
    ids, positions, rows = (
        torch.from_numpy(each).to(weights.device).long()
        for each in (batch.token_ids, batch.positions, batch.score_tokens)
    )
    ids, positions, padded_rows = (
        pad_rows(each, -(-len(each) // multiple) * multiple) for each in (ids, positions, rows)
    )
    with torch.inference_mode():
        return transformer(ids, positions, attention, None, padded_rows, None).hidden[: len(rows)]


def largest_difference(transformer: Transformer, split: int, item_len: int, multiple: int) -> float:
    """An item first in chunks of every size, beside items of all lengths, against itself alone."""
    alone = hidden_states(transformer, packed_batch(split, [item_len], [7]), multiple)[0]
    worst = 0.0
    for chunk in CHUNKS:
        lens = [item_len] + [ITEM_LENS[i % len(ITEM_LENS)] for i in range(chunk - 1)]
        batch = packed_batch(split, lens, [7, *range(100, 99 + chunk)])
        worst = max(worst, float((hidden_states(transformer, batch, multiple)[0] - alone).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--wide", action="store_true", help="a layer of an 8-billion-parameter model's widths")
    options = parser.parse_args()
    device, config = torch.device(options.device), WIDE_CONFIG if options.wide else CONFIG
    tile_rows, multiple = (CPU_TILE_ROWS, 1) if device.type == "cpu" else (None, CUDA_TOKEN_MULTIPLE)
    rows: list[dict[str, Any]] = []
    print(f"{'dtype':<9} {'prefix':>6} {'item':>5} {'held':>10} {'not held':>10}")
    for dtype in (torch.float32, torch.bfloat16):
        weights = random_weights(config, dtype, device)
        held, loose = Transformer(config, weights, tile_rows, WORKERS), Transformer(config, weights, None, WORKERS)
        for split in SPLITS:
            for item_len in ITEM_LENS:
                exact = largest_difference(held, split, item_len, multiple)
                other = largest_difference(loose, split, item_len, 1)
                name = str(dtype).removeprefix("torch.")
                rows.append({"dtype": name, "split": split, "item": item_len, "held": exact, "not_held": other})
                print(f"{name:<9} {split:>6} {item_len:>5} {exact:>10.2g} {other:>10.2g}")
    worst = {name: max(row[name] for row in rows) for name in ("held", "not_held")}
    print(json.dumps({"device": str(device), "torch": torch.__version__, "worst": worst, "rows": rows}))


if __name__ == "__main__":
    main()
