"""Facts about a model's tokenizer that a workload needs, and the default labels and delimiter.

They come from the tokenizer's files where they are local, else from `known_models.toml`. Nothing is downloaded: a
client needs no model to make a workload for its server.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixwise.contract.errors import ModelLoadError, TokenizerError
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.sources import embedded_model_path, open_checkpoint, split_revision

if TYPE_CHECKING:
    from prefixwise.models.checkpoint import TokenizerFiles


@dataclass(frozen=True)
class KnownModel:
    """What a workload needs to know of a tokenizer."""

    vocab_size: int  # rows of the embedding
    num_tokens: int  # ids from here on have a row but no token
    special_ids: tuple[int, ...]
    eos_id: int


@cache
def known_models() -> dict[str, KnownModel]:
    """Known models by hub id."""
    text = files("prefixwise.bench").joinpath("known_models.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["model"]
    return {name: _known_model(entry) for entry in entries for name in entry["names"]}


def _known_model(entry: dict[str, Any]) -> KnownModel:
    special = tuple(token_id for first, last in entry["special_token_ids"] for token_id in range(first, last + 1))
    return KnownModel(entry["vocab_size"], entry["num_tokens"], special, entry["eos_token_id"])


EMBEDDED = "embedded"


_ANSWERS = ("Yes", "No")  # what the contract's labels are in Qwen's vocabulary


@dataclass(frozen=True)
class TokenFacts:
    """Of one model."""

    model: str  # as it is recorded
    source: str  # a phrase for people
    vocab_size: int  # ids that may be sent to the model are below this
    num_tokens: int  # ids that have a token are below this
    special_ids: tuple[int, ...]  # ascending: every added token, as none of them stands for text
    eos_id: int | None = None
    answer_ids: tuple[int, ...] = ()  # the tokens Yes and No, or nothing where one of them is none


def token_facts(model: str) -> TokenFacts:
    """Of a folder, a .gguf file, a hub id (from the cache, or a known one), or `embedded`. Raises ModelLoadError."""
    if _is_embedded(model):
        checkpoint = open_checkpoint()
        return _facts_of(checkpoint.name, checkpoint)
    local = open_checkpoint(model) if Path(model).expanduser().exists() else _open_cached(model)
    if local is not None:
        return _facts_of(model, local)
    known = known_models().get(split_revision(model)[0])
    if known is None:
        raise ModelLoadError(
            f"{model!r} is not on this machine, and nothing is known of its tokenizer; expected a folder, "
            f"a .gguf file, {EMBEDDED!r}, or a hub id that is in the local cache or known, like {_example()}"
        )
    return _facts_of_known(model, known, "what is known of it, as it is not on this machine")


def _example() -> str:
    return next(iter(known_models()))


def _is_embedded(model: str) -> bool:
    if model == EMBEDDED:
        return True
    try:
        name = embedded_model_path().stem
    except ModelLoadError:  # it is not installed
        return False
    return model in (name, name.partition(".")[0])  # with or without its quantisation


def _open_cached(model: str) -> Checkpoint | None:
    """None where the cache has no such model, or half of one that is known."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    model_id, revision = split_revision(model)
    try:
        return open_checkpoint(snapshot_download(model_id, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    except ModelLoadError:
        if model_id in known_models():
            return None
        raise


def _facts_of(model: str, checkpoint: Checkpoint) -> TokenFacts:
    vocab_size = checkpoint.config.vocab_size
    try:
        return _facts_of_files(model, vocab_size, checkpoint.read_tokenizer_files())
    except TokenizerError:
        known = next((known_models()[name] for name in (model, *checkpoint.names) if name in known_models()), None)
    if known is None:
        return TokenFacts(model, "its vocabulary, as it has no tokenizer", vocab_size, vocab_size, ())
    rows = min(vocab_size, known.vocab_size)
    fitting = KnownModel(vocab_size, min(rows, known.num_tokens), known.special_ids, known.eos_id)
    return _facts_of_known(model, fitting, "what is known of it, as it has no tokenizer here")


def _facts_of_files(model: str, vocab_size: int, files: TokenizerFiles) -> TokenFacts:
    tokenizer = files.tokenizer
    special = files.special_ids | tokenizer.get_added_tokens_decoder().keys()
    eos = files.special_tokens.get("eos_token")
    eos_id = None if eos is None else tokenizer.token_to_id(eos)
    answers = [tokenizer.token_to_id(answer) for answer in _ANSWERS]
    known_answers = tuple(answer for answer in answers if answer is not None and answer < vocab_size)
    return TokenFacts(
        model,
        "its own tokenizer",
        vocab_size,
        min(vocab_size, tokenizer.get_vocab_size()),
        tuple(sorted(token_id for token_id in special if token_id < vocab_size)),
        eos_id if eos_id is not None and eos_id < vocab_size else None,
        known_answers if len(known_answers) == len(_ANSWERS) else (),
    )


def _facts_of_known(model: str, known: KnownModel, source: str) -> TokenFacts:
    special = tuple(token_id for token_id in known.special_ids if token_id < known.vocab_size)
    eos_id = known.eos_id if known.eos_id < known.vocab_size else None
    return TokenFacts(model, source, known.vocab_size, known.num_tokens, special, eos_id)


DEFAULT_LABELS = (9454, 2753)


DEFAULT_DELIMITER = 151643


def default_labels(facts: TokenFacts, taken: Collection[int] = ()) -> tuple[tuple[int, ...], str | None]:
    """The pair, and what is to be said where it is not the usual one: half of that pair has no meaning."""
    if max(DEFAULT_LABELS) < facts.vocab_size:
        return DEFAULT_LABELS, None
    if facts.answer_ids and not set(facts.answer_ids) & set(taken):
        own, which = facts.answer_ids, "its tokens Yes and No"
    else:
        left_out = {*facts.special_ids, *taken}
        ordinary = [token_id for token_id in range(facts.num_tokens) if token_id not in left_out]
        own, which = tuple(ordinary[: len(DEFAULT_LABELS)]), "its first ordinary tokens"
    return own, _replaced(f"label_token_ids {list(DEFAULT_LABELS)}", list(own), which, facts)


def default_delimiter(facts: TokenFacts, taken: Collection[int] = ()) -> tuple[int, str | None]:
    """The usual one, or the tokenizer's own with what is to be said about it."""
    if facts.vocab_size > DEFAULT_DELIMITER:
        return DEFAULT_DELIMITER, None
    special = [token_id for token_id in facts.special_ids if token_id not in taken]
    if facts.eos_id is not None and facts.eos_id not in taken:
        own, which = facts.eos_id, "its end of text"
    elif special:
        own, which = special[0], "its first special token"
    else:
        own = next(token_id for token_id in range(facts.vocab_size - 1, -1, -1) if token_id not in taken)
        which = "its last id"
    return own, _replaced(f"delimiter_token_id {DEFAULT_DELIMITER}", own, which, facts)


def _replaced(default: str, own: object, which: str, facts: TokenFacts) -> str:
    return f"the default {default} is not in the vocabulary of {facts.model} ({facts.vocab_size}): {own}, {which}"
