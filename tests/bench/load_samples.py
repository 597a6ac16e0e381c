"""Small requests for load tests: the fake server's vocabulary has 512 ids."""

from __future__ import annotations

from typing import Any

from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadGeometry


def small_requests(seed: int = 0, **changes: Any) -> RequestMaker:
    shape = {"query_tokens": 20, "num_items": 2, "item_tokens": 5, "vocab_size": 512, "distinct_queries": 0}
    return RequestMaker(LoadGeometry(**{**shape, "label_token_ids": [3, 5], **changes}), seed)
