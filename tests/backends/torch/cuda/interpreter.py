"""Triton's interpreter with NumPy 2.4, which makes no number of an array of one element any more; Triton 3.6 asks it
to, for the bounds of loops."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


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
