"""A real server process on the fake backend: `python -m tests.server.fake_server --port 0 --delay 0.05`.

Its scores can be computed by hand (`fake_scores`), and a forward takes as long as it is told to, in seconds
or until a file is there.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import ModelLoadError, PrefixwiseError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.forward.batch import ForwardBatch, RunningForward
from prefixwise.server.config import ServerOptions
from prefixwise.server.launch import run_server
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.letters_profile import letters_choice

MODEL = "fake-model"


def wait_for(path: Path | None) -> None:
    """Until the file is there: how a test says when."""
    while path is not None and not path.exists():
        time.sleep(0.005)


class HeldBackend(FakeBackend):
    """No forward ends before the file is there."""

    def __init__(self, until: Path | None, **options: Any) -> None:
        super().__init__(**options)
        self._until = until

    def start(self, batch: ForwardBatch) -> RunningForward:
        running = super().start(batch)

        def wait() -> Any:
            wait_for(self._until)
            return running.wait()

        return replace(running, wait=wait)


def open_engine(args: argparse.Namespace) -> ScoringEngine:
    time.sleep(args.load_seconds)
    wait_for(args.load_until)
    if args.fail:
        raise ModelLoadError(args.fail)
    backend = HeldBackend(
        args.hold_until,
        max_context_len=1 << 20,
        num_kv_blocks=1 << 14,
        step_tokens=args.step_tokens,
        seconds_per_forward=args.delay,
    )
    backend.config = replace(backend.config, num_classes=args.num_classes)
    scheduler = Scheduler(backend, SchedulerOptions(max_queued_tokens=args.max_queued_tokens))
    tokenizer = merging_tokenizer() if args.tokenizer else None
    return ScoringEngine(EngineConfig(MODEL, profiles=letters_choice()), scheduler, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that a forward takes")
    parser.add_argument("--hold-until", type=Path, help="a file: no forward ends before it is there")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--load-until", type=Path, help="a file: the model is not loaded before it is there")
    parser.add_argument("--fail", default="", help="what goes wrong when the model is loaded")
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--max-queued-tokens", type=int, default=None)
    parser.add_argument("--shutdown-grace", type=float, default=30.0)
    parser.add_argument("--max-request-bytes", type=int, default=1 << 26)
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--options", type=json.loads, default={}, help="more fields of ServerOptions, as JSON")
    parser.add_argument("--files", type=int, help="the limit of open files")
    parser.add_argument("--nohup", action="store_true", help="as under nohup")
    parser.add_argument("--tokenizer", action="store_true", help="take text, too")
    parser.add_argument("--num-classes", type=int, default=0, help="of a classifier; 0: the model is none")
    parser.add_argument("--log-json", action="store_true")
    args = parser.parse_args()
    options = ServerOptions(
        port=args.port,
        shutdown_grace=args.shutdown_grace,
        max_request_bytes=args.max_request_bytes,
        api_key=args.api_key,
        log_json=args.log_json,
        **args.options,
    )
    if args.files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.files, args.files))
    if args.nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run_server(options, lambda: open_engine(args), lambda engine: {"model": engine.config.model_name})
    except PrefixwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
