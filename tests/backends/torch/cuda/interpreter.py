"""Triton's interpreter with NumPy 2.4, which makes no number of an array of one element any more; Triton 3.6 asks it
to, for the bounds of loops. And a quarter faster: of what it does again at every call, some is done once. Its FP8 is
PyTorch's: its own rounds 63.9 to 32, and reads NaN as 480. What would be rounded to more than 448 becomes NaN, as no
kernel may rely on a conversion that saturates.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_ROUNDED_TO_448 = 464.0  # and less: half of the way to what would be the next code


def allow_loops() -> None:
    """Let loops have bounds that a kernel computes. Called twice, it does nothing more."""
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "allows_loops", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.allows_loops = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
    _patch_the_language_once()
    _remember_dtypes()
    _convert_fp8_as_pytorch()


def _convert_fp8_as_pytorch() -> None:
    convert, dtypes = interpreter._convert_float, {tl.float32: torch.float32, tl.float16: torch.float16}
    dtypes[tl.float8e4nv] = torch.float8_e4m3fn

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target) or source not in dtypes or target not in dtypes:
            return convert(values, source, target, rounding)
        stored = torch.from_numpy(np.ascontiguousarray(values)).view(dtypes[source])
        if target == tl.float8e4nv:
            stored = stored.masked_fill(stored.abs() > _ROUNDED_TO_448, float("nan"))
        return stored.to(dtypes[target]).view(torch.uint8).numpy().view(f"uint{target.primitive_bitwidth}")

    interpreter._convert_float = converted


def _patch_the_language_once() -> None:
    """For a launch, not for every function that its kernel calls."""
    patch = interpreter._patch_lang

    def patched(function: Any) -> Any:
        languages = [each for each in function.__globals__.values() if inspect.ismodule(each) and each in (tl, tl.core)]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patched


def _remember_dtypes() -> None:
    """NumPy's of Triton's."""
    get, known = interpreter._get_np_dtype, {}

    def remembered(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(element, tl.pointer_type):
            return get(element)
        if element not in known:
            known[element] = get(element)
        return known[element]

    interpreter._get_np_dtype = remembered
