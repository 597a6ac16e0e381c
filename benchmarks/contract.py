"""The contract workload through the engine: 2000 query tokens, 500 items x 20, Qwen3-0.6B's or another model's shape,
random weights.

Measured: `ScoringEngine.score` from parsed request to scores, cold prefix (or cached, with `--cached`), median of
`--rounds` after two warm-up rounds; TFLOP/s by the floor's count (linear layers and attention, nothing else) and its
share of the rate that the model's own GEMMs reach in the same run. The experts of a token count as one MLP of their
widths together, in both. The last line is JSON.

    python -m benchmarks.contract [--model gemma-2-9b] [--backend jax] [--algorithm packed] [--cached] [--lora-rank 16]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.gemm_rate import gemm_rate
from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint, repeated_checkpoint, write_lora
from prefixwise import __version__
from prefixwise.backends.load import load_backend
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.request import ScoreRequest
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.forward.backend import BackendOptions
from prefixwise.models.config import ModelConfig
from prefixwise.models.sources import describe_model

LABELS = (9454, 2753)
LORA = "adapter"


def floor_flops(config: ModelConfig, query_tokens: int, items: int, item_tokens: int, *, cached: bool = False) -> float:
    """What no algorithm can avoid: every token through the linear layers, the prefix seen by itself and the items.

    Of a cached prefix only the items' part.
    """
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    weights = config.model_size * (heads * config.head_size + 3 * as_dense(config).mlp_size)
    tokens, pairs = items * item_tokens, items * item_tokens * (query_tokens + item_tokens / 2)
    if not cached:
        tokens, pairs = tokens + query_tokens, pairs + query_tokens**2 / 2
    return config.num_layers * (2 * weights * tokens + 4 * config.num_heads * config.head_size * pairs)


def as_dense(config: ModelConfig) -> ModelConfig:
    """The same with one MLP instead of the experts of a token."""
    if config.experts is None:
        return config
    return replace(config, experts=None, mlp_size=config.experts.experts_per_token * config.mlp_size)


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
    return random_request(describe_model(options.model), *geometry, algorithm=options.algorithm)


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
    """What is run: the model, the backend, the request, how often."""
    parser.add_argument("--model", default="Qwen3-0.6B", help="a shape that `prefixwise aot` knows")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--algorithm", default="prefill_extend")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, help="default: the backend's")
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--prefix-attention-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--lora-rank", type=int, default=0, help="score with a LoRA adapter, and without it")
    parser.add_argument("--cached", action="store_true", help="keep the prefix from one round to the next")
    parser.add_argument("--query-tokens", type=int, default=2000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--item-tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)


def make_engine(options: argparse.Namespace) -> ScoringEngine:
    """Random weights; prefixes are cached with `--cached` only. Steps are as long as a server's."""
    choice = BackendOptions(
        options.backend,
        dtype=options.dtype,
        batch_invariant=options.batch_invariant,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        prefix_attention_dtype=options.prefix_attention_dtype,
        max_loras=1 if options.lora_rank else 0,
        max_lora_rank=options.lora_rank or 16,
    )
    config = describe_model(options.model)
    checkpoint = random_checkpoint() if config == QWEN3_06B else repeated_checkpoint(config)
    scheduler = Scheduler(load_backend(checkpoint, choice), SchedulerOptions(prefix_cache=options.cached))
    calibrate(scheduler)
    engine = ScoringEngine(EngineConfig("random"), scheduler, None)
    if options.lora_rank:
        with TemporaryDirectory() as folder:
            write_lora(Path(folder), config, options.lora_rank)
            engine.load_lora(LORA, folder)
    return engine


def calibrate(scheduler: Scheduler) -> None:
    """As a server does after its warm-up. Here the probes compile their programs: repeat until none is left."""
    backend, num_before = scheduler.backend, -1
    while num_before != backend.num_compilations:
        num_before = backend.num_compilations
        scheduler.calibrate()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_request_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    engine, request = make_engine(options), make_request(options)
    info = engine.backend.info
    seconds = without = measure(engine, request, options.rounds)
    if options.lora_rank:
        request = replace(request, model=LORA)
        seconds = measure(engine, request, options.rounds)
    geometry = (options.query_tokens, options.items, options.item_tokens)
    config = engine.backend.config
    rate = floor_flops(config, *geometry, cached=options.cached) / seconds
    rows = min(options.items * options.item_tokens, 16_384)
    gemm = gemm_rate(as_dense(config), info.name, info.device_kind, rows, info.compute_dtype or info.dtype)
    result = {
        "prefixwise": __version__,
        info.name: version(info.name),
        "model": options.model,
        "backend": info.name,
        "device": info.device,
        "dtype": info.dtype,
        "algorithm": options.algorithm,
        "batch_invariant": info.batch_invariant,
        "quantization": info.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "prefix_attention_dtype": options.prefix_attention_dtype,
        "lora_rank": options.lora_rank,
        "milliseconds_without_lora": round(1000 * without, 2),
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
    if options.lora_rank:
        print(f"LoRA of rank {options.lora_rank} costs {100 * (seconds / without - 1):.1f} %")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
