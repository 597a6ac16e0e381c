"""The LoRA adapters of an engine: which are loaded, under which name, and in which slot of the backend.

An adapter is loaded once and never changes: loading another folder under its name makes a new one. Requests hold the
adapter that they were prepared with. `unload` only takes the name away, so they finish, and the slot is free again when
the last of them is gone.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from prefixwise.contract.errors import (
    InvalidValueError,
    ModelLoadError,
    ModelNotFoundError,
    NotFoundError,
    describe,
    quote,
)
from prefixwise.forward.backend import Backend
from prefixwise.models.lora import read_lora

log = logging.getLogger("prefixwise")

SLOT_SECONDS = 10.0  # that a load waits for the requests of an unloaded adapter, if it needs their slot
_ID_BITS = 62


@dataclass(frozen=True, eq=False)
class LoadedLora:
    """One load of an adapter. It lives as long as its name or a request holds it."""

    name: str
    id: int  # no other load has it, in this process or another: it is part of the keys of KV blocks
    path: str
    slot: int = 0  # of the backend; 0: the backend is in another process


class LoraTable(ABC):
    """The loaded adapters by name. Any thread may ask."""

    @abstractmethod
    def listed(self) -> tuple[LoadedLora, ...]:
        """Those that requests may name, in the order in which they were loaded."""

    @abstractmethod
    def load(self, name: str, path: str, *, in_place: bool = False) -> LoadedLora:
        """Load a folder under a name; `in_place`: the name may have an adapter, which this one replaces.

        Waits for the device. Raises InvalidValueError, and nothing has changed, if that is not possible.
        """

    @abstractmethod
    def unload(self, name: str) -> None:
        """Requests can name it no more; those that run finish. Raises NotFoundError."""

    def find(self, name: str | None) -> LoadedLora | None:
        """None: no adapter has this name."""
        return next((lora for lora in self.listed() if lora.name == name), None) if name is not None else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(lora.name for lora in self.listed())


class Loras(LoraTable):
    """The adapters of a backend in this process. `call` runs a function on the device thread, between steps."""

    def __init__(self, backend: Backend, call: Callable[[Callable[[], None]], None]) -> None:
        self._backend, self._call = backend, call
        self._by_name: dict[str, LoadedLora] = {}
        self._by_id: weakref.WeakValueDictionary[int, LoadedLora] = weakref.WeakValueDictionary()
        self._free: SimpleQueue[int] = SimpleQueue()  # slots; `put` may be called from a finalizer
        for slot in range(1, backend.info.max_loras + 1):
            self._free.put(slot)
        self._lock = threading.Lock()  # one load at a time

    def listed(self) -> tuple[LoadedLora, ...]:
        return tuple(self._by_name.values())

    def held(self, lora_id: int) -> LoadedLora:
        """The adapter of a request. Raises ModelNotFoundError if it is gone."""
        lora = self._by_id.get(lora_id)
        if lora is None:
            message = "the LoRA adapter of this request was unloaded before the request was queued"
            raise ModelNotFoundError(message, code="model_not_found", param="model")
        return lora

    def load(self, name: str, path: str, *, in_place: bool = False) -> LoadedLora:
        info = self._backend.info
        with self._lock:
            if name in self._by_name and not in_place:
                message = f"the LoRA adapter {quote(name)} is loaded already; load_inplace replaces it"
                raise InvalidValueError(message, code="lora_already_loaded", param="lora_name")
            if not info.max_loras:
                message = "there is no room for LoRA adapters: max_loras (--max-loras) must be 1 or more, got 0"
                raise InvalidValueError(message, code="too_many_loras", param="lora_name")
            try:
                adapter = read_lora(path, self._backend.config, info.max_lora_rank)
            except ModelLoadError as error:
                raise InvalidValueError(str(error), code="invalid_lora", param="lora_path") from None
            slot = self._take_slot()
            try:
                self._call(lambda: self._backend.load_lora(slot, adapter))
            except BaseException:
                self._free.put(slot)
                raise
            lora = LoadedLora(name, secrets.randbits(_ID_BITS) or 1, path, slot)
            weakref.finalize(lora, self._free.put, slot).atexit = False
            self._by_id[lora.id] = lora
            self._by_name = {**self._by_name, name: lora}
        log.info("loaded the LoRA adapter %s from %s, rank %d", quote(name), path, adapter.rank)
        return lora

    def _take_slot(self) -> int:
        """Waits where all adapters of a slot's number are loaded or still in use."""
        max_loras = self._backend.info.max_loras
        try:
            return self._free.get(timeout=SLOT_SECONDS if len(self._by_name) < max_loras else 0)
        except Empty:
            pass
        in_use = max_loras - len(self._by_name)
        waits = f", {in_use} unloaded ones are used by requests that still run" if in_use else ""
        message = (
            f"at most {max_loras} LoRA adapters can be loaded (max_loras, --max-loras), and one that is replaced "
            f"counts until the new one is there; got one more{waits}"
        )
        raise InvalidValueError(message, code="too_many_loras", param="lora_name")

    def unload(self, name: str) -> None:
        with self._lock:
            if name not in self._by_name:
                raise lora_not_found(name)
            self._by_name = {each: lora for each, lora in self._by_name.items() if each != name}
        log.info("unloaded the LoRA adapter %s", quote(name))


def lora_not_found(name: str) -> NotFoundError:
    """The error of an adapter that should be unloaded and is not loaded."""
    message = f"no LoRA adapter is loaded under the name {quote(name)}"
    return NotFoundError(message, code="not_found", param="lora_name")


def check_lora_name(name: Any, taken: tuple[str, ...]) -> None:
    """Raises InvalidValueError for a name that an adapter cannot have. `taken`: the names of the model itself."""
    if not isinstance(name, str) or not name.strip() or name in (*taken, "default"):
        names = ", ".join(map(quote, (*taken, "default")))
        expected = f"a text that is not one of the model's own ({names})"
        message = f"the name of a LoRA adapter must be {expected}, got {describe(name)}"
        raise InvalidValueError(message, code="invalid_lora_name", param="lora_name")
