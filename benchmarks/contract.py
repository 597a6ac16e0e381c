"""The contract workload through the engine: 2000 query tokens, 500 items x 20, Qwen3-0.6B's shape, random weights.

Measured: `ScoringEngine.score` from parsed request to scores, cold prefix, median of `--rounds` after two warm-up
rounds; TFLOP/s by the floor's count (linear layers and attention, nothing else) and its share of the rate that the
model's own matrix products reach in the same run. The last line is JSON.

    python -m benchmarks.contract [--algorithm prefill_extend] [--batch-invariant] [--items 500] [--rounds 10]
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter

import numpy as np
import torch

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from itemwise import __version__
from itemwise.backends.torch.backend import TorchBackend
from itemwise.contract.parse import parse_score_request
from itemwise.contract.request import ScoreRequest
from itemwise.engine.engine import EngineConfig, ScoringEngine
from itemwise.models.config import ModelConfig


def floor_flops(config: ModelConfig, query_tokens: int, items: int, item_tokens: int) -> float:
    """What no algorithm can avoid: every token through the linear layers, the prefix seen by itself and the items."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    weights = config.model_size * (heads * config.head_size + 3 * config.mlp_size)
    tokens = query_tokens + items * item_tokens
    pairs = query_tokens**2 / 2 + items * item_tokens * (query_tokens + item_tokens / 2)
    return config.num_layers * (2 * weights * tokens + 4 * config.num_heads * config.head_size * pairs)


def gemm_rate(config: ModelConfig, device: torch.device, rows: int) -> float:
    """FLOP/s of the model's four matrix products over this many rows, one after the other."""
    d, f, h = config.model_size, config.mlp_size, config.head_size
    shapes = [
        ((config.num_heads + 2 * config.num_kv_heads) * h, d),
        (d, config.num_heads * h),
        (2 * f, d),
        (d, f),
    ]
    dtype = torch.bfloat16
    pairs = [
        (torch.randn(rows, i, device=device, dtype=dtype), torch.randn(o, i, device=device, dtype=dtype))
        for o, i in shapes
    ]
    flops = sum(2 * rows * o * i for o, i in shapes)

    def once() -> float:
        begin = perf_counter()
        for x, weight in pairs:
            torch.nn.functional.linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - begin

    return flops / median([once() for _ in range(12)][2:])


def make_request(options: argparse.Namespace) -> ScoreRequest:
    random = np.random.default_rng(0)
    body = {
        "query": random.integers(0, QWEN3_06B.vocab_size, options.query_tokens),
        "items": list(random.integers(0, QWEN3_06B.vocab_size, (options.items, options.item_tokens))),
        "label_token_ids": [9454, 2753],
        "apply_softmax": True,
        "algorithm": options.algorithm,
    }
    return parse_score_request(body)


def measure(engine: ScoringEngine, request: ScoreRequest, rounds: int) -> float:
    found = []
    for _ in range(rounds + 2):
        begin = perf_counter()
        engine.score(request)
        found.append(perf_counter() - begin)
    return median(found[2:])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="prefill_extend")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--query-tokens", type=int, default=2000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--item-tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    backend = TorchBackend(random_checkpoint(), dtype="bfloat16", batch_invariant=options.batch_invariant)
    seconds = measure(ScoringEngine(EngineConfig("random"), backend, None), make_request(options), options.rounds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = floor_flops(QWEN3_06B, options.query_tokens, options.items, options.item_tokens) / seconds
    gemm = gemm_rate(QWEN3_06B, device, min(options.items * options.item_tokens, 16_384))
    result = {
        "itemwise": __version__,
        "torch": torch.__version__,
        "device": backend.info.device,
        "algorithm": options.algorithm,
        "batch_invariant": options.batch_invariant,
        "geometry": [options.query_tokens, options.items, options.item_tokens],
        "milliseconds": round(1000 * seconds, 2),
        "items_per_second": round(options.items / seconds, 1),
        "tflops": round(rate / 1e12, 2),
        "gemm_tflops": round(gemm / 1e12, 2),
        "fraction_of_gemm": round(rate / gemm, 4),
    }
    print(
        f"{result['device']}, {options.algorithm}: {result['milliseconds']} ms, {result['items_per_second']} items/s,"
    )
    print(f"{result['tflops']} TFLOP/s, {100 * rate / gemm:.1f} % of the GEMM rate of {result['gemm_tflops']} TFLOP/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
