"""The tokenizer in a GGUF file's metadata: a vocabulary, its merges, and the name of a split rule.

Two kinds: byte-level BPE (`gpt2`: Qwen, Llama 3, SmolLM2, Mistral Nemo) and SentencePiece (`llama`: Llama 2,
Mistral, Gemma). The rules follow each model's own tokenizer, and llama.cpp where the file is the only source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from prefixwise.contract.errors import ModelLoadError, TokenizerError, describe
from prefixwise.models.checkpoint import TokenizerFiles, naming_file
from prefixwise.models.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of `token_type`: tokens that text may contain as a whole
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_USED_IDS = ("bos_token_id", "eos_token_id", "unknown_token_id")
_SWITCHES = ("add_bos_token", "add_eos_token", "add_space_prefix")
_SPACE = "▁"  # how SentencePiece writes a space
_PHI3, _PHI3_KEEPS_BLANKS = "phi3", ("<unk>", "<s>", "<|endoftext|>")  # its other whole tokens take those after them
_GEMMAS = ("gemma", "gemma2", "gemma3")  # values of `general.architecture`

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _SplitRule:
    """How text is split before the merges, and the settings that belong to that rule."""

    pattern: str | None = None  # None: GPT-2's
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token needs no merges
    adds_bos: bool = False  # where the file does not say


_LLAMA3 = _SplitRule(_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
_SPLIT_RULES: dict[str, _SplitRule] = {  # by `tokenizer.ggml.pre`
    "default": _SplitRule(),
    "gpt-2": _SplitRule(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "dbrx": _SplitRule(_LLAMA3_SPLIT),  # OLMo-2, Phi-4
    "qwen2": _SplitRule(_QWEN2_SPLIT, nfc=True),
    "refact": _SplitRule(single_digits=True),  # Granite
    "smollm": _SplitRule(single_digits=True),
    "tekken": _SplitRule(_TEKKEN_SPLIT, ignore_merges=True, adds_bos=True),
}


_NO_TOKENIZER = ("none", "no_vocab")  # kinds of a file without a vocabulary


def read_gguf_tokenizer(file: GgufFile) -> TokenizerFiles:
    """Build the tokenizer of the file. Raises TokenizerError where it has none, or one that we do not know, and
    ModelLoadError where it is damaged."""
    with naming_file(file.path):
        return _read_tokenizer(file)


def _read_tokenizer(file: GgufFile) -> TokenizerFiles:
    builders: dict[str, Callable[[Mapping[str, Any]], tuple[Tokenizer, bool]]]
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    metadata = _tokenizer_metadata(file.metadata)
    kind = metadata.get("model")
    if not metadata or kind in _NO_TOKENIZER:
        raise TokenizerError(f"{file.path} has no tokenizer, so text cannot be tokenized; send token ids instead")
    for key in ("model", "tokens"):
        if key not in metadata:
            raise ModelLoadError(f"its tokenizer lacks {key!r}, and has {', '.join(sorted(metadata))}")
    if kind not in builders:
        raise TokenizerError(f"{file.path}: unsupported tokenizer {kind!r}; supported: {', '.join(builders)}")
    _check(metadata)
    if file.metadata.get("general.architecture") in _GEMMAS:
        metadata |= _as_in_gemmas_model(metadata)
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ModelLoadError(f"its chat template must be text, got {describe(template)}")
    try:
        tokenizer, adds_bos = builders[kind](metadata)
    except TokenizerError:
        raise
    except KeyError as error:
        raise ModelLoadError(f"its tokenizer lacks {error}, which {kind!r} needs") from None
    except Exception as error:  # the tokenizers library raises bare Exception for every fault of a vocabulary
        raise ModelLoadError(f"its tokenizer cannot be built: {error}") from None
    is_phi3 = kind == "llama" and file.metadata.get("general.architecture") == _PHI3
    special_ids = _add_whole_tokens(tokenizer, metadata, strips_blanks=is_phi3)
    leading_ids = _leading_ids(metadata, adds_bos)
    has_eos = metadata.get("add_eos_token", False) and "eos_token_id" in metadata
    trailing_ids = (metadata["eos_token_id"],) if has_eos else ()
    return TokenizerFiles(tokenizer, leading_ids, template, special_ids, _special_tokens(metadata), trailing_ids)


def _tokenizer_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}


def _check(metadata: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for lists that do not fit the vocabulary, and for ids that it does not have."""
    tokens = metadata["tokens"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(f"its tokens must be a list of texts, got {describe(tokens)}")
    for key in ("scores", "token_type"):
        numbers = metadata.get(key)
        if numbers is not None and (not isinstance(numbers, np.ndarray) or len(numbers) != len(tokens)):
            raise ModelLoadError(f"its tokenizer's {key} must be {len(tokens)} numbers, got {describe(numbers)}")
    if not np.isfinite(metadata.get("scores", 0)).all():
        raise ModelLoadError("its tokenizer's scores must be finite numbers")
    for key, value in metadata.items():
        if key in _USED_IDS and (type(value) is not int or not 0 <= value < len(tokens)):
            raise ModelLoadError(f"its tokenizer's {key} must be an id below {len(tokens)}, got {describe(value)}")
        if key in _SWITCHES and type(value) is not bool:
            raise ModelLoadError(f"its tokenizer's {key} must be true or false, got {describe(value)}")


def _as_in_gemmas_model(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens and scores as Gemma's tokenizer.model has them. User-defined tokens (runs of spaces, tabs and line breaks)
    score 0, the best; converters write another score, and spaces in their texts. All other tokens are in the order of
    their scores."""
    types = metadata.get("token_type", np.zeros(len(metadata["tokens"]), np.int32))
    is_user_defined = np.asarray(types) == _USER_DEFINED
    named = zip(metadata["tokens"], is_user_defined.tolist(), strict=True)
    return {
        "tokens": [token.replace(" ", _SPACE) if is_whole else token for token, is_whole in named],
        "scores": np.where(is_user_defined, 0.0, -np.arange(len(types), dtype=np.float32)),
    }


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    rule = _split_rule(metadata.get("pre", "default"))
    merges = [_merge_pair(merge) for merge in metadata["merges"]]
    tokenizer = Tokenizer(BPE(_vocabulary(metadata["tokens"]), merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


def _split_rule(name: str) -> _SplitRule:
    if name not in _SPLIT_RULES:
        raise TokenizerError(f"unsupported pre-tokenizer {name!r}; supported: {', '.join(_SPLIT_RULES)}")
    return _SPLIT_RULES[name]


def _pre_tokenizer(rule: _SplitRule) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _merge_pair(merge: str) -> tuple[str, str]:
    """`Ġ t` to its two halves; the first character is never the separator."""
    space = merge.index(" ", 1)
    return merge[:space], merge[space + 1 :]


def _sentencepiece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    tokens: list[str] = metadata["tokens"]
    unknown = tokens[metadata.get("unknown_token_id", 0)]
    merges = _merges_from_scores(tokens, metadata["scores"].tolist())
    tokenizer = Tokenizer(BPE(_vocabulary(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    add_prefix = bool(metadata.get("add_space_prefix", True))
    prefix = [normalizers.Prepend(_SPACE)] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: every cut of a token in two is a merge,
    best tokens first. Among the cuts of one token, longer left parts come first, as in Hugging Face's code."""
    known = set(tokens)
    cuts = [
        (-score, -cut, -len(token), index, token[:cut], token[cut:])
        for index, (token, score) in enumerate(zip(tokens, scores, strict=True))
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    return [(left, right) for *_, left, right in sorted(cuts)]


def _add_whole_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], *, strips_blanks: bool) -> frozenset[int]:
    """Add the tokens that text may contain as a whole, before any merge; returns the special ids.

    `strips_blanks`: as Phi-3, whose tokens swallow the blanks behind them.
    """
    tokens: list[str] = metadata["tokens"]
    types = metadata.get("token_type", ())
    special = {index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    special |= {metadata[key] for key in ("bos_token_id", "eos_token_id") if key in metadata}
    plain = [index for index, kind in enumerate(types) if kind == _USER_DEFINED and index not in special]

    def added(index: int, *, special: bool) -> AddedToken:
        rstrip = strips_blanks and tokens[index] not in _PHI3_KEEPS_BLANKS
        return AddedToken(tokens[index], special=special, normalized=False, rstrip=rstrip)

    tokenizer.add_special_tokens([added(index, special=True) for index in sorted(special)])
    tokenizer.add_tokens([added(index, special=False) for index in plain])
    return frozenset(special)


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the tokens that have a role, by Hugging Face's names for the roles."""
    tokens: list[str] = metadata["tokens"]
    ids = {role: metadata.get(f"{name}_token_id") for role, name in _ROLES.items()}
    return {role: tokens[index] for role, index in ids.items() if isinstance(index, int) and 0 <= index < len(tokens)}


def _leading_ids(metadata: Mapping[str, Any], adds_bos: bool) -> tuple[int, ...]:
    wanted = metadata.get("add_bos_token", adds_bos) and "bos_token_id" in metadata
    return (metadata["bos_token_id"],) if wanted else ()
