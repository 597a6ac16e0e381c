"""A target of atheris, Google's coverage-guided fuzzer for Python: the parsers of files that we wrote ourselves.

    python -m tests.models.fuzz_parsers gguf|safetensors [options of libFuzzer, like -max_total_time=60]

A parser may refuse a file with ModelLoadError. Every other exception, a hang and a file that the safetensors library
refuses are findings. atheris has wheels for Linux: `pip install atheris`.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import atheris
from safetensors import SafetensorError, deserialize

from prefixwise.contract.errors import ModelLoadError

with atheris.instrument_imports(include=["prefixwise.models"]):
    from prefixwise.models.gguf_file import read_gguf_file
    from prefixwise.models.safetensors import open_safetensors

FOLDER = Path(tempfile.mkdtemp(prefix="prefixwise-fuzz-"))


# Where the fuzzer begins.
SEEDS = {
    "gguf": struct.pack("<QQ", 1, 2)
    + (struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQQ2s", 8, 1, 2, b"xy"))
    + (struct.pack("<Q17sII", 17, b"general.alignment", 4, 32))
    + (struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 0, 0)),
    "safetensors": b'{"__metadata__": {"a": "b"}, "t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}\n\n....',
}


def read_gguf(content: bytes) -> None:
    file = FOLDER / "model.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + content)  # so that no time goes into finding them
    try:
        read_gguf_file(file)
    except ModelLoadError as error:
        assert str(file) in str(error)


def read_safetensors(content: bytes) -> None:
    """Two line ends separate the header from the data."""
    file = FOLDER / "model.safetensors"
    header, _, data = content.partition(b"\n\n")
    whole = len(header).to_bytes(8, "little") + header + data
    file.write_bytes(whole)
    try:
        open_safetensors(file)
    except ModelLoadError as error:
        assert str(file) in str(error)
        return
    try:
        deserialize(whole)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AssertionError(f"the library refuses it: {error}") from None


if __name__ == "__main__":
    parser = sys.argv.pop(1)
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    (corpus / "seed").write_bytes(SEEDS[parser])
    atheris.Setup([*sys.argv, str(corpus)], {"gguf": read_gguf, "safetensors": read_safetensors}[parser])
    atheris.Fuzz()
