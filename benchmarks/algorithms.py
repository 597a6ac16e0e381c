"""Serial, packed and prefill_extend on one model, interleaved: milliseconds and items per second of each.

Measured: `ScoringEngine.score` from the request to the scores, median over the rounds after one warm-up round, ids in
and softmax out, no prefix cached unless `--cached`. The last line is JSON. On a CPU compare figures of one run only.

    python -m benchmarks.algorithms [--model M] [--query-tokens 200] [--items 50] [--item-tokens 20] [--cached]
"""

from __future__ import annotations

import argparse
import json
import platform
from statistics import median
from time import perf_counter

import numpy as np

from prefixwise import Scorer, __version__
from prefixwise.contract.request import Algorithm

ALGORITHMS: tuple[Algorithm, ...] = ("serial", "packed", "prefill_extend")


def measure(scorer: Scorer, options: argparse.Namespace) -> dict[Algorithm, float]:
    random = np.random.default_rng(0)
    vocabulary = scorer.engine.backend.config.vocab_size
    query = random.integers(0, vocabulary, options.query_tokens)
    items = list(random.integers(0, vocabulary, (options.items, options.item_tokens)))
    seconds: dict[Algorithm, list[float]] = {algorithm: [] for algorithm in ALGORITHMS}
    for _ in range(options.rounds + 1):
        for algorithm, found in seconds.items():
            begin = perf_counter()
            scorer.score(query, items, label_token_ids=[1, 2], apply_softmax=True, algorithm=algorithm)
            found.append(perf_counter() - begin)
    return {algorithm: median(found[1:]) for algorithm, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, .gguf file or hub id; the embedded model when absent")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cached", action="store_true", help="keep the prefix from one round to the next")
    parser.add_argument("--query-tokens", type=int, default=200)
    parser.add_argument("--items", type=int, default=50)
    parser.add_argument("--item-tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with Scorer(options.model, dtype=options.dtype, device=options.device, prefix_cache=options.cached) as scorer:
        info, name = scorer.engine.backend.info, scorer.engine.config.model_name
        print(
            f"{name} on {info.device}, {info.dtype}: {options.query_tokens} + {options.items} x {options.item_tokens}"
        )
        seconds = measure(scorer, options)
    for algorithm, each in seconds.items():
        print(f"  {algorithm:<15} {1000 * each:9.1f} ms {options.items / each:9.1f} items/s")
    result = {
        "prefixwise": __version__,
        "machine": platform.machine(),
        "device": info.device,
        "dtype": info.dtype,
        "model": name,
        "geometry": [options.query_tokens, options.items, options.item_tokens],
        "seconds": seconds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
