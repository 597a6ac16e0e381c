"""The program with a model of simple arithmetic in place of a real one.

Run it as `python -m tests.cli.fake_program`. It starts in under a second, so that what a process shows on its
streams can be tested often.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from itemwise.backends.fake import FakeBackend
from itemwise.cli import score
from itemwise.cli.main import main
from itemwise.engine.engine import ScoringEngine
from itemwise.engine.scheduler import Scheduler
from itemwise.engine.warmup import OnProgram
from itemwise.models.hf_folder import read_tokenizer_folder
from itemwise.options import EngineOptions
from itemwise.prompts.tokenizer import TextTokenizer
from tests.checkpoints import add_tokenizer

MAX_CONTEXT_LEN = 64


def fake_engine(options: EngineOptions | None = None, on_program: OnProgram | None = None) -> ScoringEngine:
    options = options or EngineOptions()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = TextTokenizer(read_tokenizer_folder(add_tokenizer(Path(folder))))
    logging.getLogger("itemwise").info("fake model loaded")
    scheduler = Scheduler(FakeBackend(max_context_len=MAX_CONTEXT_LEN), options.scheduler_options())
    return ScoringEngine(options.engine_config("fake-model"), scheduler, tokenizer)


if __name__ == "__main__":
    setattr(score, "open_engine", fake_engine)  # noqa: B010
    main()
