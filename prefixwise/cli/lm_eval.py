"""`prefixwise lm-eval`: the program of lm-evaluation-harness with our model class."""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.host import install_command

log = logging.getLogger("prefixwise")

MODEL = "prefixwise"
PASSED_ON = {"ignore_unknown_options": True}  # settings of the verb: options that it does not know are arguments
_COMMANDS = ("run", "ls", "validate")


def lm_eval(
    args: Annotated[
        list[str],
        typer.Argument(
            metavar="ARGS", help="Of `lm-eval run`, which is the default, `lm-eval ls` or `lm-eval validate`."
        ),
    ],
) -> None:
    """Evaluate a model with lm-evaluation-harness, which must be installed: its program, its options, our engine.

    `--model_args` has pretrained (default: the embedded model), backend, device, dtype, max_length, add_bos_token and
    more. Tasks that generate text are refused. An example:

    \b
      prefixwise lm-eval --tasks arc_easy --num_fewshot 5 \\
        --model_args pretrained=Qwen/Qwen3-0.6B,dtype=bfloat16
    """
    if find_spec("lm_eval") is None:
        hint = f"install it with: {install_command('lm-eval')}"
        raise CommandError("lm_eval (lm-evaluation-harness) is not installed", hint=hint)
    arguments = lm_eval_arguments(args)
    from prefixwise.lm_eval import run_program

    try:
        run_program(arguments)
    except (ValueError, OSError) as error:
        # lm_eval has no errors of its own: unknown tasks, data that cannot be fetched.
        log.debug("lm_eval failed", exc_info=True)
        raise CommandError(f"lm_eval: {error}", hint="prefixwise --log-level debug lm-eval ... shows where") from None


def lm_eval_arguments(args: Sequence[str]) -> list[str]:
    """The arguments with `run` and our model. Raises CommandError if they name another model."""
    command, *rest = args if args[0] in _COMMANDS else ("run", *args)
    if command != "run":
        return [command, *rest]
    # lm_eval takes no shorter form of these names: they would be ambiguous.
    parser = ArgumentParser("prefixwise lm-eval", add_help=False, allow_abbrev=False)
    parser.add_argument("--model", "-M")
    parser.add_argument("--config", "-C")
    known, _ = parser.parse_known_args(rest)
    of_file = None if known.config is None else _model_of_file(Path(known.config))
    for model in (known.model, of_file):
        if model not in (None, MODEL):
            hint = "lm_eval's own program, `lm-eval run`, has all other models"
            raise CommandError(f"--model must be {MODEL} or left out, got {model}", hint=hint, status=MISUSED)
    return [command, *rest, "--model", MODEL]


def _model_of_file(path: Path) -> object:
    """The model of a YAML file of options, if lm_eval can read it."""
    import yaml

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CommandError(f"--config {path} cannot be read: {error}", status=MISUSED) from None
    return options.get("model") if isinstance(options, dict) else None
