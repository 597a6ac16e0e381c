"""Pallas' interpreters of Mosaic kernels: they run the threads of a kernel, their copies and barriers, on a CPU."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.backends.jax.quick_compiler import QUICKLY


def interpreter_parameters() -> Any:
    """What an implementation takes as `interpret`. What is read beyond the end of an array is NaN; threads that touch
    the same memory with no barrier between them are noticed (`has_races`)."""
    try:
        parameters = import_module("jax.experimental.pallas.mosaic_gpu").InterpretGPUParams
    except AttributeError:  # jax 0.10 has it, and does not show it
        parameters = import_module("jax._src.pallas.mosaic_gpu.interpret.params").InterpretGPUParams
    return parameters(out_of_bounds_reads="uninitialized", detect_races=True)


def has_races() -> bool:
    """Had the kernel that was interpreted last?"""
    callbacks = import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    return bool(callbacks.get_races().races_found)


def tpu_interpreter_parameters() -> Any:
    """The same for kernels of TPUs; a copy is made as late as it may be, when it is waited for."""
    return pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="on_wait", out_of_bounds_reads="raise", uninitialized_memory="nan"
    )


def tpu_has_races() -> bool:
    """Had the kernel that was interpreted last?"""
    return bool(import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call").races.races_found)


def interpret_quickly(patch: pytest.MonkeyPatch) -> None:
    """Nearly all of the interpreter's time is not the kernel's. At every call it compiles each thread of each block of
    threads, since it wraps one function anew for each: here they share what was compiled for one of them. And every
    step of a thread calls Python, with arguments that jax brings to a device before: here they stay what they are."""
    wrapped: dict[Any, Any] = {}

    def jit(function: Any, **options: Any) -> Any:
        return wrapped.setdefault(function.__code__, jax.jit(function, compiler_options=QUICKLY, **options))

    def call(*arguments: Any, callback: Any, **_: Any) -> Any:
        with jax.default_device(jax.devices("cpu")[0]):
            return [np.asarray(each) for each in callback(*map(np.array, arguments))]

    used = {name: getattr(jax, name) for name in dir(jax) if not name.startswith("_")}
    patch.setattr("jax._src.pallas.mosaic.interpret.thread_map.jax", SimpleNamespace(**{**used, "jit": jit}))
    patch.setattr("jax._src.callback.io_callback_impl", call)
