"""The contract workload through the engine: 2000 query tokens, 500 items x 20, Qwen3-0.6B's shape, random weights.

Measured: `ScoringEngine.score` from parsed request to scores, cold prefix (or cached, with `--cached`), median of
`--rounds` after two warm-up rounds; TFLOP/s by the floor's count (linear layers and attention, nothing else) and its
share of the rate that the model's own GEMMs reach in the same run. The last line is JSON.

    python -m benchmarks.contract [--backend jax] [--algorithm prefill_extend] [--batch-invariant] [--cached]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.gemm_rate import gemm_rate
from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise import __version__
from prefixwise.backends.load import load_backend
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.request import ScoreRequest
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.forward.backend import BackendOptions
from prefixwise.models.config import ModelConfig

LABELS = (9454, 2753)


def floor_flops(config: ModelConfig, query_tokens: int, items: int, item_tokens: int, *, cached: bool = False) -> float:
    """What no algorithm can avoid: every token through the linear layers, the prefix seen by itself and the items.

    Of a cached prefix only the items' part.
    """
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    weights = config.model_size * (heads * config.head_size + 3 * config.mlp_size)
    tokens, pairs = items * item_tokens, items * item_tokens * (query_tokens + item_tokens / 2)
    if not cached:
        tokens, pairs = tokens + query_tokens, pairs + query_tokens**2 / 2
    return config.num_layers * (2 * weights * tokens + 4 * config.num_heads * config.head_size * pairs)


def random_request(
    config: ModelConfig, query_tokens: int, items: int, item_tokens: int, *, seed: int = 0, algorithm: str = "auto"
) -> ScoreRequest:
    """Another seed is another query, and other items."""
    random = np.random.default_rng(seed)
    body = {
        "query": random.integers(0, config.vocab_size, query_tokens),
        "items": list(random.integers(0, config.vocab_size, (items, item_tokens))),
        "label_token_ids": [label % config.vocab_size for label in LABELS],
        "apply_softmax": True,
        "algorithm": algorithm,
    }
    return parse_score_request(body)


def make_request(options: argparse.Namespace) -> ScoreRequest:
    geometry = (options.query_tokens, options.items, options.item_tokens)
    return random_request(QWEN3_06B, *geometry, algorithm=options.algorithm)


def measure(engine: ScoringEngine, request: ScoreRequest, rounds: int) -> float:
    """Seconds of a request."""
    found = []
    for _ in range(rounds + 2):
        begin = perf_counter()
        engine.score(request)
        found.append(perf_counter() - begin)
    return median(found[2:])


def measure_parts(engine: ScoringEngine, request: ScoreRequest, rounds: int) -> dict[str, float]:
    """Milliseconds of its parts, each waited for, so that they add up to a little more than the request takes."""
    debugs = [engine.score(replace(request, return_debug=True)).debug or {} for _ in range(rounds)]
    parts: list[Any] = [debug["milliseconds"] for debug in debugs]
    return {name: round(median(each[name] for each in parts), 2) for name in parts[0]}


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """What is run: the backend, the request, how often."""
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--algorithm", default="prefill_extend")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--cached", action="store_true", help="keep the prefix from one round to the next")
    parser.add_argument("--query-tokens", type=int, default=2000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--item-tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)


def make_engine(options: argparse.Namespace) -> ScoringEngine:
    """Random weights; prefixes are cached with `--cached` only."""
    choice = BackendOptions(options.backend, dtype=options.dtype, batch_invariant=options.batch_invariant)
    scheduler = Scheduler(load_backend(random_checkpoint(), choice), SchedulerOptions(prefix_cache=options.cached))
    return ScoringEngine(EngineConfig("random"), scheduler, None)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_request_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    engine, request = make_engine(options), make_request(options)
    info = engine.backend.info
    seconds = measure(engine, request, options.rounds)
    geometry = (options.query_tokens, options.items, options.item_tokens)
    rate = floor_flops(QWEN3_06B, *geometry, cached=options.cached) / seconds
    rows = min(options.items * options.item_tokens, 16_384)
    gemm = gemm_rate(QWEN3_06B, info.name, info.device_kind, rows, info.compute_dtype or info.dtype)
    result = {
        "prefixwise": __version__,
        info.name: version(info.name),
        "backend": info.name,
        "device": info.device,
        "dtype": info.dtype,
        "algorithm": options.algorithm,
        "batch_invariant": options.batch_invariant,
        "cached": options.cached,
        "geometry": geometry,
        "milliseconds": round(1000 * seconds, 2),
        "parts": measure_parts(engine, request, options.rounds),
        "items_per_second": round(options.items / seconds, 1),
        "tflops": round(rate / 1e12, 2),
        "gemm_tflops": round(gemm / 1e12, 2),
        "fraction_of_gemm": round(rate / gemm, 4),
    }
    print(f"{info.name} on {info.device}, {options.algorithm}: {result['milliseconds']} ms {result['parts']}")
    print(
        f"{result['items_per_second']} items/s, {result['tflops']} TFLOP/s, {100 * rate / gemm:.1f} % of the GEMM rate"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
