"""A backend knows the errors of its library that mean: there is no memory for this."""

from __future__ import annotations

import pytest

from prefixwise.forward.backend import Backend

ENORMOUS = 1 << 55


def test_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from prefixwise.backends.torch.backend import TorchBackend

    with pytest.raises(RuntimeError) as caught:
        torch.empty(ENORMOUS)
    check(TorchBackend.__new__(TorchBackend), caught.value)
    check(TorchBackend.__new__(TorchBackend), torch.OutOfMemoryError("CUDA out of memory"))


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    from prefixwise.backends.jax.backend import JaxBackend

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.numpy.zeros(ENORMOUS, "uint8").block_until_ready()
    check(JaxBackend.__new__(JaxBackend), caught.value)


def check(backend: Backend, error: BaseException) -> None:
    assert backend.is_out_of_memory(error), error
    assert backend.is_out_of_memory(MemoryError())
    assert not backend.is_out_of_memory(RuntimeError("an illegal memory access was encountered"))
