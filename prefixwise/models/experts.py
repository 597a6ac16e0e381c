"""Mixtures of experts in checkpoints: the matrices of a layer's experts as one stored tensor, one above the other.

    router [E, D]    gate [E F, D]    up [E F, D]    down [E D, F]

Files of every kind come to this form before their tensors are checked, so backends read experts like any other rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import NUMBER_DTYPES, StoredTensor, as_float32
from prefixwise.models.config import ExpertsConfig, ModelConfig
from prefixwise.models.families import ExpertNames, Family
from prefixwise.models.hf_attention import integer

# As transformers 5 holds and may save them: all experts of a layer in one tensor.
_FUSED_BLOCK, _FUSED_GATE_UP, _FUSED_DOWN = "mlp", "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class StackedRows(StoredTensor):
    """Stored matrices of one shape, one above the other."""

    parts: tuple[StoredTensor, ...]

    @classmethod
    def of(cls, parts: Sequence[StoredTensor]) -> StackedRows:
        rows, *rest = parts[0].shape
        dtypes = {part.dtype for part in parts}
        return cls((len(parts) * rows, *rest), dtypes.pop() if len(dtypes) == 1 else "float32", tuple(parts))

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        height = self.parts[0].shape[0]
        read = [
            self._read(self.parts[number], max(0, start - number * height), min(height, stop - number * height))
            for number in range(start // height, -(-stop // height))
        ]
        if start >= stop:
            return self._read(self.parts[0], 0, 0)
        return read[0] if len(read) == 1 else np.concatenate(read)

    def _read(self, part: StoredTensor, start: int, stop: int) -> NDArray[Any]:
        rows = part.read_rows(start, stop)
        return rows if part.dtype == self.dtype else as_float32(rows, part.dtype)


@dataclass(frozen=True)
class PlaneRows(StoredTensor):
    """Rows of one matrix of a stored tensor [E, rows, columns]."""

    stored: StoredTensor
    number: int  # of the matrix
    first: int  # row

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        return self.stored.read_rows(self.number, self.number + 1)[0, self.first + start : self.first + stop]


def read_hf_experts(raw: Mapping[str, Any], family: Family) -> ExpertsConfig | None:
    """What config.json says of the experts; None for a dense family. Raises ModelLoadError for what is not served."""
    if family.expert_names is None:
        return None
    if raw.get("use_sliding_window"):
        raise ModelLoadError(f"unsupported: use_sliding_window of a {family.title} model; expected none or false")
    if integer(raw.get("decoder_sparse_step"), 1) != 1 or raw.get("mlp_only_layers"):
        raise ModelLoadError(
            "unsupported: layers without experts beside layers with them; expected decoder_sparse_step 1 and no "
            f"mlp_only_layers, got {describe(raw.get('decoder_sparse_step'))} and "
            f"{describe(raw.get('mlp_only_layers'))}"
        )
    count = raw.get("num_experts", raw.get("num_local_experts"))  # transformers 5 saves the second for all families
    if count is None:
        raise KeyError("num_experts" if family.expert_names.has_own_size else "num_local_experts")
    is_normed = bool(raw.get("norm_topk_prob", False)) if family.expert_names.has_norm_switch else True
    return ExpertsConfig(integer(count), integer(raw["num_experts_per_tok"]), is_normed)


def stack_hf_experts(
    stored: Mapping[str, StoredTensor], config: ModelConfig, names: ExpertNames
) -> dict[str, StoredTensor]:
    """The tensors with those of experts stacked under the names of `families.hf_tensor_names`."""
    found = _split_fused(stored, config, names)
    part_names = "|".join(re.escape(part) for part in names.parts)
    pattern = re.compile(rf"(.+\.{re.escape(names.block)}\.experts)\.(\d+)\.({part_names})\.weight")
    groups: dict[tuple[str, str], dict[int, StoredTensor]] = {}
    for name in list(found):
        if match := pattern.fullmatch(name):
            groups.setdefault((match[1], match[3]), {})[int(match[2])] = found.pop(name)
    for (block, part), experts in groups.items():
        found[f"{block}.{part}.weight"] = _stacked(experts, f"{block}.{{}}.{part}.weight", config)
    return found


def _stacked(experts: Mapping[int, StoredTensor], name: str, config: ModelConfig) -> StoredTensor:
    assert config.experts is not None
    expected = config.experts.num_experts
    for number in range(expected):
        if number not in experts:
            raise ModelLoadError(f"the checkpoint lacks the tensor {name.format(number)!r}")
        if experts[number].shape != experts[0].shape:
            raise ModelLoadError(
                f"the tensor {name.format(number)!r} has shape {list(experts[number].shape)}, "
                f"but that of expert 0 has {list(experts[0].shape)}"
            )
    if len(experts) > expected:
        raise ModelLoadError(
            f"the config asks for {expected} experts, but the checkpoint has {name.format(max(experts))!r}"
        )
    return StackedRows.of([experts[number] for number in range(expected)])


def _split_fused(
    stored: Mapping[str, StoredTensor], config: ModelConfig, names: ExpertNames
) -> dict[str, StoredTensor]:
    """Tensors of all experts of a layer, [E, 2 F, D] and [E, D, F], as one tensor for each expert and matrix."""
    f, d = config.mlp_size, config.model_size
    gate, up, down = names.parts
    fused = {_FUSED_GATE_UP: ((2 * f, d), {gate: 0, up: f}, f), _FUSED_DOWN: ((d, f), {down: 0}, d)}
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        kind = next((kind for kind in fused if name.endswith(f".{_FUSED_BLOCK}.{kind}")), None)
        if kind is None:
            found[name.replace(f".{_FUSED_BLOCK}.gate.", f".{names.block}.gate.")] = tensor
            continue
        assert config.experts is not None
        if tensor.dtype not in NUMBER_DTYPES:
            raise ModelLoadError(
                f"unsupported: quantised experts in one tensor, {name!r} of {tensor.dtype}; expected tensors of each "
                "expert"
            )
        (rows, columns), starts, height = fused[kind]
        expected = (config.experts.num_experts, rows, columns)
        if tensor.shape != expected:
            raise ModelLoadError(
                f"the tensor {name!r} has shape {list(tensor.shape)}, but the config asks for {list(expected)}"
            )
        block = name.removesuffix(f"{_FUSED_BLOCK}.{kind}") + f"{names.block}.experts"
        found |= {
            f"{block}.{number}.{part}.weight": PlaneRows((height, columns), tensor.dtype, tensor, number, first)
            for number in range(expected[0])
            for part, first in starts.items()
        }
    return found
