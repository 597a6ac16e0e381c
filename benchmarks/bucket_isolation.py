"""How many items move by a bit when a request grows into another bucket, on a GPU, without `batch_invariant`?

Measured: raw logits of the first n items of a request against the same items among 600 (300 + 600 x 20 tokens,
prefill_extend, three layers, random weights), at the widths of Qwen3-0.6B and of an 8-billion-parameter model. Within a
bucket isolation is promised; this shows what happens across. The last line is JSON.

    python -m benchmarks.bucket_isolation [--backend jax] [--batch-invariant] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.load import load_backend
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import BackendOptions

NARROW = replace(QWEN3_06B, num_layers=3, vocab_size=20_000)
WIDE = replace(NARROW, model_size=4096, mlp_size=12_288, num_heads=32)
COUNTS = (1, 12, 64, 200, 400)
RANDOM = np.random.default_rng(5)
ITEMS = RANDOM.integers(0, 20_000, (600, 20))
QUERY = RANDOM.integers(0, 20_000, 300)


def logits(engine: ScoringEngine, num_items: int) -> NDArray[np.float64]:
    body = {"query": QUERY, "items": list(ITEMS[:num_items]), "label_token_ids": [1, 2, 3]}
    request = parse_score_request({**body, "score_mode": "logit", "algorithm": "prefill_extend"})
    return np.array(engine.score(request).scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--dtype", action="append", help="bfloat16, float16, float32; may be repeated; all")
    asked = parser.parse_args()
    options = BackendOptions(asked.backend, batch_invariant=asked.batch_invariant)
    rows = []
    for config in (NARROW, WIDE):
        for dtype in asked.dtype or ("bfloat16", "float16", "float32"):
            backend = load_backend(random_checkpoint(config), replace(options, dtype=dtype))
            engine = ScoringEngine(EngineConfig("random"), Scheduler(backend), None)
            full = logits(engine, len(ITEMS))
            moved = {n: int((logits(engine, n) != full[:n]).any(1).sum()) for n in COUNTS}
            rows.append({"model_size": config.model_size, "dtype": dtype, "moved": moved})
            print(config.model_size, dtype, ", ".join(f"{count} of {n} moved" for n, count in moved.items()))
            engine.close()
    info = backend.info
    about = {"backend": info.name, "device": info.device, "batch_invariant": asked.batch_invariant}
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
