"""The PyTorch backend: CUDA and CPU. The only folder that imports torch."""

import os

from prefixwise.host import is_arm

if is_arm():
    # PyTorch allocates with mimalloc there, which reads this when PyTorch is imported. Memory that a layer has freed is
    # not given back to the system before the next one takes it again, and tensors are not rounded up to huge pages.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")  # ms
    os.environ.setdefault("MIMALLOC_ALLOW_THP", "0")
