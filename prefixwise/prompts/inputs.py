"""From whole inputs, which are classified, embedded or completed, to the token sequences that the model sees.

text        [BOS] text [EOS]     the special tokens that the tokenizer adds around a text; no EOS where it is completed
token ids   as they are
"""

from __future__ import annotations

import numpy as np

from prefixwise.contract.checks import check_token_count
from prefixwise.contract.classify import LONGEST, ClassifyRequest
from prefixwise.contract.errors import InvalidValueError, TokenizerError
from prefixwise.contract.inputs import Place, vocabulary_error
from prefixwise.contract.ragged import Ragged, ranges, starts_from_lens
from prefixwise.contract.result import Truncation
from prefixwise.models.config import ModelConfig
from prefixwise.prompts.template import Prompt, surround
from prefixwise.prompts.tokenizer import TextTokenizer

_NOTHING = np.zeros(0, np.int32)


def build_inputs(
    request: ClassifyRequest,
    tokenizer: TextTokenizer | None,
    model: ModelConfig,
    label_ids: tuple[tuple[int, ...], ...],
) -> Prompt:
    """Tokenizes the inputs. Nothing is shared between them.

    Raises RequestError if the tokens are not legal, TokenizerError if there is text and no tokenizer.
    """
    before = after = _NOTHING
    if isinstance(request.input, Ragged):
        inputs = request.input
        check_token_count(len(inputs.flat), "input")
        _check_vocabulary(inputs, model.vocab_size)
    else:
        if tokenizer is None:
            raise TokenizerError("this model has no tokenizer, so text cannot be read; send token ids instead")
        inputs = tokenizer.encode_many(_bounded(request, request.input, tokenizer))
        if request.add_special_tokens:
            before, after = tokenizer.leading_ids, tokenizer.trailing_ids
    inputs, truncated = _truncate(request, inputs, len(before) + len(after), model.max_context_len)
    sequences = surround(before, inputs, after)
    if not sequences.lens.all():
        index = int(np.flatnonzero(sequences.lens == 0)[0])
        message = f"input[{index}] must hold at least one token, got a text that has none"
        raise InvalidValueError(message, code="empty_input", param="input", item_index=index)
    return Prompt(
        prefix_ids=_NOTHING,
        sequences=sequences,
        joined=True,
        label_ids=label_ids,
        prompt_tokens=len(sequences.flat),
        truncated=truncated,
        items_field="input",
    )


def build_prompts(
    prompts: tuple[str, ...] | Ragged, tokenizer: TextTokenizer | None, *, add_special_tokens: bool
) -> Ragged:
    """The tokens of prompts to complete: texts with BOS before them, token ids as they are.

    Raises RequestError if a prompt has no token, TokenizerError if there is text and no tokenizer.
    """
    if isinstance(prompts, Ragged):
        check_token_count(len(prompts.flat), "prompt")
        return prompts
    if tokenizer is None:
        raise TokenizerError("this model has no tokenizer, so text cannot be read; send token ids instead")
    for index, text in enumerate(prompts):
        tokenizer.check_len(text, Place(f"prompt[{index}]", "prompt", index))
    leading = tokenizer.leading_ids if add_special_tokens else _NOTHING
    sequences = surround(leading, tokenizer.encode_many(prompts), _NOTHING)
    if not sequences.lens.all():
        index = int(np.flatnonzero(sequences.lens == 0)[0])
        message = f"prompt[{index}] must hold at least one token, got a text that has none"
        raise InvalidValueError(message, code="empty_prompt", param="prompt", item_index=index)
    return sequences


def _bounded(request: ClassifyRequest, texts: tuple[str, ...], tokenizer: TextTokenizer) -> list[str]:
    """The texts; one that is far too long for the model is cut if the request allows it, else an error."""
    longest, bounded = request.truncate_prompt_tokens, list(texts)
    for index, text in enumerate(texts):
        place = Place(f"input[{index}]", "input", index)
        if longest is None:
            tokenizer.check_len(text, place)
        else:
            most = tokenizer.max_context_len if longest == LONGEST else min(longest, tokenizer.max_context_len)
            bounded[index] = tokenizer.shortened(text, place, most, request.truncation_side)
    return bounded


def _check_vocabulary(inputs: Ragged, vocab_size: int) -> None:
    bad = np.flatnonzero(inputs.flat >= vocab_size)
    if bad.size:
        index = int(np.searchsorted(inputs.starts, bad[0], side="right")) - 1
        place = Place(f"input[{index}][{bad[0] - inputs.starts[index]}]", "input", index)
        raise vocabulary_error(int(inputs.flat[bad[0]]), place, f"below {vocab_size}, the model's vocabulary size")


def _truncate(
    request: ClassifyRequest, inputs: Ragged, num_special: int, max_context_len: int
) -> tuple[Ragged, tuple[Truncation, ...]]:
    """Cuts long inputs, never their special tokens, and lists them with all of their tokens."""
    longest = request.truncate_prompt_tokens
    if longest is None:
        return inputs, ()
    longest = max_context_len if longest == LONGEST else longest
    if not num_special < longest <= max_context_len:
        raise InvalidValueError(
            f"truncate_prompt_tokens must be from {num_special + 1} to {max_context_len}, the tokens that the model "
            f"takes, got {longest}",
            code="invalid_truncate_prompt_tokens",
            param="truncate_prompt_tokens",
        )
    kept = np.minimum(inputs.lens, longest - num_special)
    first = inputs.starts[:-1] + (inputs.lens - kept if request.truncation_side == "left" else 0)
    cut = np.flatnonzero(kept < inputs.lens).tolist()
    truncated = tuple(Truncation(i, int(inputs.lens[i]) + num_special, longest) for i in cut)
    return Ragged(inputs.flat[ranges(first, kept)], starts_from_lens(kept)), truncated
