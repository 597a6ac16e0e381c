"""The official recipes of rerankers, step by step with transformers: the truth that the profiles are held against.

    qwen3-reranker          the model card's `format_instruction`, `process_inputs`, `compute_logits`
    bge-reranker-v2-gemma   the model card's `get_inputs`
    mxbai-rerank-v2         `MxbaiRerankV2.prepare_inputs` and `forward` of the package mxbai-rerank
    zerank                  the models' `modeling_zeranker.py`: `format_pointwise_datapoints` and `predict`
    ctxl-rerank-v2          the model card's `format_prompts` and `infer_w_hf`; a document that does not fit is cut,
                            where the original cuts the end of the prompt
    llama-nemotron-rerank   the model card's `prompt_template`
    chat-yes-no             `apply_chat_template` around the profile's message
    question-yes-no         the profile's text, after the tokenizer's BOS
    plain                   query and document, after the tokenizer's BOS

Nothing of prefixwise is used here. Where the originals pad a batch, we ask one sequence at a time. transformers 5
has no `prepare_for_model` any more: `only_second` is done by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BGE_PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)
MXBAI_PREFIX = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
MXBAI_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment "
    "(0 for not relevant, 1 for relevant).\nRelevance:"
)
YES_NO_INSTRUCTION = "Does the document contain the answer to the query?"


@dataclass(frozen=True)
class Recipe:
    """How one model is to be asked."""

    # tokenizer, query, document, instruction, longest: what stands before the document's end, and what follows it
    inputs: Callable[[Any, str, str, str | None, int], tuple[list[int], list[int]]]
    raw_score: Callable[[Any, torch.Tensor], float]  # of the logits [V] after the last token
    max_length: int

    def ids(
        self, tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int | None = None
    ) -> list[int]:
        """All tokens that the model sees."""
        head, tail = self.inputs(tokenizer, query, document, instruction, max_length or self.max_length)
        return head + tail


def _plain(tokenizer: Any, text: str, max_length: int | None = None) -> list[int]:
    options = {} if max_length is None else {"max_length": max_length, "truncation": True}
    ids: list[int] = tokenizer(text, return_tensors=None, add_special_tokens=False, **options)["input_ids"]
    return ids


def _only_second(first: list[int], second: list[int], max_length: int) -> list[int]:
    """What `prepare_for_model(first, second, truncation="only_second", add_special_tokens=False)` gave."""
    excess = len(first) + len(second) - max_length
    assert excess < len(second), "the original leaves such a pair as it is, and logs an error"
    return first + (second[:-excess] if excess > 0 else second)


def _qwen3(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    prefix_tokens = tokenizer.encode(QWEN3_PREFIX, add_special_tokens=False)
    suffix_tokens = tokenizer.encode(QWEN3_SUFFIX, add_special_tokens=False)
    if instruction is None:
        instruction = QWEN3_INSTRUCTION
    pairs = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"]
    inputs = tokenizer(
        pairs,
        padding=False,
        truncation="longest_first",
        return_attention_mask=False,
        max_length=max_length - len(prefix_tokens) - len(suffix_tokens),
    )
    return prefix_tokens + inputs["input_ids"][0], suffix_tokens


def _bge(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    prompt_inputs = _plain(tokenizer, BGE_PROMPT if instruction is None else instruction)
    sep_inputs = _plain(tokenizer, "\n")
    query_inputs = _plain(tokenizer, f"A: {query}", max_length * 3 // 4)
    passage_inputs = _plain(tokenizer, f"B: {document}", max_length)
    item = _only_second([tokenizer.bos_token_id, *query_inputs], sep_inputs + passage_inputs, max_length)
    return item, sep_inputs + prompt_inputs


def _mxbai(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    task_prompt_inputs, sep_inputs = _plain(tokenizer, MXBAI_TASK), _plain(tokenizer, "\n")
    prefix_inputs, suffix_inputs = _plain(tokenizer, MXBAI_PREFIX), _plain(tokenizer, MXBAI_SUFFIX)
    query_prompt = f"query: {query}"
    if instruction:
        query_prompt = "".join([f"instruction: {instruction}", "\n", query_prompt])
    query_inputs = _plain(tokenizer, query_prompt, max_length * 3 // 4)
    document_inputs = _plain(tokenizer, f"document: {document}", max_length)
    item = _only_second(query_inputs, sep_inputs + document_inputs, max_length)
    return prefix_inputs + item, sep_inputs + task_prompt_inputs + suffix_inputs


def _zerank(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    assert instruction is None, "there is no place for one"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    system, user = query.strip(), document.strip()
    ids = _plain(tokenizer, f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}{end}")
    after = _plain(tokenizer, end)
    assert ids[-len(after) :] == after
    return _cut(ids[: -len(after)], after, max_length)


def _ctxl(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    if instruction:
        instruction = f" {instruction}"
    begin = f"Check whether a given document contains information helpful to answer the query.\n<Document> {document}"
    end = f"\n<Query> {query}{instruction or ''} ??"
    ids: list[int] = tokenizer(begin + end)["input_ids"]
    if len(ids) <= max_length:
        return ids, []
    return _cut(_bos(tokenizer) + _plain(tokenizer, begin), _plain(tokenizer, end), max_length)


def _chat_yes_no(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    """What follows the document is tokenized on its own, so the rendered chat is taken apart there."""
    place = "(here stands the document)"
    question = YES_NO_INSTRUCTION if instruction is None else instruction
    content = f"{question}\n\nQuery: {query}\n\nDocument: {place}\n\nAnswer yes or no."
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    before, after = text.split(place)
    return _cut(_plain(tokenizer, before + document), _plain(tokenizer, after), max_length)


def _question_yes_no(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    question = YES_NO_INSTRUCTION if instruction is None else instruction
    body = _plain(tokenizer, f"Query: {query}\n\nDocument: {document}")
    after = _plain(tokenizer, f"\n\nQuestion: {question} Answer yes or no.\nAnswer:")
    return _cut(_bos(tokenizer) + body, after, max_length)


def _nemotron(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    assert instruction is None, "there is no place for one"
    text = f"question:{query} \n \n passage:{document}"
    return _cut(_bos(tokenizer) + _plain(tokenizer, text), [], max_length)


def _nothing_added(
    tokenizer: Any, query: str, document: str, instruction: str | None, max_length: int
) -> tuple[list[int], list[int]]:
    assert instruction is None, "there is no place for one"
    return _cut(_bos(tokenizer) + _plain(tokenizer, query) + _plain(tokenizer, document), [], max_length)


def _bos(tokenizer: Any) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _cut(head: list[int], after: list[int], max_length: int) -> tuple[list[int], list[int]]:
    return head[: max_length - len(after)], after


def _yes_minus_no(yes: str, no: str) -> Callable[[Any, torch.Tensor], float]:
    def raw_score(tokenizer: Any, logits: torch.Tensor) -> float:
        (yes_id,), (no_id,) = _plain(tokenizer, yes), _plain(tokenizer, no)
        return float(logits[yes_id] - logits[no_id])

    return raw_score


def _qwen3_score(tokenizer: Any, logits: torch.Tensor) -> float:
    token_true_id, token_false_id = tokenizer.convert_tokens_to_ids("yes"), tokenizer.convert_tokens_to_ids("no")
    batch_scores = torch.stack([logits[token_false_id], logits[token_true_id]])
    score = torch.nn.functional.log_softmax(batch_scores, dim=0)[1].exp()
    return float(torch.logit(score))


def _bge_score(tokenizer: Any, logits: torch.Tensor) -> float:
    yes_loc = tokenizer("Yes", add_special_tokens=False)["input_ids"][0]
    return float(logits[yes_loc])


def _zerank_score(tokenizer: Any, logits: torch.Tensor) -> float:
    yes_token_id = tokenizer.encode("Yes", add_special_tokens=False)[0]
    return float(logits[yes_token_id] / 5.0)


def _ctxl_score(tokenizer: Any, logits: torch.Tensor) -> float:
    return float(logits[0])


NO_LIMIT = 1_000_000
RECIPES = {
    "qwen3-reranker": Recipe(_qwen3, _qwen3_score, 8192),
    "bge-reranker-v2-gemma": Recipe(_bge, _bge_score, 1024),
    "mxbai-rerank-v2": Recipe(_mxbai, _yes_minus_no("1", "0"), 8192),
    "zerank": Recipe(_zerank, _zerank_score, NO_LIMIT),
    "ctxl-rerank-v2": Recipe(_ctxl, _ctxl_score, NO_LIMIT),
    "chat-yes-no": Recipe(_chat_yes_no, _yes_minus_no("yes", "no"), NO_LIMIT),
    "question-yes-no": Recipe(_question_yes_no, _yes_minus_no(" yes", " no"), NO_LIMIT),
    "llama-nemotron-rerank": Recipe(_nemotron, _ctxl_score, 8192),
    "plain": Recipe(_nothing_added, _yes_minus_no("yes", "no"), NO_LIMIT),
}
