"""Every profile's token ids, pinned: equal to the fixtures, which are the official recipes' own.

`.venv/bin/python -m tests.prompts.golden` writes the fixtures again; see there when to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.prompts.profile_choice import builtin_profiles
from prefixwise.prompts.rerank import RerankPrompts
from prefixwise.prompts.template import Prompt, build_prompt
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.prompts.golden import (
    SETTINGS,
    Case,
    asked,
    by_recipe,
    profile_of_case,
    read_by_transformers,
    read_cases,
)
from tests.prompts.recipes import RECIPES
from tests.prompts.reranker_tokenizers import VOCAB_SIZE

MODEL = FakeBackend(VOCAB_SIZE, max_context_len=32_768).config

Key = tuple[str, str | None, int | None]

PAIRS = [(name, tokenizer) for name, (tokenizers, _) in SETTINGS.items() for tokenizer in tokenizers]


def by_request(cases: list[Case]) -> dict[Key, list[Case]]:
    """The cases that one request asks for together."""
    groups: dict[Key, list[Case]] = {}
    for case in cases:
        groups.setdefault((case.query, case.instruction, case.limit), []).append(case)
    return groups


def cases_of(name: str, tokenizer: str) -> list[Case]:
    return [case for case in read_cases(name) if case.tokenizer == tokenizer]


def prompt_of(name: str, cases: list[Case], tokenizer: TextTokenizer) -> Prompt:
    documents = tuple(case.document for case in cases)
    request = RerankRequest(cases[0].query, documents, instruction=cases[0].instruction)
    profile = profile_of_case(name, cases[0])
    model = replace(MODEL, num_classes=1 if profile.classifier else 0)
    made = RerankPrompts(profile, tokenizer, model).prompt(request)
    assert made.owners.tolist() == list(range(len(cases)))
    return made.prompt


def test_every_profile_of_ours_has_its_golden_ids() -> None:
    assert set(builtin_profiles()) == set(SETTINGS), "add it to SETTINGS of tests/prompts/golden.py, and run that"


@pytest.mark.parametrize("name", SETTINGS)
def test_the_fixture_holds_what_is_asked(name: str) -> None:
    assert [replace(case, ids=(), shared_len=0) for case in read_cases(name)] == list(asked(name))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_golden_ids_are_the_official_recipe_s(name: str, tokenizer_folder: Callable[[str], Path]) -> None:
    readers = {each: read_by_transformers(tokenizer_folder(each)) for each in SETTINGS[name][0]}
    for case in read_cases(name):
        assert by_recipe(name, case, readers[case.tokenizer]) == case


@pytest.mark.parametrize(("name", "tokenizer"), PAIRS)
def test_prompts_are_the_golden_ids(name: str, tokenizer: str, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    for cases in by_request(cases_of(name, tokenizer)).values():
        prompt = prompt_of(name, cases, text_tokenizer(tokenizer))
        assert prompt.shared_lens is not None
        for index, case in enumerate(cases):
            assert prompt.context(index).tolist() == list(case.ids), case
        assert prompt.shared_lens.tolist() == [case.shared_len for case in cases]
        assert len(prompt.prefix_ids) == max(case.shared_len for case in cases)


@pytest.mark.parametrize(("name", "tokenizer"), PAIRS)
def test_a_prompt_is_the_same_alone_and_among_others(
    name: str, tokenizer: str, text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    for case in cases_of(name, tokenizer):
        prompt = prompt_of(name, [case], text_tokenizer(tokenizer))
        assert prompt.context(0).tolist() == list(case.ids)


@pytest.mark.parametrize(("name", "tokenizer"), [pair for pair in PAIRS if pair[0] != "ctxl-rerank-v2"])
def test_only_the_documents_end_is_cut_and_that_is_reported(
    name: str,
    tokenizer: str,
    tokenizer_folder: Callable[[str], Path],
    text_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    cases = [case for case in cases_of(name, tokenizer) if case.limit is not None]
    reader = read_by_transformers(tokenizer_folder(tokenizer))
    _, after = RECIPES[name].inputs(reader, cases[0].query, "", None, RECIPES[name].max_length)
    whole = prompt_of(name, [replace(case, limit=None) for case in cases], text_tokenizer(tokenizer))
    cut = prompt_of(name, cases, text_tokenizer(tokenizer))
    assert not whole.truncated
    lost = {each.index: each.original_tokens - each.kept_tokens for each in cut.truncated}
    assert set(lost) == {1, 2, 3}  # the first one fits
    for index, case in enumerate(cases):
        full, kept = whole.context(index).tolist(), list(case.ids)
        assert len(full) - len(kept) == lost.get(index, 0)
        assert kept == full[: len(kept) - len(after)] + after
        assert full[len(full) - len(after) :] == after


@pytest.mark.parametrize("tokenizer", ["qwen", "gemma"])
def test_a_document_is_one_text_with_what_follows_it_unless_it_is_cut(
    tokenizer: str, text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    ours = text_tokenizer(tokenizer)
    cases = [Case(tokenizer, "what is it", document, limit=60) for document in ("Paris.", "London, Paris. " * 20)]
    fits, cut = (prompt_of("ctxl-rerank-v2", cases, ours).context(index) for index in range(2))
    begin, end = "Check whether a given document contains information helpful", "\n<Query> what is it ??"
    apart = [*ours.encode(ours.decode(fits)[: -len(end)]), *ours.encode(end)]
    assert ours.decode(fits).removeprefix("<bos>").startswith(begin)
    assert fits.tolist() != apart, "the full stop and the line break are one token"
    assert len(cut) == 60
    assert cut.tolist()[-len(ours.encode(end)) :] == ours.encode(end).tolist()
    assert [each.index for each in prompt_of("ctxl-rerank-v2", cases, ours).truncated] == [1]


@pytest.mark.parametrize("name", ["qwen3-reranker", "bge-reranker-v2-gemma", "mxbai-rerank-v2"])
@pytest.mark.parametrize("instruction", [None, "Find it"])
def test_the_recipes_own_limit_holds(
    name: str,
    instruction: str | None,
    tokenizer_folder: Callable[[str], Path],
    text_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    (tokenizer,), _ = SETTINGS[name]
    case = Case(tokenizer, "what is it", "Paris, London " * RECIPES[name].max_length, instruction)
    prompt = prompt_of(name, [case], text_tokenizer(tokenizer))
    expected = by_recipe(name, case, read_by_transformers(tokenizer_folder(tokenizer)))
    assert prompt.context(0).tolist() == list(expected.ids)
    assert [cut.index for cut in prompt.truncated] == [0]


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_plain_is_what_a_scoring_request_gives(name: str, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    tokenizer = text_tokenizer(name)
    for cases in by_request(cases_of("plain", name)).values():
        items = tuple(case.document for case in cases)
        request = ScoreRequest(query=cases[0].query, items=items, labels=("yes", "no"), tokenization="separate")
        expected = build_prompt(request, tokenizer, None)
        found = prompt_of("plain", [replace(case, limit=None) for case in cases], tokenizer)
        assert found.prefix_ids.tolist() == expected.prefix_ids.tolist()
        assert [row.tolist() for row in found.sequences] == [row.tolist() for row in expected.sequences]
        assert found.label_ids == expected.label_ids
