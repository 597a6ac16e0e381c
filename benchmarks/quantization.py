"""The embedded model's real weights, quantised in several formats, each through `prefixwise validate quantization`.

    python -m benchmarks.quantization --output-dir /tmp/quantised            all formats
    python -m benchmarks.quantization --output-dir /tmp/quantised --formats float32,fp8

The weights are rounded to the nearest code, without calibration. `float32` is the dequantised model itself, which must
give the same scores. Requests are passages of this repository's documentation, ranked for questions about it. The last
line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from prefixwise.models.checkpoint import Checkpoint, as_float32
from prefixwise.models.families import HF_TENSOR_NAMES, stored_name
from prefixwise.models.sources import open_checkpoint

DOCS = Path(__file__).parents[1] / "docs"
QUESTIONS = (
    "How is the KV cache of prefixes evicted?",
    "Which score modes are there?",
    "How do I start a server with several HTTP workers?",
    "What happens to requests when the server is overloaded?",
    "How are models sharded over several TPUs?",
    "Which quantised files can be loaded?",
    "How do I rerank documents?",
    "How is the API key set?",
)
NUM_ITEMS = 24
Parts = dict[str, Tensor]


def fp8_blocks(weight: Tensor) -> Parts:
    """A scale for each block of 128 x 128."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    largest = padded.reshape(len(padded) // 128, 128, -1, 128).abs().amax((1, 3))
    scales = largest.clamp(min=1e-12) / 448
    of_each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {"weight": (weight / of_each).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def fp8_channels(weight: Tensor) -> Parts:
    """A scale for each row."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def int8_channels(weight: Tensor) -> Parts:
    """A scale for each row."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def int4_groups(weight: Tensor, size: int = 32) -> Parts:
    """A scale for each 32 columns of a row, symmetric, eight codes in a word."""
    groups = weight.reshape(len(weight), -1, size)
    scales = groups.abs().amax(2).clamp(min=1e-12) / 7.5
    codes = ((groups / scales[:, :, None]).round().clamp(-8, 7) + 8).long().reshape(len(weight), -1, 8)
    words = (codes << torch.arange(0, 32, 4)).sum(2).to(torch.int32)
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FORMATS: dict[str, tuple[dict[str, Any] | None, Callable[[Tensor], Parts]]] = {
    "float32": (None, lambda weight: {"weight": weight}),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
    "fp8-channels": (_compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channels),
    "int8": (_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channels),
    "int4": (
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        int4_groups,
    ),
}


def write_folder(checkpoint: Checkpoint, name: str, folder: Path) -> None:
    """The model with the linear layers of its decoder in this format, the rest in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    config, (quantization, quantise) = checkpoint.config, FORMATS[name]
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_context_len,
        "tie_word_embeddings": config.tied_head,
        **({} if quantization is None else {"quantization_config": quantization}),
    }
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoint.read_tokenizer_files().tokenizer.save(str(folder / "tokenizer.json"))
    tensors: Parts = {}
    for key, tensor in checkpoint.tensors.items():
        layer, _, part = stored_name(key, HF_TENSOR_NAMES, "model.layers").rpartition(".")
        values = torch.from_numpy(as_float32(tensor.read_rows(0, tensor.shape[0]), tensor.dtype).copy())
        parts = quantise(values) if layer.endswith("_proj") else {part: values}
        tensors |= {f"{layer}.{each}": value.contiguous() for each, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")


def write_requests(path: Path) -> None:
    """Passages for each question."""
    text = "\n\n".join(
        (DOCS / f"{name}.md").read_text(encoding="utf-8")
        for name in ("operations", "architecture", "scaling", "reranking", "security", "features")
    )
    passages = [" ".join(each.split()) for each in text.split("\n\n") if 100 < len(each) < 320]
    with path.open("w", encoding="utf-8") as file:
        for number, question in enumerate(QUESTIONS):
            items = [passages[(number * 7 + place) % len(passages)] for place in range(NUM_ITEMS)]
            body = {
                "query": f"Question: {question}\nDoes the passage answer the question?\nPassage: ",
                "items": items,
                "suffix": "\nAnswer (Yes or No):",
                "labels": [" Yes", " No"],
                "score_mode": "softmax",
            }
            file.write(json.dumps(body) + "\n")


def judge(name: str, folder: Path, more: list[str]) -> dict[str, Any]:
    """What the gate says of one format; the reference is the embedded file."""
    outputs = ["--output-json", str(folder / f"{name}.json"), "--output-markdown", str(folder / f"{name}.md")]
    command = [sys.executable, "-m", "prefixwise", "validate", "quantization", str(folder / name)]
    command += ["--reference", "embedded", "--server-flag=--dtype=float32 --backend=torch --device=cpu"]
    done = subprocess.run([*command, *outputs, *more], stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"format": name, "status": done.returncode, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", action="store_true", help="the canonical workload instead of passages")
    given = parser.parse_args()
    checkpoint, rows = open_checkpoint(None), []
    given.output_dir.mkdir(parents=True, exist_ok=True)
    write_requests(given.output_dir / "requests.jsonl")
    more = [] if given.tokens else ["--requests", str(given.output_dir / "requests.jsonl")]
    for name in given.formats.split(","):
        write_folder(checkpoint, name, given.output_dir / name)
        rows.append(judge(name, given.output_dir, more))
    print(json.dumps({"command": f"python -m benchmarks.quantization {' '.join(sys.argv[1:])}", "rows": rows}))


if __name__ == "__main__":
    main()
