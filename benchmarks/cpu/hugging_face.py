"""Hugging Face transformers, in the dtype that we choose for this CPU: behind a prefix cache, and on whole sequences.

Both compute the head at the last position alone. Items have one length, so that no batch is padded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import transformers

from benchmarks.cpu.cases import SEARCH_SEED, Drawn, Role, draw
from benchmarks.cpu.contender import Contender, Round, fastest
from itemwise.backends.torch.devices import resolve_dtype

_ATTENTION = "sdpa"


class HuggingFace(Contender):
    """A model of theirs, and the size of its batches."""

    def __init__(self, role: Role) -> None:
        self._role = role
        dtype = resolve_dtype("auto", torch.device("cpu"))
        auto = transformers.AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(role.model, dtype=dtype, attn_implementation=_ATTENTION).eval()
        self._batch_size = self.batch_sizes[0]

    @property
    @abstractmethod
    def batch_sizes(self) -> Sequence[int]:
        """Those that are tried."""

    @abstractmethod
    def score(self, drawn: Drawn, num_items: int) -> torch.Tensor:
        """Logits [I, L] of the labels after the first items."""

    @property
    def num_timed(self) -> int:
        """Items of a round."""
        return self._role.geometry[1]

    def prepare(self) -> dict[str, Any]:
        self._time(SEARCH_SEED, self.batch_sizes[0])  # the first call of a model is slower than all that follow
        self._batch_size, tried = fastest(self.batch_sizes, self._rate)
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "settings": {
                "dtype": str(self._model.dtype).removeprefix("torch."),
                "attention": _ATTENTION,
                "threads": torch.get_num_threads(),
                "batch_size": self._batch_size,
                "timed_items": self.num_timed,
            },
            "items_per_second_by_batch_size": tried,
        }

    def run(self, seed: int) -> Round:
        return self._time(seed, self.num_timed)

    def _rate(self, batch_size: int) -> float:
        self._batch_size = batch_size
        return self._time(SEARCH_SEED, max(batch_size, self._least_items())).rate

    def _least_items(self) -> int:
        """So many that what is done once for all items does not decide a search."""
        return 1

    def _time(self, seed: int, num_items: int) -> Round:
        drawn = draw(self._model.config.vocab_size, self._role.geometry, seed)
        begin = perf_counter()
        with torch.inference_mode():
            probabilities = self.score(drawn, num_items).float().softmax(-1)[:, 0]
        return Round(num_items, perf_counter() - begin, probabilities.tolist())

    def _batches(self, drawn: Drawn, num_items: int) -> Sequence[torch.Tensor]:
        items = torch.from_numpy(drawn.items[:num_items])
        return [items[start : start + self._batch_size] for start in range(0, num_items, self._batch_size)]


class PrefixCache(HuggingFace):
    """The query once; its keys and values are expanded to every batch, which costs one copy of them."""

    @property
    def batch_sizes(self) -> Sequence[int]:
        return self._role.scale.prefix_batches

    def score(self, drawn: Drawn, num_items: int) -> torch.Tensor:
        query = torch.from_numpy(drawn.query)[None]
        cache = self._model(query, use_cache=True, logits_to_keep=1).past_key_values
        kept = [(layer.keys, layer.values) for layer in cache.layers]
        found = []
        for batch in self._batches(drawn, num_items):
            for layer, (keys, values) in zip(cache.layers, kept, strict=True):
                layer.keys, layer.values = (each.expand(len(batch), -1, -1, -1) for each in (keys, values))
            logits = self._model(batch, past_key_values=cache, logits_to_keep=1).logits
            found.append(logits[:, -1, list(drawn.labels)])
        return torch.cat(found)

    def _least_items(self) -> int:
        return self.num_timed  # a round as it will be: the query's share is the same for every size


class FullSequences(HuggingFace):
    """Every item behind its own copy of the query. A round is over whole batches, about `Scale.full_items` in all."""

    @property
    def batch_sizes(self) -> Sequence[int]:
        return self._role.scale.full_batches

    @property
    def num_timed(self) -> int:
        batches = max(1, self._role.scale.full_items // self._batch_size)
        return min(batches * self._batch_size, self._role.geometry[1])

    def score(self, drawn: Drawn, num_items: int) -> torch.Tensor:
        query = torch.from_numpy(drawn.query)
        found = []
        for batch in self._batches(drawn, num_items):
            whole = torch.cat([query.expand(len(batch), -1), batch], dim=1)
            logits = self._model(whole, use_cache=False, logits_to_keep=1).logits
            found.append(logits[:, -1, list(drawn.labels)])
        return torch.cat(found)
