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
from benchmarks.cpu.peer import Peer, Round, fastest
from prefixwise.backends.torch.devices import resolve_dtype

_ATTENTION = "sdpa"


class HuggingFace(Peer):
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
    def read(self, query: torch.Tensor) -> Any:
        """What is done once for all items."""

    @abstractmethod
    def last_logits(self, read: Any, items: torch.Tensor) -> torch.Tensor:
        """Logits [I, 1, V] after each item of a batch."""

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
        """Of one batch; what is done once for all items is the same for every size."""
        drawn = self._draw(SEARCH_SEED)
        items = torch.from_numpy(drawn.items[:batch_size])
        with torch.inference_mode():
            read = self.read(torch.from_numpy(drawn.query))
            begin = perf_counter()
            self.last_logits(read, items)
        return len(items) / (perf_counter() - begin)

    def _time(self, seed: int, num_items: int) -> Round:
        drawn, size = self._draw(seed), self._batch_size
        items, labels = torch.from_numpy(drawn.items[:num_items]), list(drawn.labels)
        begin = perf_counter()
        with torch.inference_mode():
            read = self.read(torch.from_numpy(drawn.query))
            found = [self.last_logits(read, items[at : at + size])[:, -1, labels] for at in range(0, num_items, size)]
            probabilities = torch.cat(found).float().softmax(-1)[:, 0]
        return Round(num_items, perf_counter() - begin, probabilities.tolist())

    def _draw(self, seed: int) -> Drawn:
        return draw(self._model.config.vocab_size, self._role.geometry, seed)


class PrefixCache(HuggingFace):
    """The query once; its keys and values are expanded to every batch, which costs one copy of them."""

    @property
    def batch_sizes(self) -> Sequence[int]:
        return self._role.scale.prefix_batches

    def read(self, query: torch.Tensor) -> Any:
        """The cache, and its keys and values in each layer."""
        cache = self._model(query[None], use_cache=True, logits_to_keep=1).past_key_values
        return cache, [(layer.keys, layer.values) for layer in cache.layers]

    def last_logits(self, read: Any, items: torch.Tensor) -> torch.Tensor:
        cache, kept = read
        for layer, (keys, values) in zip(cache.layers, kept, strict=True):
            layer.keys, layer.values = (each.expand(len(items), -1, -1, -1) for each in (keys, values))
        logits: torch.Tensor = self._model(items, past_key_values=cache, logits_to_keep=1).logits
        return logits


class FullSequences(HuggingFace):
    """Every item behind its own copy of the query. A round is over whole batches, about `Scale.full_items` in all."""

    @property
    def batch_sizes(self) -> Sequence[int]:
        return self._role.scale.full_batches

    @property
    def num_timed(self) -> int:
        batches = max(1, self._role.scale.full_items // self._batch_size)
        return min(batches * self._batch_size, self._role.geometry[1])

    def read(self, query: torch.Tensor) -> Any:
        return query

    def last_logits(self, read: Any, items: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([read.expand(len(items), -1), items], dim=1)
        logits: torch.Tensor = self._model(whole, use_cache=False, logits_to_keep=1).logits
        return logits
