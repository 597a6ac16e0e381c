"""The truth that scores are held against: Hugging Face transformers on the full sequence of every item, in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prefixwise.backends.torch.devices import DTYPES, native_cpu_dtypes
from tests.checkpoints import quick_gguf_reader

Floats = NDArray[np.float64]

# How close float32 must come (design: How exact).
PROBABILITY_BOUND = 1e-5  # softmax, prob, sigmoid
LOGIT_BOUND = 1e-4  # logit, logit_diff, logprob


def is_emulated(dtype: str) -> bool:
    """Does PyTorch compute in float32 here, on weights that are rounded to this dtype? Where it does, by the path of
    float32 (`backends/torch/test_backend.py` holds it to that), a few cases will do."""
    return DTYPES[dtype] not in native_cpu_dtypes()


def bound_of(mode: str) -> float:
    return PROBABILITY_BOUND if mode in ("softmax", "prob", "sigmoid") else LOGIT_BOUND


@dataclass(frozen=True)
class Reference:
    """A transformers model, asked one sequence at a time, so that nothing can leak or pad."""

    model: Any

    @classmethod
    def load(cls, folder: Path, gguf_file: str | None = None, dtype: torch.dtype = torch.float32) -> Reference:
        """A CPU that would emulate the dtype computes in float32 on weights that are rounded to it, as ours does."""
        from transformers import AutoConfig, AutoModelForCausalLM

        if gguf_file is None:
            # Some versions of transformers leave the cap out unless they are told to compute it themselves.
            is_capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None) is not None
            attention = {"attn_implementation": "eager"} if is_capped else {}
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **attention)
        else:
            with quick_gguf_reader():
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, gguf_file=gguf_file)
        return cls((model if dtype in native_cpu_dtypes() else model.float()).eval())

    def all_logits(self, ids: Sequence[int], first: int = 0) -> Floats:
        """[T, V] from the token at `first` on; the head multiplies in float32 whatever the model's dtype."""
        with torch.inference_mode():
            hidden = self.model.model(torch.tensor([list(ids)])).last_hidden_state[0, first:]
            logits = self._capped(hidden.float() @ self.model.lm_head.weight.float().T)
        found: Floats = logits.double().numpy()
        return found

    def last_logits(self, ids: Sequence[int]) -> Floats:
        last: Floats = self.all_logits(ids, -1)[0]
        return last

    def overridden_logits(self, ids: Sequence[int], vectors: Mapping[int, NDArray[np.float32]]) -> Floats:
        """[V] after the ids; `vectors` take the place of the embedding table's rows at these positions."""
        embedding = self.model.get_input_embeddings()
        with torch.inference_mode():
            rows = embedding.weight[torch.tensor(list(ids))].clone()
            for position, vector in vectors.items():
                rows[position] = torch.from_numpy(vector)
            rows *= getattr(embedding, "embed_scale", 1.0)  # Gemma's embedding scales its rows
            hidden = self.model.model(inputs_embeds=rows[None]).last_hidden_state[0, -1]
            found: Floats = self._capped(hidden @ self.model.lm_head.weight.T).double().numpy()
        return found

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """As the heads of Granite and Gemma 2 do."""
        logits = logits / getattr(self.model.config, "logits_scaling", 1.0)
        softcap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def label_logits(self, contexts: Sequence[Sequence[int]]) -> Floats:
        """[I, V] after each context."""
        return np.stack([self.last_logits(context) for context in contexts])

    def sequence_logprob(self, context: Sequence[int], label: Sequence[int]) -> float:
        """The sum of the log-probabilities of the label's tokens after the context."""
        rows = log_softmax(self.all_logits([*context, *label], len(context) - 1))
        return float(sum(rows[k, token] for k, token in enumerate(label)))


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def expected_scores(mode: str, logits: Floats, labels: Sequence[int]) -> Floats:
    """Scores [I, C] by the definitions of the contract, written independently of the package."""
    chosen = logits[:, list(labels)]
    if mode == "logit":
        return chosen
    if mode == "logprob":
        return log_softmax(logits)[:, list(labels)]
    if mode == "prob":
        return np.exp(log_softmax(logits)[:, list(labels)])
    if mode == "softmax":
        return np.exp(log_softmax(chosen))
    difference = chosen[:, :1] - chosen[:, 1:] if chosen.shape[1] == 2 else chosen
    return difference if mode == "logit_diff" else 1 / (1 + np.exp(-difference))
