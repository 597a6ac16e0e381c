"""Programs that end while an engine is still there."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

PRELUDE = """
import threading
from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler

engine = ScoringEngine(EngineConfig("fake"), Scheduler(FakeBackend(seconds_per_forward=0.01)), None)
request = parse_score_request({"query": [1, 2, 3], "items": [[5, 6]], "label_token_ids": [7]})
"""


def run(program: str) -> tuple[str, str]:
    """What it wrote. It ends by itself, and well."""
    command = [sys.executable, "-c", PRELUDE + dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_fork_is_told_that_it_has_no_engine() -> None:
    """Also while another thread holds the locks, which a fork copies as they are."""
    program = """
    import os
    with engine.scheduler._submit_lock:
        child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        print(engine.score(request).usage.prompt_tokens)
    else:
        try:
            engine.score(request)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    engine.close()
    """
    (told, scored), _ = (text.splitlines() for text in run(program))
    assert told.startswith("BackendError a scorer works in the process that made it, ")
    assert scored == "5"


def test_a_thread_may_still_score_when_the_main_one_is_over() -> None:
    program = """
    def score():
        threading.main_thread().join()
        for _ in range(5):
            engine.score(request)
            print("scored", flush=True)
        engine.close()

    threading.Thread(target=score).start()
    """
    assert run(program) == ("scored\n" * 5, "")


def test_one_that_forgets_to_close_ends_in_silence() -> None:
    assert run("print(len(engine.score(request).scores))") == ("1\n", "")


def test_so_does_one_that_forgets_its_scorer() -> None:
    """Which closes its engine when the interpreter ends."""
    program = """
    from unittest.mock import patch
    from prefixwise import Scorer

    with patch("prefixwise.scorer.load_engine", return_value=engine):
        scorer = Scorer()
    print(len(scorer.score([1, 2], [[3]], label_token_ids=[5]).scores))
    """
    assert run(program) == ("1\n", "")


def test_or_ends_in_the_middle_of_a_request() -> None:
    program = """
    many = parse_score_request({"query": [1], "items": [[5, 6]] * 50_000, "label_token_ids": [7]})
    request = engine.submit(engine.prepare(many))
    while request.started is None:
        pass
    """
    assert run(program) == ("", "")
