"""One of our backends with its default settings, through `ScoringEngine.score`."""

from __future__ import annotations

import os
from importlib.metadata import version
from time import perf_counter
from typing import Any

from benchmarks.cpu.cases import SEARCH_SEED, Role, draw
from benchmarks.cpu.peer import Peer, Round
from prefixwise import __version__
from prefixwise.contract.parse import parse_score_request
from prefixwise.launch.loading import load_engine
from prefixwise.launch.options import EngineOptions

_WARM_UP_ROUNDS = 2


class Ours(Peer):
    """Every query is new, so no prefix is found again."""

    def __init__(self, role: Role, backend: str = "torch") -> None:
        self._role = role
        self._backend = backend
        self._engine = load_engine(EngineOptions(model=role.model, backend=backend, device="cpu"))

    def prepare(self) -> dict[str, Any]:
        for number in range(_WARM_UP_ROUNDS):
            self.run(SEARCH_SEED + number)
        info = self._engine.backend.info
        return {
            "versions": {"prefixwise": __version__, self._backend: version(self._backend)},
            "settings": {
                "device": info.device,
                "dtype": info.dtype,
                "attention": info.attention,
                "cores": os.cpu_count(),
            },
        }

    def run(self, seed: int) -> Round:
        drawn = draw(self._engine.backend.config.vocab_size, self._role.geometry, seed)
        request = parse_score_request(
            {
                "query": drawn.query,
                "items": list(drawn.items),
                "label_token_ids": list(drawn.labels),
                "apply_softmax": True,
            }
        )
        begin = perf_counter()
        rows = self._engine.score(request).scores
        seconds = perf_counter() - begin
        return Round(len(drawn.items), seconds, [row[0] for row in rows if row is not None])
