"""A profile that can be followed by hand, for `tests/prompts/merging_tokenizer.py`: x QUERY | b DOCUMENT | c."""

from __future__ import annotations

from prefixwise.prompts.profile import Profile, parse_profile
from prefixwise.prompts.profile_choice import ProfileChoice, builtin_profiles

LETTERS: Profile = parse_profile(
    {
        "name": "letters",
        "relevance": "softmax",
        "labels": ["y", "z"],
        "instruction": "a",
        "prompt": {"before": ["x"], "body": ["{instruction}", "{query}", "b{document}"], "after": ["c"]},
    },
    "letters",
)


def letters_choice(warning: str | None = None) -> ProfileChoice:
    by_name = {**builtin_profiles(), LETTERS.name: LETTERS}
    return ProfileChoice(LETTERS, "it was asked for", by_name, warning)
