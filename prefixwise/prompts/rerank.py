"""From a rerank request to the token sequences that the model sees, by a profile.

    opening                             | row                      | after
    before, body but for the document   | lead {document}          | after
    the same for all documents          | tokenized as one text    | the same for all, and never cut

The shared prefix is the opening and as much of the lead as no document can change. A document's tokens are what
comes after it, so a first word that merges with the lead's last space belongs to the document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixwise.contract.describe import quote
from prefixwise.contract.errors import InvalidValueError, ProfileError, TokenizerError
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, ranges, starts_from_lens
from prefixwise.contract.rerank import RerankRequest
from prefixwise.contract.result import Truncation
from prefixwise.models.config import ModelConfig
from prefixwise.prompts.chat_template import ChatFrame, chat_frame
from prefixwise.prompts.profile import Piece, Profile, placeholders
from prefixwise.prompts.template import Prompt, surround
from prefixwise.prompts.tokenizer import TextTokenizer

_NOTHING = np.zeros(0, np.int32)
_PROBE = "a"  # some document; what the lead's tokens have in common with and without it is the lead's own


@dataclass(frozen=True)
class RerankPrompt:
    """Rows of documents. A document that was cut into chunks has several."""

    prompt: Prompt
    owners: Int64Array  # [rows]: whose row it is; ascending, every document at least once


@dataclass(frozen=True)
class _Frame:
    """What a request's documents have in common."""

    opening: Int32Array
    opening_body_len: int  # of these, tokens of the body
    lead: str
    after: Int32Array


class RerankPrompts:
    """One profile on one model. Raises ProfileError where they do not belong together."""

    def __init__(self, profile: Profile, tokenizer: TextTokenizer, model: ModelConfig) -> None:
        if not profile.can_rerank:
            raise ProfileError(
                f"profile {quote(profile.name)} has no labels of its own, so it cannot rerank; "
                "score with labels of your own (/v1/score, prefixwise score), or choose another profile"
            )
        self.profile = profile
        self._chat = _chat_frame_of(profile, tokenizer)
        self._tokenizer = tokenizer
        self._model = model
        _check_special_tokens(profile, tokenizer)
        self.label_ids = _label_ids(profile, tokenizer, model)

    def prefix(self, query: str, instruction: str | None) -> Int32Array:
        """What all documents of such a request have in common."""
        frame = self._frame(query, instruction)
        fixed, probed = self._tokenizer.encode_behind(frame.lead, ["", _PROBE])
        return np.concatenate([frame.opening, fixed, _common(probed[0], probed[1])])

    def prompt(self, request: RerankRequest) -> RerankPrompt:
        """Raises RequestError where a document does not fit, and is not to be cut, or where the query does not."""
        frame = self._frame(request.query, request.instruction)
        fixed, rows = self._tokenizer.encode_behind(frame.lead, ["", _PROBE, *request.documents])
        head = _common(rows[0], rows[1])
        rows = rows.take(np.arange(2, len(rows)))
        shared = _shared_lens(head, rows)
        opening = np.concatenate([frame.opening, fixed])
        documents = _Documents(rows, shared)
        room = self._row_room(frame, len(fixed)) - shared
        self._check_room(len(opening) + len(head), len(frame.after), room, documents.lens)
        windows = documents.windows(request, room)
        prompt = Prompt(
            prefix_ids=np.concatenate([opening, head]),
            sequences=surround(_NOTHING, windows.rows, frame.after),
            joined=False,
            label_ids=self.label_ids,
            prompt_tokens=len(opening) + len(head) + int(documents.lens.sum()),
            truncated=windows.truncated,
            shared_lens=len(opening) + shared[windows.owners],
            items_field=request.documents_field,
        )
        return RerankPrompt(prompt, windows.owners)

    def _frame(self, query: str, instruction: str | None) -> _Frame:
        profile = self.profile
        if instruction is not None and not profile.takes_instruction:
            message = f"profile {quote(profile.name)} takes no instruction, got {quote(instruction)}"
            raise InvalidValueError(message, code="conflicting_parameters", param="instruction")
        if instruction is None:
            instruction = profile.instruction
        values = {"query": query, "instruction": instruction or "", "document": ""}

        def fill(pieces: Iterable[Piece]) -> list[str]:
            return [piece.template(instruction).format(**values) for piece in pieces]

        leading, after = fill((*profile.before, *profile.body)), fill(profile.after)
        if self._chat is not None:
            _put_around(self._chat, leading, after)
        *opening_texts, lead = leading
        parts = [self._tokenizer.encode(text) for text in opening_texts]
        self._check_query([len(part) for part in parts[len(profile.before) :]])
        bos = self._tokenizer.leading_ids if profile.add_bos else _NOTHING
        return _Frame(
            opening=np.concatenate([_NOTHING, bos, *parts]),
            opening_body_len=sum(map(len, parts[len(profile.before) :])),
            lead=lead,
            after=np.concatenate([_NOTHING, *map(self._tokenizer.encode, after)]),
        )

    def _check_query(self, lens: Sequence[int]) -> None:
        """`lens`: tokens of the body's pieces but for the last."""
        most = self.profile.max_query_len
        for piece, length in zip(self.profile.body, lens, strict=False):
            if most is not None and length > most and "query" in placeholders(piece.text):
                raise InvalidValueError(
                    f"query must have at most {most} tokens with the words of profile {quote(self.profile.name)} "
                    f"around it, got {length}; shorten it",
                    code="context_too_long",
                    param="query",
                )

    def _row_room(self, frame: _Frame, fixed_len: int) -> int:
        """Tokens that a row may have, behind what was tokenized once."""
        profile = self.profile
        longest = min(self._model.max_context_len, profile.max_context_len or self._model.max_context_len)
        room = longest - len(frame.opening) - len(frame.after)
        if profile.max_body_len is not None:
            room = min(room, profile.max_body_len - frame.opening_body_len)
        return room - fixed_len

    def _check_room(self, before: int, after: int, room: Int64Array, lens: Int64Array) -> None:
        """At least one token of a document must fit, unless it has none."""
        if (room < np.minimum(lens, 1)).any():
            raise InvalidValueError(
                f"query and instruction must leave room for a document, got {before} tokens before it and {after} "
                f"after it, where profile {quote(self.profile.name)} on this model has room for "
                f"{before + after + int(room.min())} in all; shorten the query",
                code="context_too_long",
                param="query",
            )


@dataclass(frozen=True)
class _Windows:
    """What is left of the documents."""

    rows: Ragged
    owners: Int64Array
    truncated: tuple[Truncation, ...]


class _Documents:
    """The documents' own tokens: each row behind what it shares."""

    def __init__(self, rows: Ragged, shared: Int64Array) -> None:
        self._rows = rows
        self._starts = rows.starts[:-1] + shared
        self.lens: Int64Array = rows.lens - shared

    def windows(self, request: RerankRequest, room: Int64Array) -> _Windows:
        """At most `room` [I] tokens to a row, one row for each document unless it may be cut into several."""
        room = np.maximum(room, 1)  # where there is none, no document has a token
        longest = int(self.lens.max())  # no more chunks than it has tokens: a product of large numbers would wrap
        most = min(request.max_chunks_per_doc or 1, max(1, longest)) * room
        kept = self.lens
        if request.max_tokens_per_doc is not None:
            kept = np.minimum(kept, min(request.max_tokens_per_doc, longest))
        if not request.truncate:
            _refuse_long(request, kept, most)
        kept = np.minimum(kept, most)
        num_chunks = np.maximum(-(-kept // room), 1)
        cut = np.flatnonzero(kept < self.lens)
        truncated = tuple(Truncation(int(i), int(self.lens[i]), int(kept[i])) for i in cut)
        first = self._starts + (self.lens - kept if request.truncation_side == "left" else 0)
        owners = np.repeat(np.arange(len(kept)), num_chunks)
        number = np.arange(len(owners)) - np.repeat(starts_from_lens(num_chunks)[:-1], num_chunks)
        begin = number * room[owners]
        lens = np.minimum(room[owners], kept[owners] - begin)
        flat = self._rows.flat[ranges(first[owners] + begin, lens)]
        return _Windows(Ragged(flat, starts_from_lens(lens)), owners, truncated)


def _refuse_long(request: RerankRequest, lens: Int64Array, most: Int64Array) -> None:
    too_long = np.flatnonzero(lens > most)
    if len(too_long):
        index = int(too_long[0])
        name = request.documents_field
        raise InvalidValueError(
            f"{name}[{index}] must fit: expected at most {most[index]} tokens, got {lens[index]}; "
            "shorten it, or let it be cut (truncate)",
            code="context_too_long",
            param=name,
            item_index=index,
        )


def _common(one: Int32Array, other: Int32Array) -> Int32Array:
    """The tokens that both begin with."""
    compared = min(len(one), len(other))
    differs = np.flatnonzero(one[:compared] != other[:compared])
    return one[: int(differs[0]) if len(differs) else compared]


def _shared_lens(head: Int32Array, rows: Ragged) -> Int64Array:
    """[I]: how many of the head's tokens each row begins with."""
    shared = np.zeros(len(rows), np.int64)
    is_same = np.ones(len(rows), bool)
    padded = np.append(rows.flat, np.int32(-1))
    for position, token in enumerate(head.tolist()):
        at = np.minimum(rows.starts[:-1] + position, rows.starts[1:])
        is_same &= (rows.lens > position) & (padded[at] == token)
        shared += is_same
    return shared


def _chat_frame_of(profile: Profile, tokenizer: TextTokenizer) -> ChatFrame | None:
    """None where the profile is no chat's."""
    if not profile.chat:
        return None
    if tokenizer.chat_template is None:
        raise ProfileError(f"profile {quote(profile.name)} needs a chat template, and this model has none")
    try:
        return chat_frame(tokenizer.chat_template, tokenizer.special_tokens)
    except TokenizerError as error:
        raise ProfileError(f"profile {quote(profile.name)} cannot be used: {error}") from None


def _put_around(chat: ChatFrame, leading: list[str], after: list[str]) -> None:
    """The template's words around the message that the texts are together."""
    if chat.trims:
        leading[0], after[-1] = leading[0].lstrip(), after[-1].rstrip()
    leading[0], after[-1] = chat.before + leading[0], after[-1] + chat.after


def _check_special_tokens(profile: Profile, tokenizer: TextTokenizer) -> None:
    lacking = [token for token in profile.special_tokens if tokenizer.token_id(token) is None]
    if lacking:
        raise ProfileError(
            f"profile {quote(profile.name)} needs the special tokens {', '.join(profile.special_tokens)}, "
            f"and this model's tokenizer lacks {', '.join(lacking)}: it is for another model"
        )


def _label_ids(profile: Profile, tokenizer: TextTokenizer, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Tokens of the vocabulary; for a classifier the rows of its head, the positive one first."""
    if model.num_classes:
        if profile.kind == "prob" or len(profile.labels) > 2:
            raise ProfileError(
                f"profile {quote(profile.name)} needs the logits of tokens, and this model is a classifier: expected "
                "a profile with one or two labels and relevance softmax, logit or logit_diff"
            )
        return tuple((row,) for row in reversed(range(model.num_classes)))
    ids = [tokenizer.encode(label).tolist() for label in profile.labels]
    wrong = [
        f"{quote(label)} is {len(each)}" for label, each in zip(profile.labels, ids, strict=True) if len(each) != 1
    ]
    if wrong:
        raise ProfileError(
            f"profile {quote(profile.name)} needs labels that are one token each, and with this model's tokenizer "
            f"{', '.join(wrong)}"
        )
    return tuple(map(tuple, ids))
