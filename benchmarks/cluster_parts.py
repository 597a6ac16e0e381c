"""What a request costs the hosts of a cluster, part by part: the small figures of docs/scaling.md's arithmetic.

    bytes      of a request of 2000 + 500 x 20 token ids, and of an item of English text
    tokenize   such items with the embedded model's tokenizer, on one core
    key        the front's look at the body: whose cache it wants, about how much work it is (`key_of`)
    order      all replicas in the order in which a query prefers them (`order_replicas`)

Times are CPU time of this process, the least of several rounds. The last line is JSON.

    python -m benchmarks.cluster_parts [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from random import Random
from time import process_time
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core, and before the tokenizers are there

from benchmarks.cpu.__main__ import machine
from benchmarks.goals.__main__ import commit
from benchmarks.text_rows import aligned
from prefixwise import __version__
from prefixwise.bench.files import now_utc
from prefixwise.bench.geometry import PRESETS, RequestMaker
from prefixwise.bench.kinds.load import LoadGeometry
from prefixwise.cluster.exchange import HttpRequest
from prefixwise.cluster.routing import ReplicaLoad, RoutingOptions, key_of, order_replicas
from prefixwise.launch.loading import read_tokenizer
from prefixwise.models.sources import open_checkpoint

VOCABULARY = 151_936  # of Qwen3
REPLICAS = (4, 72, 1000)
_WORDS = """the and that with this have from what were when there your which their said each about them then many some
these would other into more like time could make than first been people over water words called sentence between country
under story important children example together answer against pattern different picture animal mother father morning"""
_WORDS_PER_ITEM = 17
_TIMES = 10  # in a row, so that the clock's own step does not count


def cpu_ms(function: Callable[[], object], rounds: int) -> float:
    """Of one call."""
    best = float("inf")
    for _ in range(rounds):
        begin = process_time()
        for _ in range(_TIMES):
            function()
        best = min(best, (process_time() - begin) / _TIMES)
    return 1000 * best


def measure(rounds: int) -> dict[str, Any]:
    shape = PRESETS["contract"]
    geometry = LoadGeometry(
        query_tokens=shape.query_tokens,
        num_items=shape.num_items,
        item_tokens=shape.item_tokens,
        label_token_ids=[1, 2],
        vocab_size=VOCABULARY,
        distinct_queries=64,
    )
    body = RequestMaker(geometry, seed=1).body(0)
    request = HttpRequest("POST", "/v1/score", body=body)
    random = Random(1)
    texts = [" ".join(random.choices(_WORDS.split(), k=_WORDS_PER_ITEM)) for _ in range(shape.num_items)]
    tokenizer = read_tokenizer(open_checkpoint(None))
    assert tokenizer is not None, "the embedded model has one"
    tokenize_ms = cpu_ms(lambda: tokenizer.encode_many(texts), max(1, rounds // 4))
    num_tokens = len(tokenizer.encode_many(texts).flat)
    return {
        "request_bytes": len(body),
        "request_bytes_per_item": round(len(body) / shape.num_items, 1),
        "text_bytes_per_item": round(sum(map(len, texts)) / len(texts), 1),
        "text_tokens_per_item": round(num_tokens / len(texts), 1),
        "tokenize_us_per_item": round(1000 * tokenize_ms / len(texts), 1),
        "tokenize_tokens_per_second": round(1000 * num_tokens / tokenize_ms),
        "key_ms": round(cpu_ms(lambda: key_of(request), rounds), 3),
        **{f"order_{number}_us": round(1000 * order_ms(number, rounds), 1) for number in REPLICAS},
    }


def order_ms(number: int, rounds: int) -> float:
    loads = {f"replica-{index}": ReplicaLoad(tokens=index % 7 * 1000, step_tokens=16_384) for index in range(number)}
    return cpu_ms(lambda: order_replicas(b"a query's key", loads, RoutingOptions()), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {options.rounds}")
    found = measure(options.rounds)
    print(aligned([[name.replace("_", " "), f"{value:,}"] for name, value in found.items()], left=(0,)))
    about = {"prefixwise": __version__, "commit": commit(), "date": now_utc(), "machine": machine()}
    print(json.dumps({**about, "rounds": options.rounds, **found}))


if __name__ == "__main__":
    main()
