"""Scores of a few requests as JSON: of a server, or of the model in this process with TP 2.

    python -m tests.hosts.scores URL
    python -m tests.hosts.scores FOLDER CACHE_DIR

The second needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from prefixwise import Client, Scorer

# Every kind of forward: prefixes that are cached and read again, and sequences.
REQUESTS: list[dict[str, Any]] = [
    {"query": list(range(1, 300)), "items": [[number, 7] for number in range(20)], "algorithm": "prefill_extend"},
    {"query": list(range(1, 300)), "items": [[number, 9] for number in range(3)], "algorithm": "prefill_extend"},
    {"query": [5, 6], "items": [[1], [2, 3], [4]], "algorithm": "packed"},
]


def main(where: str, cache_dir: str | None = None) -> None:
    if where.startswith("http://"):
        with Client(where) as client:
            found = [client.score(**body, label_token_ids=[3, 4]).scores for body in REQUESTS]
    else:
        options: Any = {"backend": "jax", "device": "cpu", "tp_size": 2, "token_budget": 512}
        with Scorer(where, **options, compilation_cache_dir=cache_dir) as scorer:
            found = [scorer.score(**body, label_token_ids=[3, 4]).scores for body in REQUESTS]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
