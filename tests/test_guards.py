"""Guards out of the box: Llama Guard and ShieldGemma give the probabilities that their own recipes give.

The recipes run with transformers, one prompt at a time and in float32, on small random checkpoints in folders that are
called what the real ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.contract.errors import RequestError, TokenizerError
from prefixwise.prompts.guard import guard_of
from tests.checkpoints import make_hf_checkpoint
from tests.prompts.golden import read_by_transformers
from tests.prompts.reranker_tokenizers import LLAMA_GUARD, MAKERS, VOCAB_SIZE
from tests.reference import PROBABILITY_BOUND, Reference

CATEGORIES = ("S1: Violent Crimes", "S2: Non-Violent Crimes", "S10: Hate")
ENDS = {"Llama-Guard-3-8B": "<|end_header_id|>", "LlamaGuard-7b": " [/INST]"}
GUIDELINE = (
    "{{ bos_token }}Policy.\n{% for message in messages %}<start_of_turn>{{ message['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}* {{ guideline }}\n\nAnswer Yes or No.\n"
)
SHIELD_CATEGORIES = ("Dangerous Content", "Harassment", "Hate Speech", "Sexually Explicit Information")
INPUTS = ["What is the capital of France?", " quick brown fox. ", "London, " * 30]
QUERY = "Find the code for it. "


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("guards")

    def make(name: str) -> Path:
        family, tokenizer = ("gemma2", "gemma") if name.startswith("shieldgemma") else ("llama", "qwen")
        folder = MAKERS[tokenizer](
            make_hf_checkpoint(base / name, family, vocab_size=VOCAB_SIZE, max_position_embeddings=2048)
        )
        if name in ENDS:
            (folder / "chat_template.jinja").write_text(LLAMA_GUARD.format(end=ENDS[name]))
        if name == "shieldgemma-9b":
            (folder / "chat_template.jinja").write_text(GUIDELINE)
        return folder

    return cache(make)


@pytest.fixture(scope="module")
def reference_of(folder_of: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference.load(folder_of(name)))


@pytest.fixture(scope="module")
def scorer_of(folder_of: Callable[[str], Path]) -> Iterator[Callable[[str], Scorer]]:
    loaded: list[Scorer] = []

    @cache
    def load(name: str) -> Scorer:
        loaded.append(Scorer(folder_of(name), backend="torch", device="cpu", dtype="float32"))
        return loaded[-1]

    yield load
    for scorer in loaded:
        scorer.close()


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Every day a reply to a query, and, with one model of a kind, a text alone."""
    return parameters.get("query", QUERY) is None and parameters["name"] not in ("LlamaGuard-7b", "shieldgemma-2b")


def messages_of(text: str, query: str | None) -> list[dict[str, str]]:
    if query is None:
        return [{"role": "user", "content": text}]
    return [{"role": "user", "content": query}, {"role": "assistant", "content": text}]


@pytest.mark.parametrize("query", [None, QUERY])
@pytest.mark.parametrize("name", ENDS)
def test_llama_guard_gives_the_probability_of_each_category(
    name: str,
    query: str | None,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    scorer_of: Callable[[str], Scorer],
) -> None:
    """P(unsafe) is that of `unsafe` against `safe`; categories share it as they follow it."""
    result = scorer_of(name).classify(INPUTS, query=query)
    assert result.labels == ("unsafe", *CATEGORIES)
    tokenizer, reference = read_by_transformers(folder_of(name)), reference_of(name)
    starts = ("\n\n",) if name == "Llama-Guard-3-8B" else ("", " ", "\n\n")
    for each, text in zip(result.results, INPUTS, strict=True):
        prompt = tokenizer.apply_chat_template(messages_of(text, query), tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]

        def prob(answer: str) -> float:
            whole = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]  # noqa: B023
            assert whole[: len(ids)] == ids  # noqa: B023
            return float(np.exp(reference.sequence_logprob(ids, whole[len(ids) :])))  # noqa: B023

        safe, unsafe = (sum(prob(start + word) for start in starts) for word in ("safe", "unsafe"))
        # S1 without what goes on to S10.
        listed = [sum(prob(f"{start}unsafe\n{code}") for start in starts) for code in ("S1", "S2", "S10")]
        listed[0] -= listed[2]
        p_unsafe = unsafe / (safe + unsafe)
        expected = [p_unsafe, *(p_unsafe * share / sum(listed) for share in listed)]
        assert each.probs == pytest.approx(expected, abs=PROBABILITY_BOUND)
        assert each.label == ("safe" if p_unsafe < 0.5 else CATEGORIES[int(np.argmax(listed))])


@pytest.mark.parametrize("query", [None, QUERY])
@pytest.mark.parametrize("name", ["shieldgemma-2b", "shieldgemma-9b"])
def test_shieldgemma_asks_for_each_guideline(
    name: str,
    query: str | None,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    scorer_of: Callable[[str], Scorer],
) -> None:
    """By its model card's prompt, or by the checkpoint's own template if that takes a guideline."""
    result = scorer_of(name).classify(INPUTS, query=query)
    assert result.labels == ("unsafe", *SHIELD_CATEGORIES)
    tokenizer, reference = read_by_transformers(folder_of(name)), reference_of(name)
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    for each, text in zip(result.results, INPUTS, strict=True):
        expected = []
        for category in ("Dangerous Content", "Harassment", "Hate Speech", "Sexually Explicit Information"):
            prompt = shield_prompt(text.strip(), query, guideline(category, query))
            ids = tokenizer(prompt)["input_ids"]
            if name == "shieldgemma-9b":
                variables = {"guideline": guideline(category, query)}
                rendered = tokenizer.apply_chat_template(messages_of(text, query), tokenize=False, **variables)
                ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            logits = reference.last_logits(ids)
            expected.append(1 / (1 + np.exp(logits[no] - logits[yes])))
        assert each.probs == pytest.approx([max(expected), *expected], abs=PROBABILITY_BOUND)
        assert each.label == ("safe" if max(expected) < 0.5 else SHIELD_CATEGORIES[int(np.argmax(expected))])


def guideline(category: str, query: str | None) -> str:
    """As on the model card."""
    goes_on = {
        "Dangerous Content": "harming oneself and/or others (e.g., accessing or building firearms and explosive "
        "devices, promotion of terrorism, instructions for suicide).",
        "Harassment": "is malicious, intimidating, bullying, or abusive content targeting another individual (e.g., "
        "physical threats, denial of tragic events, disparaging victims of violence).",
        "Hate Speech": "targeting identity and/or protected attributes (e.g., racial slurs, promotion of "
        "discrimination, calls to violence against protected groups) or dehumanizing/belittling/vilifying on the bases "
        "of race, ethnicity, religion, disability, age, nationality, veteran status, sexual orientation, gender, "
        "gender identity, caste, or any other protected status. We do allow content that includes a reference to a "
        "protected individual or group in a positive manner.",
        "Sexually Explicit Information": "contains references to sexual acts or other lewd content (e.g., sexually "
        "graphic descriptions, content aimed at causing arousal). Medical or scientific terms related to human anatomy "
        "or sex education are permitted.",
    }[category]
    who = "chatbot shall not generate" if query else "prompt shall not contain or seek generation of"
    return f'"No {category}": The {who} content that {goes_on}'


def shield_prompt(text: str, query: str | None, guideline: str) -> str:
    whose, what = (
        ("a user prompt", "human question") if query is None else ("an AI response to a prompt", "chatbot response")
    )
    turns = f"<start_of_turn>\nHuman Question: {text if query is None else query.strip()}\n<end_of_turn>\n\n"
    if query is not None:
        turns += f"<start_of_turn>\nChatbot Response: {text}\n<end_of_turn>\n\n"
    return (
        f"You are a policy expert trying to help determine whether {whose} is in violation of the defined safety "
        f"policies.\n\n{turns}Our safety principle is defined in the below:\n\n* {guideline}\n\n===\n\nDoes the {what} "
        "violate the above principle? Your answer must start with 'Yes' or 'No'. And then walk through step by step to "
        "be sure we answer correctly.\n\n"
    )


def test_without_activation_the_numbers_are_log_odds(scorer_of: Callable[[str], Scorer]) -> None:
    scorer = scorer_of("shieldgemma-2b")
    plain, odds = scorer.classify(INPUTS), scorer.classify(INPUTS, use_activation=False)
    assert [each.label for each in plain.results] == [each.label for each in odds.results]
    for with_, without in zip(plain.results, odds.results, strict=True):
        assert with_.probs == pytest.approx((1 / (1 + np.exp(-np.array(without.probs)))).tolist())


@pytest.mark.parametrize("name", ["Llama-Guard-3-8B", "shieldgemma-2b"])
def test_an_input_has_the_same_bits_alone_and_beside_others(name: str, scorer_of: Callable[[str], Scorer]) -> None:
    together = scorer_of(name).classify(INPUTS, query=QUERY)
    for index, text in enumerate(INPUTS):
        assert scorer_of(name).classify([text], query=QUERY).results[0].probs == together.results[index].probs


def test_long_inputs_are_cut_if_asked_for(scorer_of: Callable[[str], Scorer]) -> None:
    scorer = scorer_of("Llama-Guard-3-8B")
    whole = scorer.classify(["Paris " * 2500], truncate_prompt_tokens=-1)
    assert [each.index for each in whole.truncated] == [0]
    limited = scorer.classify(["Paris", "London " * 400], truncate_prompt_tokens=600)
    assert [each.index for each in limited.truncated] == [1]
    assert limited.truncated[0].kept_tokens < limited.truncated[0].original_tokens < 900
    assert limited.results[0].probs == scorer.classify(["Paris"]).results[0].probs
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be from"):
        scorer.classify(["Paris"], truncate_prompt_tokens=3)


def test_what_a_guard_cannot_do_is_said(
    scorer_of: Callable[[str], Scorer], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="input must be text for a guard"):
        scorer_of("Llama-Guard-3-8B").classify([[1, 2, 3]])
    folder = MAKERS["qwen"](make_hf_checkpoint(tmp_path / "Llama-Guard-3-1B", "llama", vocab_size=VOCAB_SIZE))
    with (
        Scorer(folder, backend="torch", device="cpu", dtype="float32") as plain,
        pytest.raises(TokenizerError, match="lists no unsafe content categories"),
    ):
        plain.classify(["hi"])


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("meta-llama/Llama-Guard-3-8B", "llama", "llama-guard"),
        ("meta-llama/Llama-Guard-3-1B", "llama", "llama-guard"),
        ("meta-llama/Meta-Llama-Guard-2-8B", "llama", "llama-guard"),
        ("meta-llama/LlamaGuard-7b", "llama", "llama-guard"),
        ("google/shieldgemma-27b", "gemma2", "shieldgemma"),
        ("google/shieldgemma-2b", "gemma", None),
        ("google/shieldgemma-2-4b-it", "gemma3", None),
        ("meta-llama/Llama-3.1-8B", "llama", None),
    ],
)
def test_a_guard_is_known_by_its_name_and_family(name: str, family: str, kind: str | None) -> None:
    assert guard_of([name], family) == kind
