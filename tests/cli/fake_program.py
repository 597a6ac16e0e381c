"""The program with a model of simple arithmetic in place of a real one.

Run it as `python -m tests.cli.fake_program`, also with `serve`. It starts in under a second, so that what a process
shows on its streams can be tested often.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from prefixwise.backends.fake import FakeBackend
from prefixwise.cli.main import main
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.scheduler import Scheduler
from prefixwise.launch import loading
from prefixwise.launch.loading import OnProgram
from prefixwise.launch.options import EngineOptions
from prefixwise.models.hf_folder import read_tokenizer_folder
from prefixwise.prompts.profile import parse_profile
from prefixwise.prompts.profile_choice import ProfileChoice, builtin_profiles, find_profile
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.checkpoints import add_tokenizer

MAX_CONTEXT_LEN = 64

# What the built-in profiles read is not in so small a vocabulary.
FAKE_PROFILE = parse_profile(
    {
        "name": "fake-yes-no",
        "relevance": "softmax",
        "labels": ["y", "n"],
        "instruction": "Is it relevant?",
        "prompt": {"body": ["{instruction} {query}\n", "{document}"], "after": [" Answer:"]},
    },
    "the fake program's own",
)
NO_PROFILE = "no reranker profile is known for fake-model, so fake-yes-no was used"


def fake_engine(options: EngineOptions | None = None, on_program: OnProgram | None = None) -> ScoringEngine:
    options = options or EngineOptions()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = TextTokenizer(read_tokenizer_folder(add_tokenizer(Path(folder))))
    logging.getLogger("prefixwise").info("fake model loaded")
    scheduler = Scheduler(FakeBackend(max_context_len=MAX_CONTEXT_LEN), options.scheduler_options())
    return ScoringEngine(options.engine_config("fake-model", choose_profile(options)), scheduler, tokenizer)


def choose_profile(options: EngineOptions) -> ProfileChoice:
    """As for a real model that nothing is known of."""
    if options.profile is None:
        return ProfileChoice(FAKE_PROFILE, "none is known for the model", builtin_profiles(), NO_PROFILE)
    asked = find_profile(options.profile)
    return ProfileChoice(asked, "it was asked for", {**builtin_profiles(), asked.name: asked})


if __name__ == "__main__":
    setattr(loading, "load_engine", fake_engine)  # noqa: B010
    main()
