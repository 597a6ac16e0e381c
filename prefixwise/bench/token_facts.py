"""What a workload must know of a model's tokenizer: from its files where they are here, else from what is known.

Nothing is downloaded: a client needs no model to make a workload for its server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefixwise.bench.known_models import KnownModel, known_models
from prefixwise.contract.errors import ModelLoadError, TokenizerError
from prefixwise.models.checkpoint import Checkpoint, open_checkpoint
from prefixwise.models.embedded import embedded_model_path

if TYPE_CHECKING:
    from prefixwise.models.tokenizer_files import TokenizerFiles

EMBEDDED = "embedded"
_ANSWERS = ("Yes", "No")  # what the contract's labels are in Qwen's vocabulary


@dataclass(frozen=True)
class TokenFacts:
    """Of one model."""

    model: str  # as it is recorded
    source: str  # in words, for people
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
    known = known_models().get(model)
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

    try:
        return open_checkpoint(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    except ModelLoadError:
        if model in known_models():
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
