"""Random weights of Qwen3-0.6B's exact shape as a Hugging Face folder, for programs that want one on disk.

    python -m benchmarks.random_folder [--tiny] [--tokenizer FOLDER] /tmp/qwen3-0.6b-random

It has the tokenizer of another folder, or none: then requests are token ids. Needs transformers and PyTorch; 1.2 GB in
bfloat16. `--tiny` writes the model of tests of benchmarks.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from benchmarks.goals.cases import TINY
from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.models.config import ModelConfig


def write_folder(folder: Path, shape: ModelConfig = QWEN3_06B) -> None:
    """The same weights every time on the same kind of device."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.model_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope.theta,
        tie_word_embeddings=shape.tied_head,
        max_position_embeddings=shape.max_context_len,
        initializer_range=0.02 * (QWEN3_06B.model_size / shape.model_size) ** 0.5,  # logits as wide in a smaller model
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")  # drawing takes a minute on a CPU
    Qwen3ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json")
    options = parser.parse_args()
    write_folder(options.folder, TINY.model if options.tiny else QWEN3_06B)
    if options.tokenizer is not None:
        for path in options.tokenizer.glob("tokenizer*.json"):
            shutil.copy(path, options.folder)


if __name__ == "__main__":
    main()
