"""From a rerank request to the token sequences that the model sees, by a profile.

    opening                              | lead {document}          | after
    before, body except for the document | tokenized as one text    | never cut
    the same for all documents           |                          | the same for all documents

The shared prefix is the opening and those tokens of the lead that no document can change. The document's tokens are the
ones after the prefix: a first word that merges with the last space of the lead belongs to the document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prefixwise.contract.checks import check_token_count
from prefixwise.contract.errors import InvalidValueError, ProfileError, TokenizerError, quote
from prefixwise.contract.inputs import Place
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, ranges, starts_from_lens
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import Truncation
from prefixwise.models.config import ModelConfig
from prefixwise.prompts.chat_places import ChatFrame, chat_frame
from prefixwise.prompts.profile import MAX_RERANK_CLASSES, Piece, Profile, many_classes, placeholders
from prefixwise.prompts.template import Prompt, surround
from prefixwise.prompts.tokenizer import TextTokenizer

_NOTHING = np.zeros(0, np.int32)
PROBE = "a"  # a document; the tokens of the lead with and without it show which ones do not depend on it


@dataclass(frozen=True)
class RerankPrompt:
    """The sequences of the documents. A document that is cut into chunks has several sequences."""

    prompt: Prompt
    owners: Int64Array  # [sequences]: the document of each; ascending, every document at least once


@dataclass(frozen=True)
class _Frame:
    """The parts of the prompt that a request's documents share."""

    opening: Int32Array
    opening_body_len: int  # of these, tokens of the body
    lead: str
    after: Int32Array
    after_text: str


class RerankPrompts:
    """One profile on one model. Raises ProfileError if the profile does not fit the model."""

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
        """The prefix of all requests with this query and instruction."""
        frame = self._frame(query, instruction)
        fixed, probed = self._tokenizer.encode_after(frame.lead, ["", PROBE])
        return np.concatenate([frame.opening, fixed, common_prefix(probed[0], probed[1])])

    def prompt(self, request: RerankRequest) -> RerankPrompt:
        """Raises RequestError if the query does not fit, or if a document does not and must not be cut."""
        frame = self._frame(request.query, request.instruction)
        texts = _bounded_documents(request, self._tokenizer)
        if self.profile.strip:
            texts = [text.strip() for text in texts]
        fixed, sequences = self._tokenizer.encode_after(frame.lead, ["", PROBE, *texts])
        head = common_prefix(sequences[0], sequences[1])
        sequences = sequences.take(np.arange(2, len(sequences)))
        shared = shared_lens(head, sequences)
        opening = np.concatenate([frame.opening, fixed])
        documents = _Documents(sequences, shared)
        room = self._room(frame, len(fixed), request.truncate_prompt_tokens) - shared
        self._check_room(len(opening) + len(head), len(frame.after), room, documents.lens)
        windows = documents.windows(request, room)
        check_token_count(len(windows.sequences.flat) + len(windows.owners) * len(frame.after))
        sequences, shared = surround(_NOTHING, windows.sequences, frame.after), shared[windows.owners]
        if self.profile.joint:
            longest = (room + len(frame.after))[windows.owners]
            sequences, shared = self._joint(frame, texts, head, windows, _Items(sequences, shared), longest)
        prompt = Prompt(
            prefix_ids=np.concatenate([opening, head]),
            sequences=sequences,
            joined=False,
            label_ids=self.label_ids,
            prompt_tokens=len(opening) + len(head) + int(documents.lens.sum()),
            truncated=windows.truncated,
            shared_lens=len(opening) + shared,
            items_field=request.documents_field,
        )
        return RerankPrompt(prompt, windows.owners)

    def _joint(
        self, frame: _Frame, texts: list[str], head: Int32Array, windows: _Windows, cut: _Items, longest: Int64Array
    ) -> _Items:
        """The items where each document that is whole is tokenized as one text with what follows it.

        `cut`: the items where none is. `longest` [items]: the tokens that an item may have.
        """
        _, found = self._tokenizer.encode_after(frame.lead, texts, frame.after_text)
        shared = shared_lens(head, found)
        lens = found.lens - shared
        whole = Ragged(found.flat[ranges(found.starts[:-1] + shared, lens)], starts_from_lens(lens))
        is_whole = np.bincount(windows.owners) == 1
        is_whole[[each.index for each in windows.truncated]] = False
        use_whole = is_whole[windows.owners] & (lens[windows.owners] <= longest)
        places = np.where(use_whole, len(cut.shared) + windows.owners, np.arange(len(cut.shared)))
        sequences = Ragged.concatenated([cut.sequences, whole]).take(places)
        return _Items(sequences, np.concatenate([cut.shared, shared])[places])

    def _frame(self, query: str, instruction: str | None) -> _Frame:
        profile = self.profile
        query = query.strip() if profile.strip else query
        if instruction is not None and not profile.takes_instruction:
            message = f"profile {quote(profile.name)} takes no instruction, got {quote(instruction)}"
            raise InvalidValueError(message, code="conflicting_parameters", param="instruction")
        self._tokenizer.check_len(query, Place("query", "query"))
        if instruction is None:
            instruction = profile.instruction
        else:
            self._tokenizer.check_len(instruction, Place("instruction", "instruction"))
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
        after = ["".join(after)] if profile.joint else after
        return _Frame(
            opening=np.concatenate([_NOTHING, bos, *parts]),
            opening_body_len=sum(map(len, parts[len(profile.before) :])),
            lead=lead,
            after=np.concatenate([_NOTHING, *map(self._tokenizer.encode, after)]),
            after_text="".join(after),
        )

    def _check_query(self, lens: Sequence[int]) -> None:
        """`lens`: the tokens of each piece of the body except the last."""
        most = self.profile.max_query_len
        for piece, length in zip(self.profile.body, lens, strict=False):
            if most is not None and length > most and "query" in placeholders(piece.text):
                raise InvalidValueError(
                    f"query must have at most {most} tokens with the text of profile {quote(self.profile.name)} "
                    f"around it, got {length}; shorten it",
                    code="context_too_long",
                    param="query",
                )

    def _room(self, frame: _Frame, fixed_len: int, max_tokens: int | None) -> int:
        """How many tokens a sequence may have after the fixed ones. `max_tokens`: of the request; -1: no limit."""
        profile, limits = self.profile, [self._model.max_context_len]
        if profile.max_context_len is not None:
            limits.append(profile.max_context_len)
        if max_tokens is not None and max_tokens >= 0:
            limits.append(max_tokens)
        longest = min(limits)
        room = longest - len(frame.opening) - len(frame.after)
        if profile.max_body_len is not None:
            room = min(room, profile.max_body_len - frame.opening_body_len)
        return room - fixed_len

    def _check_room(self, before: int, after: int, room: Int64Array, lens: Int64Array) -> None:
        """At least one token of a document must fit, unless it has none."""
        if (room < np.minimum(lens, 1)).any():
            raise InvalidValueError(
                f"query and instruction must leave room for a document, got {before} tokens before it and {after} "
                f"after it, where profile {quote(self.profile.name)} on this model, or the request's "
                f"truncate_prompt_tokens, has room for {before + after + int(room.min())} in all; shorten the query",
                code="context_too_long",
                param="query",
            )


class _Items(NamedTuple):
    """The tokens of each item after those it shares, and how many of the lead's it shares."""

    sequences: Ragged
    shared: Int64Array


@dataclass(frozen=True)
class _Windows:
    """The documents after they are cut."""

    sequences: Ragged
    owners: Int64Array
    truncated: tuple[Truncation, ...]


class _Documents:
    """The tokens of each document, after the tokens that it shares."""

    def __init__(self, sequences: Ragged, shared: Int64Array) -> None:
        self._sequences = sequences
        self._starts = sequences.starts[:-1] + shared
        self.lens: Int64Array = sequences.lens - shared

    def windows(self, request: RerankRequest, room: Int64Array) -> _Windows:
        """Cuts each document to at most `room` [I] tokens, or into chunks of that size if the request allows it."""
        room = np.maximum(room, 1)  # if there is none, no document has a token
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
        flat = self._sequences.flat[ranges(first[owners] + begin, lens)]
        return _Windows(Ragged(flat, starts_from_lens(lens)), owners, truncated)


def _bounded_documents(request: RerankRequest, tokenizer: TextTokenizer) -> list[str]:
    """The documents; one that is far too long for the model is cut if the request allows it, else an error."""
    longest = tokenizer.max_context_len * (request.max_chunks_per_doc or 1)
    name, bounded = request.documents_field, list(request.documents)
    for index, document in enumerate(request.documents):
        place = Place(f"{name}[{index}]", name, index)
        if request.truncate or request.max_tokens_per_doc is not None:
            most = min(longest, request.max_tokens_per_doc or longest)
            bounded[index] = tokenizer.shortened(document, place, most, request.truncation_side)
        else:
            tokenizer.check_len(document, place, longest)
    return bounded


def _refuse_long(request: RerankRequest, lens: Int64Array, most: Int64Array) -> None:
    too_long = np.flatnonzero(lens > most)
    if len(too_long):
        index = int(too_long[0])
        name = request.documents_field
        raise InvalidValueError(
            f"{name}[{index}] must fit: expected at most {most[index]} tokens, got {lens[index]}; "
            f"shorten it, or let it be cut ({request.cut_by})",
            code="context_too_long",
            param=name,
            item_index=index,
        )


def common_prefix(one: Int32Array, other: Int32Array) -> Int32Array:
    """The common prefix of both."""
    compared = min(len(one), len(other))
    differs = np.flatnonzero(one[:compared] != other[:compared])
    return one[: int(differs[0]) if len(differs) else compared]


def shared_lens(head: Int32Array, sequences: Ragged) -> Int64Array:
    """[I]: how many of the head's tokens each sequence begins with."""
    shared = np.zeros(len(sequences), np.int64)
    is_same = np.ones(len(sequences), bool)
    padded = np.append(sequences.flat, np.int32(-1))
    for position, token in enumerate(head.tolist()):
        at = np.minimum(sequences.starts[:-1] + position, sequences.starts[1:])
        is_same &= (sequences.lens > position) & (padded[at] == token)
        shared += is_same
    return shared


def _chat_frame_of(profile: Profile, tokenizer: TextTokenizer) -> ChatFrame | None:
    """None if the profile does not use the chat template."""
    if not profile.chat:
        return None
    if tokenizer.chat_template is None:
        raise ProfileError(f"profile {quote(profile.name)} needs a chat template, and this model has none")
    try:
        return chat_frame(tokenizer.chat_template, tokenizer.special_tokens)
    except TokenizerError as error:
        raise ProfileError(f"profile {quote(profile.name)} cannot be used: {error}") from None


def _put_around(chat: ChatFrame, leading: list[str], after: list[str]) -> None:
    """Puts the text of the template around the message, which all texts together are."""
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
    """Token ids; for a classifier the rows of its head, the positive one first."""
    if model.num_classes > MAX_RERANK_CLASSES:
        raise ProfileError(many_classes(model.num_classes))
    if profile.classifier and model.num_classes != 1:
        raise ProfileError(
            f"profile {quote(profile.name)} is for a classifier whose head has one row, and this model "
            + (f"has {model.num_classes}" if model.num_classes else "is none")
        )
    if model.num_classes:
        if profile.kind == "prob" or len(profile.labels or profile.label_token_ids) > 2:
            raise ProfileError(
                f"profile {quote(profile.name)} needs the logits of tokens, and this model is a classifier: expected "
                "a profile with one or two labels and relevance softmax, logit or logit_diff"
            )
        return tuple((row,) for row in reversed(range(model.num_classes)))
    if too_large := [each for each in profile.label_token_ids if each >= model.vocab_size]:
        raise ProfileError(
            f"profile {quote(profile.name)} needs the token {too_large[0]}, and this model has {model.vocab_size}"
        )
    if profile.label_token_ids:
        return tuple((each,) for each in profile.label_token_ids)
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
