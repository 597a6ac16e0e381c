"""`prefixwise validate combine`: two evaluations of one model against each other, and against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.bench_common import last_line
from prefixwise.cli.failures import CommandError
from prefixwise.cli.output import say
from prefixwise.contract.errors import ModelLoadError, count

if TYPE_CHECKING:
    from prefixwise.bench.kinds.evaluation import EndpointEvaluation
    from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial
    from prefixwise.bench.kinds.parity import Parity

INSTALL_HINT = "pip install transformers torch; for GGUF files accelerate and gguf, too"


def validate_combine(
    multi_json: Annotated[Path, typer.Option(metavar="FILE", help="What `validate endpoint --mode multi` wrote.")],
    serial_json: Annotated[Path, typer.Option(metavar="FILE", help="What `validate endpoint --mode serial` wrote.")],
    output_multi_vs_serial_json: Annotated[Path, typer.Option(metavar="FILE", help="Where the first half goes.")],
    output_jax_torch_parity_json: Annotated[Path, typer.Option(metavar="FILE", help="Where the second half goes.")],
    model_path: Annotated[
        str | None,
        typer.Option(
            "--model-path",
            "--torch-model",
            metavar="MODEL",
            help="The checkpoint of the reference, where the model's name does not lead to it.",
        ),
    ] = None,
) -> None:
    """Compare a multi-item server with a serial one, and both with Hugging Face transformers on the same checkpoint."""
    from prefixwise.bench.files import read_artifact, write_artifact
    from prefixwise.bench.kinds.evaluation import EndpointEvaluation
    from prefixwise.bench.run.validation import combine

    multi = read_artifact(multi_json, EndpointEvaluation)
    serial = read_artifact(serial_json, EndpointEvaluation)
    combined = combine(multi, serial)
    # Before the reference is looked for: without one, this half is good all the same.
    write_artifact(output_multi_vs_serial_json, combined)
    parity = _parity(multi, serial, model_path or multi.model, is_named=model_path is not None)
    write_artifact(output_jax_torch_parity_json, parity)
    _report_findings(combined, parity)
    last_line(
        {
            "multi_vs_serial_json": str(output_multi_vs_serial_json),
            "parity_json": str(output_jax_torch_parity_json),
            "equivalence_max_abs_diff": combined.equivalence.max_abs_diff,
            "equivalence_query_plus_delimiter_max_abs_diff": combined.aligned_max_abs_diff,
            "max_abs_diff_jax_serial_vs_torch_serial": parity.max_abs_diff_jax_serial_vs_torch_serial,
            "speedup_vs_serial_p50": {
                count: each.speedup_vs_serial_p50 for count, each in combined.performance.items()
            },
        }
    )


def _parity(multi: EndpointEvaluation, serial: EndpointEvaluation, model: str, *, is_named: bool) -> Parity:
    from prefixwise.bench.run.parity import ReferenceMissingError, TransformersReference, compare_with_reference

    try:
        reference = TransformersReference.load(model)
    except ReferenceMissingError as error:
        raise CommandError(str(error), hint=INSTALL_HINT) from None
    except ModelLoadError as error:
        hint = None if is_named else "--model-path names the checkpoint that the servers have"
        raise CommandError(str(error), hint=hint) from None
    say(f"reference: {reference.path} in float32")
    return compare_with_reference(multi, serial, reference)


def _report_findings(combined: MultiVsSerial, parity: Parity) -> None:
    say(f"multi vs serial, query + item: max {combined.equivalence.max_abs_diff:.3g}")
    say(f"multi vs serial, query + delimiter + item: max {combined.aligned_max_abs_diff:.3g}")
    say(f"serial vs transformers: max {parity.max_abs_diff_jax_serial_vs_torch_serial:.3g}")
    say(f"multi vs transformers: max {parity.max_abs_diff_jax_multi_vs_torch_multi_semantic:.3g}")
    for num_items, each in combined.performance.items():
        say(f"{count(int(num_items), 'item')}: {each.speedup_vs_serial_p50:.2f}x as fast as one by one")
