"""Profiles on the tokenizer of the real models: Qwen3's, which rerankers of several makers have."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.models.hf_folder import read_tokenizer_folder
from prefixwise.prompts.profile_choice import builtin_profile
from prefixwise.prompts.rerank import RerankPrompts
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.prompts.golden import DOCUMENTS, FEW, LONG_QUERY, QUERY
from tests.prompts.recipes import RECIPES
from tests.real_tokenizers import tokenizer_folder

MODEL = FakeBackend(151_936, max_context_len=32_768).config
LABELS = {"qwen3-reranker": (9693, 2152), "zerank": (9454,), "ctxl-rerank-v2": (0,)}


@pytest.fixture(scope="module")
def ours() -> TextTokenizer:
    return TextTokenizer(read_tokenizer_folder(tokenizer_folder("qwen3")))


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder("qwen3"))


@pytest.mark.parametrize("name", LABELS)
def test_prompts_and_labels_are_the_official_recipe_s(name: str, ours: TextTokenizer, theirs: Any) -> None:
    prompts = RerankPrompts(builtin_profile(name), ours, MODEL)
    assert prompts.label_ids == tuple((each,) for each in LABELS[name])
    instructions = (None,) if name == "zerank" else (None, "Find it")
    for query, documents in ((QUERY, DOCUMENTS), (LONG_QUERY, FEW)):
        for instruction in instructions:
            made = prompts.prompt(RerankRequest(query, documents, instruction=instruction)).prompt
            for index, document in enumerate(documents):
                expected = RECIPES[name].ids(theirs, query, document, instruction)
                assert made.context(index).tolist() == expected, (query, document)


def test_zerank_is_what_qwen3s_chat_template_writes(ours: TextTokenizer, theirs: Any) -> None:
    """The template ends its own way where a document holds the tokens of thoughts."""
    documents = [document for document in DOCUMENTS if "</think>" not in document]
    made = RerankPrompts(builtin_profile("zerank"), ours, MODEL).prompt(RerankRequest(QUERY, tuple(documents))).prompt
    for index, document in enumerate(documents):
        messages = [{"role": "system", "content": QUERY.strip()}, {"role": "user", "content": document.strip()}]
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert made.context(index).tolist() == theirs(text)["input_ids"], document
