"""Parity: a server's scores against Hugging Face transformers on the same checkpoint, in float32, head included.

    torch serial            softmax over the labels after query + item
    torch multi semantic    the same after query + delimiter + item

transformers is no dependency of ours: it is imported here, when it is needed, and brings PyTorch with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from prefixwise.bench.files import now_utc
from prefixwise.bench.kinds.base import Scores
from prefixwise.bench.kinds.evaluation import EndpointEvaluation
from prefixwise.bench.kinds.parity import Parity
from prefixwise.bench.rules import item_differences
from prefixwise.bench.run.validation import check_pair, differences
from prefixwise.contract.errors import ModelLoadError, PrefixwiseError

EMBEDDED = "embedded"


class ReferenceMissingError(PrefixwiseError):
    """transformers or PyTorch is not installed."""


@dataclass(frozen=True)
class TransformersReference:
    """A model as transformers runs it, asked one sequence at a time: nothing can leak, nothing is padded."""

    path: str
    model: Any

    @classmethod
    def load(cls, model: str) -> TransformersReference:
        """A folder, a .gguf file, a hub id, or `embedded`. Raises ReferenceMissingError, ModelLoadError."""
        transformers = import_transformers()
        from safetensors import SafetensorError

        folder, gguf_file = _locate(model)
        more = {} if gguf_file is None else {"gguf_file": gguf_file}
        try:
            with redirect_stderr(StringIO()):  # progress bars, which are not ours
                loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **more)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise ModelLoadError(f"transformers cannot load {model!r}: {_first_line(error)}") from None
        return cls(str(folder / (gguf_file or "")), loaded.eval().requires_grad_(False))

    def probabilities(self, contexts: Sequence[Sequence[int]], labels: Sequence[int]) -> Scores:
        """Softmax over the labels' logits after each context. Raises ModelLoadError."""
        try:
            return [self._probabilities(context, labels) for context in contexts]
        except (RuntimeError, IndexError) as error:  # weights that it took and does not fit, ids that it lacks
            raise ModelLoadError(f"transformers cannot run {self.path!r}: {_first_line(error)}") from None

    def _probabilities(self, context: Sequence[int], labels: Sequence[int]) -> list[float]:
        from transformers import BatchEncoding

        inputs = BatchEncoding({"input_ids": [list(context)]}, tensor_type="pt")
        logits = self.model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1]
        row: list[float] = logits[list(labels)].double().softmax(-1).tolist()
        return row


def import_transformers() -> Any:
    """Raises ReferenceMissingError."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ReferenceMissingError(f"the reference needs transformers, and {error.name} is not installed") from None
    if not transformers.utils.is_torch_available():
        raise ReferenceMissingError("the reference needs PyTorch, which transformers does not find")
    return transformers


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _locate(model: str) -> tuple[Path, str | None]:
    """The folder, and the GGUF file in it where it is one. What the hub has is what our server reads of it."""
    from prefixwise.models.sources import download, embedded_model_path

    path = embedded_model_path() if model == EMBEDDED else Path(model).expanduser()
    if not path.exists():
        path = download(model)
    gguf_files = [] if path.is_file() or (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        path = gguf_files[0]
    return (path.parent, path.name) if path.is_file() else (path, None)


def compare_with_reference(
    multi: EndpointEvaluation, serial: EndpointEvaluation, reference: TransformersReference
) -> Parity:
    """Raises ArtifactError where the evaluations are not of one input."""
    aligned_query = check_pair(multi, serial).query_plus_delimiter_ids
    query, items, labels = multi.isolation.query_ids, multi.isolation.item_ids, multi.labels
    torch_serial = reference.probabilities([[*query, *item] for item in items], labels)
    torch_multi = reference.probabilities([[*aligned_query, *item] for item in items], labels)
    of_serial, of_multi = serial.isolation.base_scores, multi.isolation.base_scores
    return Parity(
        model=multi.model,
        max_abs_diff_jax_serial_vs_torch_serial=differences(of_serial, torch_serial).max_abs_diff,
        max_abs_diff_jax_multi_vs_torch_serial=differences(of_multi, torch_serial).max_abs_diff,
        max_abs_diff_jax_multi_vs_torch_multi_semantic=differences(of_multi, torch_multi).max_abs_diff,
        mean_abs_diff_jax_serial_vs_torch_serial=differences(of_serial, torch_serial).mean_abs_diff,
        mean_abs_diff_jax_multi_vs_torch_multi_semantic=differences(of_multi, torch_multi).mean_abs_diff,
        generated_at_utc=now_utc(),
        labels=labels,
        delimiter=multi.delimiter,
        query_ids=query,
        item_ids=items,
        jax_serial_scores=of_serial,
        jax_multi_scores=of_multi,
        torch_serial_reference_scores=torch_serial,
        torch_multi_semantic_reference_scores=torch_multi,
        abs_diff_jax_serial_vs_torch_serial=item_differences(of_serial, torch_serial),
        abs_diff_jax_multi_vs_torch_serial=item_differences(of_multi, torch_serial),
        abs_diff_jax_multi_vs_torch_multi_semantic=item_differences(of_multi, torch_multi),
        reference={
            "path": reference.path,
            "dtype": "float32",
            "transformers": version("transformers"),
            "torch": version("torch"),
        },
    )
