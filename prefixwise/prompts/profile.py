"""A reranker profile: how a query and a document become tokens, which labels are read, and how they give the relevance.

A profile is a TOML file (`profiles/` holds those of the package). This module has its format and its validator.

    before   pieces of fixed text                      each piece is tokenized on its own,
    body     pieces; the last one ends in {document}   and the ids are joined
    after    pieces that follow every document, and are never cut; with `joint` they and the document are one text
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from string import Formatter
from typing import Literal, get_args

from prefixwise.contract.errors import ProfileError, describe, quote
from prefixwise.contract.scores import RelevanceKind
from prefixwise.models.families import FAMILIES

FORMAT = 1
PLACEHOLDERS = ("query", "document", "instruction")

# How the logits of the labels give the relevance. The first label is the positive one: its share of the softmax over
# the labels; its logit; its logit minus that of the second label; its probability among all tokens.
# `from_request`: labels and score mode come from the request (`/v1/score` only).
Relevance = RelevanceKind | Literal["from_request"]
RELEVANCES: tuple[Relevance, ...] = (*get_args(RelevanceKind), "from_request")
MAX_RERANK_CLASSES = 2  # of a classifier that reranks: one row is the score, two are `no` and `yes`
NUM_LABELS = {"softmax": (2, None), "logit": (1, 1), "logit_diff": (2, 2), "prob": (1, 1), "from_request": (0, 0)}


@dataclass(frozen=True)
class Piece:
    """Text that is tokenized on its own, with placeholders in braces (and braces doubled, as in `str.format`)."""

    text: str
    without_instruction: str | None = None  # the text if there is no instruction; None: the same text

    def template(self, instruction: str | None) -> str:
        """The text with its placeholders."""
        if instruction or self.without_instruction is None:
            return self.text
        return self.without_instruction


@dataclass(frozen=True)
class Profile:
    """One profile, valid in itself. `RerankPrompts` checks that it fits a tokenizer."""

    name: str
    description: str
    relevance: Relevance
    labels: tuple[str, ...]  # one token each, the positive one first; () if they are given by their ids
    before: tuple[Piece, ...]
    body: tuple[Piece, ...]
    after: tuple[Piece, ...]
    label_token_ids: tuple[int, ...] = ()  # in place of labels
    classifier: bool = False  # for a classifier alone: the row of its head is the relevance, and there are no labels
    temperature: float = 1.0  # the raw score is divided by it
    joint: bool = False  # the document and all pieces of `after` are tokenized as one text, unless the document is cut
    strip: bool = False  # query and document are stripped of blanks at both ends
    special_tokens: tuple[str, ...] = ()  # in its pieces; it does not fit tokenizers without them
    add_bos: bool = False  # begin with the tokenizer's leading ids (BOS)
    chat: bool = False  # all pieces together are a user's message in the checkpoint's chat template
    without_chat_template: str | None = None  # the profile to use if there is no such template
    instruction: str | None = None  # if the request has none
    max_context_len: int | None = None  # tokens; a longer document is cut
    max_body_len: int | None = None  # the same, counted without `before` and `after`
    max_query_len: int | None = None  # of the pieces of the body that have {query}; more is an error
    names: tuple[str, ...] = ()  # of checkpoints for this profile: patterns like those of file names, in lower case
    families: tuple[str, ...] = ()  # keys of FAMILIES: those of such checkpoints; (): any

    @property
    def can_rerank(self) -> bool:
        return self.relevance != "from_request"

    @property
    def kind(self) -> RelevanceKind:
        """The relevance of a profile that can rerank."""
        assert self.relevance != "from_request", "such a profile cannot rerank"
        return self.relevance

    @property
    def takes_instruction(self) -> bool:
        pieces = (*self.before, *self.body, *self.after)
        return any("instruction" in placeholders(piece.text) for piece in pieces)


def many_classes(num_classes: int) -> str:
    """Why a classifier with so many classes cannot rerank."""
    return (
        f"this model is a classifier of {num_classes} classes, so it has no relevance to order documents by: expected "
        "one row (the score) or two (no, yes); use /classify, or /v1/score without labels"
    )


def placeholders(template: str) -> list[str]:
    """The names in braces, in order. Raises ValueError if braces do not match."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def parse_profile(data: Mapping[str, object], origin: str) -> Profile:
    """Raises ProfileError, which lists all problems. `origin`: the file, for the message."""
    reader = _Reader(data)
    profile = _read(reader)
    problems = [*reader.problems, *reader.unread()] or [*_contradictions(profile)]
    if problems:
        message = " ".join("; ".join(problems).splitlines())
        raise ProfileError(f"{origin} is not a profile: {message}")
    return profile


def _read(reader: _Reader) -> Profile:
    prompt, recognise = reader.table("prompt"), reader.table("recognise")
    version = reader.integer("format")
    if version not in (None, FORMAT):
        reader.problems.append(f"format must be {FORMAT}, got {version}")
    profile = Profile(
        name=reader.text("name") or "",
        description=reader.text("description", "") or "",
        relevance=reader.one_of("relevance", RELEVANCES),
        labels=reader.texts("labels"),
        label_token_ids=reader.integers("label_token_ids"),
        classifier=reader.boolean("classifier"),
        temperature=reader.positive("temperature", 1.0),
        before=prompt.pieces("before"),
        body=prompt.pieces("body"),
        after=prompt.pieces("after"),
        joint=prompt.boolean("joint"),
        strip=prompt.boolean("strip"),
        special_tokens=prompt.texts("special_tokens"),
        add_bos=prompt.boolean("add_bos"),
        chat=prompt.boolean("chat"),
        without_chat_template=prompt.text("without_chat_template", None),
        instruction=reader.text("instruction", None),
        max_context_len=prompt.integer("max_context_len"),
        max_body_len=prompt.integer("max_body_len"),
        max_query_len=prompt.integer("max_query_len"),
        names=recognise.texts("names"),
        families=recognise.texts("families"),
    )
    for table in (prompt, recognise):
        reader.problems += [*table.problems, *table.unread()]
    return profile


class _Reader:
    """A table of the file, and its problems. Missing and wrong values are replaced by legal ones."""

    def __init__(self, data: Mapping[str, object], path: str = "") -> None:
        self._data = data
        self._path = path
        self._read: set[str] = set()
        self.problems: list[str] = []

    def unread(self) -> list[str]:
        """Problems: unknown keys, which are probably typos."""
        return [f"{self._path}{key} is unknown; {self._hint(key)}" for key in self._data if key not in self._read]

    def _hint(self, key: str) -> str:
        close = get_close_matches(key, self._read, 1, cutoff=0.8)
        return f"did you mean {self._path}{close[0]}?" if close else f"expected {', '.join(sorted(self._read))}"

    def table(self, key: str) -> _Reader:
        value = self._get(key, {}, lambda value: isinstance(value, Mapping), "a table")
        return _Reader(value, f"{self._path}{key}.")  # type: ignore[arg-type]

    def text(self, key: str, *default: str | None) -> str | None:
        """Required if there is no default."""
        if key not in self._data and not default:
            self._read.add(key)
            self.problems.append(f"{self._path}{key} is missing; expected a string")
            return None
        otherwise = default[0] if default else None
        return self._get(key, otherwise, _is_text, "a string that is not empty")  # type: ignore[return-value]

    def texts(self, key: str) -> tuple[str, ...]:
        def is_good(value: object) -> bool:
            return isinstance(value, list) and all(map(_is_text, value))

        return tuple(self._get(key, [], is_good, "a list of strings, none of them empty"))  # type: ignore[arg-type]

    def integer(self, key: str) -> int | None:
        def is_good(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 1

        return self._get(key, None, is_good, "an integer of 1 or more")  # type: ignore[return-value]

    def integers(self, key: str) -> tuple[int, ...]:
        def is_good(value: object) -> bool:
            return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)

        return tuple(self._get(key, [], is_good, "a list of integers of 0 or more"))  # type: ignore[arg-type]

    def positive(self, key: str, default: float) -> float:
        def is_good(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

        return float(self._get(key, default, is_good, "a number above 0"))  # type: ignore[arg-type]

    def boolean(self, key: str) -> bool:
        return bool(self._get(key, False, lambda value: isinstance(value, bool), "true or false"))

    def one_of(self, key: str, choices: tuple[Relevance, ...]) -> Relevance:
        expected = f"one of {', '.join(choices)}"
        if key not in self._data:
            self.problems.append(f"{self._path}{key} is missing; expected {expected}")

        def is_good(value: object) -> bool:
            return isinstance(value, str) and value in choices

        return self._get(key, choices[0], is_good, expected)  # type: ignore[return-value]

    def pieces(self, key: str) -> tuple[Piece, ...]:
        values = self._get(key, [], lambda value: isinstance(value, list), "a list of pieces")
        assert isinstance(values, list), "checked, or the default"
        return tuple(self._piece(value, f"{self._path}{key}[{i}]") for i, value in enumerate(values))

    def _get(self, key: str, default: object, is_good: Callable[[object], bool], expected: str) -> object:
        self._read.add(key)
        if key not in self._data:
            return default
        value = self._data[key]
        if is_good(value):
            return value
        self.problems.append(f"{self._path}{key} must be {expected}, got {describe(value)}")
        return default

    def _piece(self, value: object, path: str) -> Piece:
        if isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, Mapping):
            self.problems.append(f"{path} must be a string or a table with text, got {describe(value)}")
            return Piece("")
        table = _Reader(value, f"{path}.")
        piece = Piece(table.text("text") or "", table.text("without_instruction", None))
        for text in (piece.text, piece.without_instruction or ""):
            table.problems += _template_problems(text, path)
        self.problems += [*table.problems, *table.unread()]
        return piece


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _template_problems(text: str, path: str) -> Iterable[str]:
    expected = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    try:
        fields = list(Formatter().parse(text))
    except ValueError as error:
        yield f"{path}: {error}; write a literal brace twice"
        return
    for _, name, spec, conversion in fields:
        if name is not None and (name not in PLACEHOLDERS or spec or conversion):
            shown = f"{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}"
            yield f"{path}: unknown placeholder {shown}; expected {expected}, or literal braces written twice"


def _contradictions(profile: Profile) -> Iterable[str]:
    yield from _label_problems(profile)
    unknown = [family for family in profile.families if family not in FAMILIES]
    if unknown:
        yield f"recognise.families: expected some of {', '.join(FAMILIES)}, got {', '.join(map(quote, unknown))}"
    pieces = (*profile.before, *profile.body, *profile.after)
    texts = [text for piece in pieces for text in (piece.text, piece.without_instruction) if text is not None]
    used = [name for text in texts for name in placeholders(text)]
    for instruction in ("some", None):
        if not any("query" in placeholders(piece.template(instruction)) for piece in pieces):
            where = "with an instruction" if instruction else "without an instruction"
            yield f"{{query}} is nowhere in a prompt {where}; expected it in prompt.body"
            break
    if used.count("document") != 1 or not profile.body or not profile.body[-1].text.endswith("{document}"):
        yield "{document} must occur once, at the very end of the last piece of prompt.body"
    if any("document" in placeholders(piece.without_instruction or "") for piece in pieces):
        yield "{document} cannot be in without_instruction"
    if any("query" in placeholders(piece.text) for piece in profile.before):
        yield "prompt.before is fixed text: {query} must be in prompt.body"
    for token in profile.special_tokens:
        if not any(token in text for text in texts):
            yield f"prompt.special_tokens: {token} is in no piece"
    if profile.instruction is not None and not profile.takes_instruction:
        yield "instruction needs a piece with {instruction}"
    if profile.without_chat_template is not None and not profile.chat:
        yield "prompt.without_chat_template is only for prompt.chat = true"
    if profile.max_query_len is not None and "query" in placeholders(profile.body[-1].text if profile.body else ""):
        yield "prompt.max_query_len: {query} must be in a piece of its own, without {document}"
    if profile.chat and not profile.after:
        yield "prompt.after must not be empty with prompt.chat = true: a message does not end with a document"
    if profile.joint and not profile.after:
        yield "prompt.joint is for documents that are tokenized together with prompt.after, which is empty"
    if profile.joint and profile.max_body_len is not None:
        yield "prompt.max_body_len: with prompt.joint = true only max_context_len can bound a document"
    if profile.chat and profile.add_bos:
        yield "prompt.add_bos: a chat template adds its own"


def _label_problems(profile: Profile) -> Iterable[str]:
    least, most = (0, 0) if profile.classifier else NUM_LABELS[profile.relevance]
    if profile.classifier and profile.relevance != "logit":
        yield f'classifier = true: relevance must be "logit", got "{profile.relevance}"'
    if profile.labels and profile.label_token_ids:
        yield "labels and label_token_ids say the same twice; expected one of them"
    labels: tuple[object, ...] = profile.labels or profile.label_token_ids
    num_labels = len(labels)
    if num_labels < least or (most is not None and num_labels > most):
        expected = f"{least} or more" if most is None else str(least)
        taker = "a classifier" if profile.classifier else f'relevance "{profile.relevance}"'
        yield f"labels: {taker} takes {expected}, got {num_labels}"
    if len(set(labels)) < num_labels:
        yield f"labels must differ, got {', '.join(map(str, labels))}"
    if profile.temperature != 1.0 and profile.relevance in ("prob", "from_request"):
        yield f'temperature is for a sigmoid, and relevance "{profile.relevance}" has none'
