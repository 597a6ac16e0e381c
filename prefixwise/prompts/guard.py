"""Guards: how messages become prompts of Llama Guard and ShieldGemma, and answers become P(unsafe) by category.

    Llama Guard    one prompt for each input; the answer is `safe`, or `unsafe` and a category
    ShieldGemma    one prompt for each input and category; the answer is Yes or No

An input is a user's message or, with a query, a model's response to it. The prompt up to the input is the shared
prefix. Each prompt is tokenized as one text.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from prefixwise.contract.classify import LONGEST, ClassifyRequest
from prefixwise.contract.errors import InvalidValueError, TokenizerError
from prefixwise.contract.inputs import Place
from prefixwise.contract.judge_result import distributions, next_longer
from prefixwise.contract.ragged import Int32Array, Ragged, ranges, starts_from_lens
from prefixwise.contract.result import Truncation
from prefixwise.contract.scores import Float64Array, sigmoid
from prefixwise.models.config import ModelConfig
from prefixwise.prompts.chat_places import RenderedPlaces, place_of, render_places
from prefixwise.prompts.rerank import PROBE, common_prefix, shared_lens
from prefixwise.prompts.template import Prompt
from prefixwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("prefixwise")

GuardKind = Literal["llama-guard", "shieldgemma"]

_NOTHING = np.zeros(0, np.int32)
_CONTEXT_CHARS = 64  # before an answer, which its tokens may depend on
_CATEGORIES = re.compile(r"<BEGIN UNSAFE CONTENT CATEGORIES>\n(.*?)<END UNSAFE CONTENT CATEGORIES>", re.DOTALL)
_CATEGORY = re.compile(r"^([A-Z]\d+): ?([^.\n]+)", re.MULTILINE)
_AFTER_HEADER = "<|end_header_id|>"  # Llama Guard 3 answers in a new paragraph behind it
_STARTS = ("", " ", "\n\n")  # of an answer, where we do not know; all of them count


@cache
def _described() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("prefixwise.prompts").joinpath("guards.toml").read_text(encoding="utf-8"))


def guard_of(names: Sequence[str], family: str) -> GuardKind | None:
    """The kind of guard that a checkpoint with these names is."""
    kinds: tuple[GuardKind, ...] = ("llama-guard", "shieldgemma")
    for kind in kinds:
        patterns = _described()[kind]["names"]
        last_parts = [name.rstrip("/").rpartition("/")[2].lower() for name in names]
        is_named = any(fnmatchcase(name, pattern) for name in last_parts for pattern in patterns)
        if is_named and family in _described()[kind]["families"]:
            return kind
    return None


@dataclass(frozen=True)
class GuardForm:
    """What a guard sees around an input, and what its answers are."""

    kind: GuardKind
    opening: Int32Array  # tokens before the lead
    lead: str
    afters: tuple[str, ...]  # one for each prompt of an input
    strips: bool  # inputs, of blanks
    categories: tuple[str, ...]
    label_ids: tuple[tuple[int, ...], ...]
    num_starts: int = 1  # groups of labels that differ in how the answer starts

    @property
    def classes(self) -> tuple[str, ...]:
        return ("unsafe", *self.categories)

    @property
    def reads_sequences(self) -> bool:
        """Whether the labels are answers of many tokens, not the next token alone."""
        return self.kind == "llama-guard"

    def probabilities(self, rows: Float64Array) -> Float64Array:
        """[prompts, labels], which are logits of Yes and No or log-probabilities of answers, to [inputs, classes]."""
        if self.kind == "shieldgemma":
            violated = sigmoid(rows[:, 0] - rows[:, 1]).reshape(len(self.categories), -1).T
            return np.concatenate([violated.max(axis=1, keepdims=True), violated], axis=1)
        found = distributions(rows, next_longer(self.label_ids), None).probs
        safe, _, *named = found.reshape(len(rows), self.num_starts, -1).sum(axis=1).T  # the second: no category of ours
        listed = np.stack(named, axis=1)
        unsafe = 1.0 - safe[:, None]
        total = listed.sum(axis=1, keepdims=True)
        return np.concatenate([unsafe, unsafe * listed / np.where(total > 0, total, 1.0)], axis=1)


def guard_form(kind: GuardKind, query: str | None, tokenizer: TextTokenizer | None) -> GuardForm:
    """Raises TokenizerError if the checkpoint's tokenizer or chat template does not fit the guard."""
    if tokenizer is None:
        raise TokenizerError("this guard has no tokenizer, so messages cannot be read")
    return _llama_guard(query, tokenizer) if kind == "llama-guard" else _shieldgemma(query, tokenizer)


def _llama_guard(query: str | None, tokenizer: TextTokenizer) -> GuardForm:
    user, agent = ("user", "query"), ("assistant", "input")
    rendered = render_places(tokenizer, (("user", "input"),) if query is None else (user, agent))
    lead, after = rendered.split("input")
    stated = _CATEGORIES.search(rendered.text)
    categories = _CATEGORY.findall(stated[1]) if stated else []
    if not categories:
        raise TokenizerError("the checkpoint's chat template lists no unsafe content categories, as Llama Guard's does")
    starts = ("\n\n",) if after.endswith(_AFTER_HEADER) else _STARTS
    answers = ["safe", "unsafe", *(f"unsafe\n{code}" for code, _ in categories)]
    groups = dict.fromkeys(_answer_ids(after[-_CONTEXT_CHARS:], [start + each for each in answers], tokenizer)
                           for start in starts)  # fmt: skip
    return GuardForm(
        kind="llama-guard",
        opening=_NOTHING,
        lead=_with_query(lead, query, rendered),
        afters=(after,),
        strips="input" in rendered.stripped,
        categories=tuple(f"{code}: {name.strip()}" for code, name in categories),
        label_ids=tuple(ids for group in groups for ids in group),
        num_starts=len(groups),
    )


def _shieldgemma(query: str | None, tokenizer: TextTokenizer) -> GuardForm:
    described = _described()["shieldgemma"]
    goes_on = described["of_message" if query is None else "of_response"]
    guidelines = {name: f'"{name}": {goes_on}{text}' for name, text in described["categories"].items()}
    messages = (("user", "input"),) if query is None else (("user", "query"), ("assistant", "input"))
    rendered = None
    if "guideline" in (tokenizer.chat_template or ""):
        try:
            rendered = render_places(tokenizer, messages, {"guideline": place_of("guideline")})
        except TokenizerError as error:
            log.warning("%s; the guard's published prompt is used", error)
    opening = _NOTHING
    if rendered is None:
        places = {name: place_of(name) for name in ("query", "input", "guideline")}
        text = described["message" if query is None else "response"].format(**places)
        rendered, opening = RenderedPlaces(text, frozenset(("query", "input"))), tokenizer.leading_ids
    lead, after = rendered.split("input")
    if place_of("guideline") not in after:
        raise TokenizerError("the checkpoint's chat template must show the guideline after the message")
    labels = [tokenizer.encode(label).tolist() for label in ("Yes", "No")]
    if any(len(ids) != 1 for ids in labels):
        raise TokenizerError(
            "ShieldGemma's answers Yes and No must be one token each, and with this tokenizer they are not"
        )
    return GuardForm(
        kind="shieldgemma",
        opening=opening,
        lead=_with_query(lead, query, rendered),
        afters=tuple(after.replace(place_of("guideline"), text) for text in guidelines.values()),
        strips="input" in rendered.stripped,
        categories=tuple(name.removeprefix("No ") for name in guidelines),
        label_ids=tuple(map(tuple, labels)),
    )


def _with_query(text: str, query: str | None, rendered: RenderedPlaces) -> str:
    sent = (query or "").strip() if "query" in rendered.stripped else query or ""
    return text.replace(place_of("query"), sent)


def _answer_ids(context: str, answers: Sequence[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each answer behind the context; those of the answer alone where it would change the context's."""
    before, *behind = tokenizer.encode_many(["", *answers], before=context)
    fits = [np.array_equal(ids[: len(before)], before) for ids in behind]
    alone = tokenizer.encode_many(answers)
    found = [behind[i][len(before) :] if fit else alone[i] for i, fit in enumerate(fits)]
    return tuple(tuple(ids.tolist()) for ids in found)


def build_guard_prompt(
    request: ClassifyRequest, form: GuardForm, tokenizer: TextTokenizer, model: ModelConfig
) -> Prompt:
    """The tokens of all prompts: those of the first category for every input, then those of the next.

    Raises RequestError if the request does not fit.
    """
    if isinstance(request.input, Ragged):
        message = "input must be text for a guard, which puts its own prompt around it, got token ids"
        raise InvalidValueError(message, code="invalid_input_type", param="input")
    if request.query is not None:
        tokenizer.check_len(request.query, Place("query", "query"))
    texts = [text.strip() if form.strips else text for text in request.input]
    texts, truncated = _cut(request, texts, form, tokenizer, model)
    fixed, parts = _NOTHING, []
    for after in form.afters:
        fixed, found = tokenizer.encode_after(form.lead, ["", PROBE, *texts], after)
        parts.append(found)
    head = common_prefix(parts[0][0], parts[0][1])
    for found in parts[1:]:
        head = common_prefix(head, common_prefix(found[0], found[1]))
    whole = Ragged.concatenated([found.take(np.arange(2, len(found))) for found in parts])
    shared = shared_lens(head, whole)
    lens = whole.lens - shared
    prefix_ids = np.concatenate([form.opening, fixed, head])
    return Prompt(
        prefix_ids=prefix_ids,
        sequences=Ragged(whole.flat[ranges(whole.starts[:-1] + shared, lens)], starts_from_lens(lens)),
        joined=False,
        label_ids=form.label_ids,
        prompt_tokens=len(prefix_ids) + int(lens.sum()),
        truncated=truncated,
        shared_lens=len(form.opening) + len(fixed) + shared,
        items_field="input",
    )


def _cut(
    request: ClassifyRequest, texts: list[str], form: GuardForm, tokenizer: TextTokenizer, model: ModelConfig
) -> tuple[list[str], tuple[Truncation, ...]]:
    """The texts, cut so that each prompt has at most `truncate_prompt_tokens` tokens, and those that were cut."""
    longest = request.truncate_prompt_tokens
    if longest is None:
        for index, text in enumerate(texts):
            tokenizer.check_len(text, Place(f"input[{index}]", "input", index))
        return texts, ()
    longest = model.max_context_len if longest == LONGEST else longest
    around = max(len(tokenizer.encode(form.lead + after)) for after in form.afters) + len(form.opening)
    around += max(map(len, form.label_ids))  # the answer's tokens, and one more: a first word may merge otherwise
    room = min(longest, model.max_context_len) - around
    if room < 1 or longest > model.max_context_len:
        raise InvalidValueError(
            f"truncate_prompt_tokens must be from {around + 1} to {model.max_context_len} with this guard's prompt, "
            f"got {longest}",
            code="invalid_truncate_prompt_tokens",
            param="truncate_prompt_tokens",
        )
    if request.truncation_side == "left":
        message = "truncation_side must be right for a guard, got left"
        raise InvalidValueError(message, code="conflicting_parameters", param="truncation_side")
    bounded = [
        tokenizer.shortened(text, Place(f"input[{index}]", "input", index), room) for index, text in enumerate(texts)
    ]
    lens = tokenizer.encode_many(bounded).lens.tolist()
    cut = [index for index, length in enumerate(lens) if length > room]
    for index in cut:
        bounded[index] = tokenizer.cut(bounded[index], room)
    return bounded, tuple(Truncation(index, lens[index], room) for index in cut)
