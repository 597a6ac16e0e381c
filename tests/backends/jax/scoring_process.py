"""One of several processes that score together: each is given the same requests, and each has the whole answer.

    python -m tests.backends.jax.scoring_process FOLDER DP_SIZE TP_SIZE WARMUP OUT

The environment says who takes part (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prefixwise import Scorer

QUERY = [5, 6, 7, 8, 9] * 30
ITEMS = [[i, i + 1, i + 2][: i % 4] for i in range(11)]


def all_scores(folder: str, **options: Any) -> list[object]:
    """Every algorithm, with probabilities over the vocabulary."""
    scorer = Scorer(folder, backend="jax", device="cpu", dtype="float32", **options)
    return [
        scorer.score(QUERY, ITEMS, label_token_ids=[3, 500], algorithm=algorithm).scores
        for algorithm in ("serial", "packed", "prefill_extend")
    ]


if __name__ == "__main__":
    folder, dp_size, tp_size, warmup, out = sys.argv[1:]
    sizes = {"dp_size": int(dp_size), "tp_size": int(tp_size), "token_budget": 512}
    found = all_scores(folder, **sizes, warmup=warmup)
    Path(out).write_text(json.dumps(found))
