"""Rerankers with bidirectional attention against transformers: Llama with a mask that hides nothing, and its mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixwise import Scorer
from prefixwise.contract.checks import MAX_TOKENS_PER_REQUEST
from prefixwise.contract.errors import InvalidValueError, PrefixwiseWarning
from tests.checkpoints import make_bidirectional
from tests.reference import LOGIT_BOUND

TEMPERATURE = 0.5
LENGTHS = (1, 2, 31, 60, 130, 300, 0)  # with the query: one narrow tile, one wide one, several

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")


def reference_logit(folder: Path, ids: Sequence[int], pooling: str) -> float:
    """NVIDIA's own code in a few lines: all tokens see all tokens, the pooled state's score, divided."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig.from_pretrained(folder, num_labels=1)
    model = LlamaForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.inference_mode():
        nothing_hidden = torch.zeros(1, 1, len(ids), len(ids))
        hidden = model.model(torch.tensor([list(ids)]), attention_mask=nothing_hidden).last_hidden_state[0]
        pooled = {"avg": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        return float(model.score(pooled)[0] / TEMPERATURE)


def tokens(length: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 400, length).tolist()
    return found


QUERY, ITEMS = tokens(29, 0), [tokens(length, seed) for seed, length in enumerate(LENGTHS, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bidirectional(tmp_path_factory.mktemp("bidirectional"), pooling="avg", temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def scorer(folder: Path, place: dict[str, Any]) -> Any:
    invariant = place["device"] == "cuda"
    with Scorer(folder, **place, dtype="float32", token_budget=512, batch_invariant=invariant) as scorer:
        yield scorer


def logits(scorer: Scorer, items: Sequence[Sequence[int]], **fields: Any) -> list[float]:
    return [row[0] for row in scorer.score(QUERY, [list(each) for each in items], score_mode="logit", **fields).scores]


def test_scores_equal_transformers_and_each_pair_has_its_own_bits(scorer: Scorer, folder: Path) -> None:
    found = logits(scorer, ITEMS)
    expected = [reference_logit(folder, QUERY + item, "avg") for item in ITEMS]
    assert np.std(expected) > 0.1, "scores that hardly differ would hide an error"
    assert np.abs(np.array(found) - expected).max() <= LOGIT_BOUND
    causal_like = reference_logit(folder, QUERY + ITEMS[0], "last")
    assert abs(found[0] - causal_like) > 100 * LOGIT_BOUND, "the mean is not the last token's state"
    assert [logits(scorer, [item])[0] for item in ITEMS[:4]] == found[:4]
    assert logits(scorer, ITEMS[::-1], algorithm="packed") == found[::-1]


def test_many_pairs_share_a_forward_and_debug_says_why_no_prefix_is_shared(scorer: Scorer) -> None:
    result = scorer.score(QUERY, ITEMS[:3], score_mode="logit", algorithm="prefill_extend", return_debug=True)
    debug: Any = result.debug
    assert debug["algorithm"] == "serial"
    assert "every token sees the whole pair, so no prefix can be shared" in debug["reason"]
    assert [batch["segments"] for batch in debug["batches"]] == [3]
    assert (debug["cached_tokens"], debug["layout"]["prefix_tokens"]) == (0, 0)


def test_documents_are_ranked_by_nvidias_recipe_and_long_ones_are_cut(scorer: Scorer, folder: Path) -> None:
    from tokenizers import Tokenizer

    documents = ["The quick brown fox jumps", "yes", "pears " * 2000]
    with pytest.warns(PrefixwiseWarning, match="were cut"):
        result = scorer.rerank("Is this relevant?", documents)
    assert (result.profile, [each.index for each in result.truncated]) == ("llama-nemotron-rerank", [2])
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    for index in (0, 1):
        ids = encode(f"question:Is this relevant? \n \n passage:{documents[index]}").ids
        found = next(each.raw_score for each in result.results if each.index == index)
        assert abs(found - reference_logit(folder, ids, "avg")) <= LOGIT_BOUND
    with pytest.raises(InvalidValueError, match=r"documents\[2\] must fit"):
        scorer.rerank("Is this relevant?", documents, truncate=False)


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_other_poolings(pooling: str, tmp_path: Path) -> None:
    folder = make_bidirectional(tmp_path, pooling=pooling, temperature=TEMPERATURE)
    with Scorer(folder, backend="torch", device="cpu", dtype="float32") as scorer:
        expected = [reference_logit(folder, QUERY + item, pooling) for item in ITEMS[:3]]
        assert np.abs(np.array(logits(scorer, ITEMS[:3])) - expected).max() <= LOGIT_BOUND


def test_copies_of_the_query_count_as_tokens_of_the_request(scorer: Scorer) -> None:
    query = [7] * 500
    num_items = MAX_TOKENS_PER_REQUEST // 500 + 1
    with pytest.raises(InvalidValueError, match="counting what each item repeats") as caught:
        scorer.score(query, [[8]] * num_items)
    assert caught.value.code == "too_many_tokens"
