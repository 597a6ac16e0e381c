"""Which profile goes with a checkpoint: by its name, by its head, or none but the one for any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.describe import quote
from prefixwise.contract.errors import ProfileError, TokenizerError
from prefixwise.models.checkpoint import Checkpoint, StoredTensor, as_float32
from prefixwise.prompts.chat_template import chat_frame
from prefixwise.prompts.profile import Profile
from prefixwise.prompts.profile_files import RESERVED_NAME, builtin_profile, builtin_profiles
from prefixwise.prompts.tokenizer import TextTokenizer

FOR_ANY_MODEL = "chat-yes-no"
DEFAULT = RESERVED_NAME
_SAME_DIRECTION = 0.999  # cosine; rows are rounded to bfloat16, and a head that was trained further is another one


@dataclass(frozen=True)
class ProfileChoice:
    """The profile of requests that name none, and those that they may name."""

    default: Profile | None  # None: a classifier that no profile is known for
    reason: str  # for people
    by_name: Mapping[str, Profile]
    warning: str | None = None  # what every answer must say


def choose_profile(asked: Profile | None, checkpoint: Checkpoint, tokenizer: TextTokenizer | None) -> ProfileChoice:
    """The one that was asked for, or the one that the checkpoint wants."""
    by_name = dict(builtin_profiles())
    if asked is not None:
        return ProfileChoice(asked, "it was asked for", {**by_name, asked.name: asked})
    for name in checkpoint.names:
        for profile in builtin_profiles().values():
            if _is_named(profile, _last_part(name), checkpoint.config.family):
                return ProfileChoice(profile, f"the model is called {name}", by_name)
    if checkpoint.config.num_classes:
        return _by_head(checkpoint, tokenizer, by_name)
    return profile_of_any_model(checkpoint.name, tokenizer)


def profile_of_any_model(model: str = "this model", tokenizer: TextTokenizer | None = None) -> ProfileChoice:
    """For a model that nothing is known of: every answer says so."""
    profile, why = builtin_profile(FOR_ANY_MODEL), ""
    failure = None if tokenizer is None else chat_failure(tokenizer)
    if failure is not None and profile.without_chat_template is not None:
        profile, why = builtin_profile(profile.without_chat_template), f" ({failure})"
    warning = (
        f"no reranker profile is known for {model}, so {profile.name} was used{why}; "
        "for a model that was trained to rerank, name its own profile"
    )
    return ProfileChoice(profile, "none is known for the model", dict(builtin_profiles()), warning)


def chat_failure(tokenizer: TextTokenizer) -> str | None:
    """Why it has no chat template that can be used; None where it has."""
    if tokenizer.chat_template is None:
        return "it has no chat template"
    try:
        chat_frame(tokenizer.chat_template, tokenizer.special_tokens)
    except TokenizerError as error:
        return str(error)
    return None


def _last_part(name: str) -> str:
    """Of a hub id or a path: a folder above may be called anything."""
    return name.rstrip("/").rpartition("/")[2]


def _is_named(profile: Profile, name: str, family: str) -> bool:
    is_family = not profile.families or family in profile.families
    return is_family and any(fnmatchcase(name.lower(), pattern) for pattern in profile.names)


def _by_head(checkpoint: Checkpoint, tokenizer: TextTokenizer | None, by_name: Mapping[str, Profile]) -> ProfileChoice:
    """A classifier whose head was made from the rows of a profile's labels."""
    candidates = [profile for profile in by_name.values() if profile.names and tokenizer is not None]
    for profile in candidates:
        is_family = not profile.families or checkpoint.config.family in profile.families
        if is_family and tokenizer is not None and _head_is_of(profile, checkpoint, tokenizer):
            return ProfileChoice(profile, "the model's head is made of its labels' rows", by_name)
    return ProfileChoice(None, "the model is a classifier that no profile is known for", by_name)


def _head_is_of(profile: Profile, checkpoint: Checkpoint, tokenizer: TextTokenizer) -> bool:
    """Compared with the embedding: models with a tied head have its rows there."""
    ids = [tokenizer.token_id(label) for label in profile.labels]
    embedding, head = checkpoint.tensors["embedding"], _rows(checkpoint.tensors["head"], 0, None)
    if any(label_id is None or label_id >= embedding.shape[0] for label_id in ids):
        return False
    labels = np.concatenate([_rows(embedding, int(label_id), 1) for label_id in ids if label_id is not None])
    direction = labels[0] - labels[1] if len(labels) == 2 else labels[0]
    made = head[1] - head[0] if len(head) == 2 else head[0]
    length = np.linalg.norm(direction) * np.linalg.norm(made)
    return bool(length > 0 and made @ direction / length > _SAME_DIRECTION)


def _rows(tensor: StoredTensor, start: int, count: int | None) -> NDArray[np.float32]:
    stop = tensor.shape[0] if count is None else start + count
    return as_float32(tensor.read_rows(start, stop), tensor.dtype)


def fitting_profile(profile: Profile, by_name: Mapping[str, Profile], tokenizer: TextTokenizer) -> Profile:
    """The same, or the one that it names for models without a chat template that works. Raises ProfileError."""
    other = profile.without_chat_template
    if not profile.chat or other is None or chat_failure(tokenizer) is None:
        return profile
    if other not in by_name:
        raise ProfileError(f"prompt.without_chat_template must be one of {', '.join(by_name)}, got {quote(other)}")
    return by_name[other]


def profile_of(choice: ProfileChoice, name: str | None) -> Profile:
    """The profile that a request means; no name and "default" are the model's own. Raises ProfileError."""
    if name not in (None, DEFAULT):
        if name not in choice.by_name:
            raise ProfileError(f"profile must be one of {', '.join(choice.by_name)}, got {quote(str(name))}")
        return choice.by_name[name]
    if choice.default is None:
        known = ", ".join(name for name, profile in choice.by_name.items() if profile.names)
        raise ProfileError(f"{choice.reason}: say which one its prompts are to follow (--profile); ours are {known}")
    return choice.default
