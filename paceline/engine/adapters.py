"""The LoRA adapters that are loaded, by name, and those that were replaced and are still in use.

A request keeps the adapter that its name meant when it was submitted. Inside the engine an adapter is called by its
name and a digest of its contents, `name@digest`: this is its namespace of the prefix cache, so KV of an adapter that
was replaced is never found for the new one, and all replicas call it the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.engine.executor import Executor
from paceline.engine.output import Conflict, LoadedAdapter, UnknownAdapter
from paceline.request import adapter_name, short
from paceline.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from paceline.model.lora import LoraFile, LoraWeights


class Adapters:
    """The loaded adapters by name. Changed on the engine's thread only; any thread may read."""

    def __init__(self) -> None:
        self._by_name: Mapping[str, LoadedAdapter] = {}  # replaced as a whole
        self._retired: set[str] = set()  # replaced, and in use by requests that run
        self.loading = threading.Lock()  # one at a time

    @property
    def loaded(self) -> list[LoadedAdapter]:
        return list(self._by_name.values())

    def get(self, name: str) -> LoadedAdapter | None:
        return self._by_name.get(name)

    def resolve(self, name: str) -> str:
        """What requests with this name use; "" is the base model."""
        found = self._by_name.get(name)
        if found is None and name:
            names = ", ".join(self._by_name) or "none"
            raise UnknownAdapter(f"the adapter {short(name)} is not loaded: load it, or use one of these: {names}.")
        return "" if found is None else found.adapter

    def renewed(self, adapter: str) -> str:
        """What a new request with this adapter uses: it, or the present one of its name if it was replaced since the
        request was submitted and is not kept for others. Raises if that was unloaded."""
        return self.resolve(adapter_name(adapter)) if adapter and adapter not in self._retired else adapter

    def install(
        self, new: LoadedAdapter, file: LoraFile, weights: LoraWeights, executor: Executor, scheduler: Scheduler
    ) -> None:
        old = self._by_name.get(new.name)
        is_known = new.adapter in self._retired or (old is not None and old.adapter == new.adapter)
        if not is_known:
            executor.add_adapter(new.adapter, file, weights)
        self._retired.discard(new.adapter)
        if old is not None and old.adapter != new.adapter:
            self._retired.add(old.adapter)
        self._by_name = {**self._by_name, new.name: new}
        self.sweep(executor, scheduler)

    def remove(self, name: str, num_preparing: int, executor: Executor, scheduler: Scheduler) -> None:
        adapter = self.resolve(name)
        if count := scheduler.num_adapter_requests(adapter) + num_preparing:
            raise Conflict(
                f"the adapter {name!r} is in use by {count} request{'s' if count > 1 else ''}: unload it when they "
                "have finished, or abort them (DELETE /v1/requests)."
            )
        self._by_name = {key: one for key, one in self._by_name.items() if key != name}
        self._retired.add(adapter)
        self.sweep(executor, scheduler)

    def sweep(self, executor: Executor, scheduler: Scheduler) -> None:
        """Drops replaced adapters that no request uses any more."""
        for adapter in [one for one in self._retired if not scheduler.num_adapter_requests(one)]:
            self._retired.discard(adapter)
            scheduler.forget_adapter(adapter)
            executor.remove_adapter(adapter)

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)
