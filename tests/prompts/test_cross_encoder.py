"""Rerankers that sentence-transformers has saved: prompts by their chat template, scores by their LogitScore."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixwise import Scorer
from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.sources import open_checkpoint
from tests.checkpoints import make_hf_checkpoint
from tests.prompts.reranker_tokenizers import MAKERS, VOCAB_SIZE, read_text_tokenizer
from tests.reference import LOGIT_BOUND, Reference

QUERY = "what is the capital of France"
DOCUMENTS = ["Paris is the capital of France.", "", " London {is} not it. ", "quick brown fox, " * 20]
# Of Qwen3-Reranker, of zerank-2 (which strips), and one that has the document first, with content in parts.
QWEN3 = (
    "<|im_start|>system\nJudge it. {yes} or {no}.<|im_end|>\n<|im_start|>user\n<Instruct>: {{ messages | "
    'selectattr("role", "eq", "system") | map(attribute="content") | first | default("Find it", true) }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n<Document>: '
    '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"  # jinja drops the last line break
)
ZERANK = (
    "{%- for message in messages %}{{- '<|im_start|>' + ('system' if message.role == 'query' else 'user') + '\n' + "
    "message.content | trim + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
DOCUMENT_FIRST = (
    '<Document> {{ (messages | selectattr("role", "eq", "document") | first).content[0].text }}\n'
    '<Query> {{ (messages | selectattr("role", "eq", "query") | first).content[0].text }} ??'
)


def save_recipe(folder: Path, template: str, **files: Any) -> None:
    (folder / "chat_template.jinja").write_text(template)
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / ("1_LogitScore/config.json" if name == "logit_score" else f"{name}.json")
        path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = make_hf_checkpoint(tmp_path_factory.mktemp("saved") / "some-model", "qwen3", vocab_size=VOCAB_SIZE)
    MAKERS["qwen"](folder)
    return folder, Reference.load(folder)


def check(
    made: tuple[Path, Reference],
    rendered: Callable[[str], str],
    true_id: int,
    false_id: int | None,
    instruction: str | None = None,
) -> None:
    """Scores are those of the rendered text, tokenized as one."""
    folder, reference = made
    tokenizer = read_text_tokenizer(folder)
    with Scorer(folder, backend="torch", device="cpu", dtype="float32") as scorer:
        assert scorer.engine.config.profiles.reason == "the model's folder says how it scores"
        result = scorer.rerank(QUERY, DOCUMENTS, instruction=instruction)
    assert (result.profile, result.warnings) == ("sentence-transformers", ())
    for each in result.results:
        logits = reference.last_logits(tokenizer.encode(rendered(DOCUMENTS[each.index])).tolist())
        raw = float(logits[true_id] - (0 if false_id is None else logits[false_id]))
        assert each.raw_score == pytest.approx(raw, abs=LOGIT_BOUND)
        assert each.relevance_score == pytest.approx(1 / (1 + math.exp(-raw)), abs=1e-5)


@pytest.mark.parametrize(
    ("prompts", "asked", "expected"),
    [
        ({}, None, "Find it"),
        ({"prompts": {"web": "Find code"}, "default_prompt_name": "web"}, None, "Find code"),
        ({}, "Find cats", "Find cats"),
    ],
)
def test_the_instruction_is_the_systems_message(
    prompts: dict[str, Any], asked: str | None, expected: str, made: tuple[Path, Reference]
) -> None:
    save_recipe(
        made[0], QWEN3, logit_score={"true_token_id": 300, "false_token_id": 301}, config_sentence_transformers=prompts
    )

    def rendered(document: str) -> str:
        return (
            "<|im_start|>system\nJudge it. {yes} or {no}.<|im_end|>\n<|im_start|>user\n"
            f"<Instruct>: {expected}\n<Query>: {QUERY}\n<Document>: {document}"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )

    check(made, rendered, 300, 301, asked)


def test_a_template_may_strip_and_take_variables(made: tuple[Path, Reference]) -> None:
    save_recipe(
        made[0],
        ZERANK,
        logit_score={"true_token_id": 302, "false_token_id": None},
        config_sentence_transformers={},
        sentence_bert_config={"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
    )

    def rendered(document: str) -> str:
        return (
            f"<|im_start|>system\n{QUERY}<|im_end|>\n<|im_start|>user\n{document.strip()}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    check(made, rendered, 302, None)


def test_the_document_may_be_first_and_content_may_have_parts(made: tuple[Path, Reference]) -> None:
    save_recipe(made[0], DOCUMENT_FIRST, logit_score={"true_token_id": 0}, config_sentence_transformers={})
    check(made, lambda document: f"<Document> {document}\n<Query> {QUERY} ??", 0, None)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content }}", "must show each text once, and shows query 1 times, document 0 times"),
        ("{{ raise_exception('two turns, please') }}", "fails: two turns, please"),
    ],
)
def test_a_template_that_does_not_show_the_pair_is_no_recipe_and_the_log_says_why(
    template: str, reason: str, made: tuple[Path, Reference], caplog: pytest.LogCaptureFixture
) -> None:
    save_recipe(made[0], template, logit_score={"true_token_id": 0})
    with Scorer(made[0], backend="torch", device="cpu", dtype="float32") as scorer:
        assert scorer.engine.config.profiles.reason == "none is known for the model"
    assert any(message.endswith(f"the checkpoint's chat template {reason}") for message in caplog.messages)


@pytest.mark.parametrize("wrong", [{}, {"true_token_id": "yes"}, {"true_token_id": 1, "false_token_id": VOCAB_SIZE}])
def test_damaged_ids_are_one_clear_error(wrong: dict[str, Any], made: tuple[Path, Reference]) -> None:
    save_recipe(made[0], QWEN3, logit_score=wrong)
    with pytest.raises(ModelLoadError, match=rf"1_LogitScore/config.json: expected token ids below {VOCAB_SIZE}"):
        open_checkpoint(str(made[0]))
