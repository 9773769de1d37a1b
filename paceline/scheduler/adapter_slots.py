"""Adapter slots: which LoRA adapters the executor holds on its device, and which running requests use each.

A plan names the adapters that are copied into slots before its pass. An adapter stays in its slot after its last
request has left, until another one needs the slot: the least recently used one is replaced first. One that a running
request uses is never replaced. Passes run in the order of their plans, so a slot may be given away while passes that
use it are in flight.
"""

from __future__ import annotations

from collections import Counter

from paceline.scheduler.plan import AdapterLoad


class AdapterSlots:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: dict[str, int] = {}  # by adapter, the least recently used one first
        self.num_users: Counter[str] = Counter()  # running requests, by adapter
        self._free = list(range(num_slots - 1, -1, -1))
        self._loads: list[AdapterLoad] = []
        self.num_loads = 0  # so far

    @property
    def num_available(self) -> int:
        """Slots that no running request uses."""
        return self.num_slots - len(self.num_users)

    def is_loaded(self, adapter: str) -> bool:
        return adapter in self.slots

    def acquire(self, adapter: str) -> int:
        """The slot of an adapter for one more running request. The next plan loads it if it is not there."""
        slot = self.slots.pop(adapter, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._replace()
            self._loads.append(AdapterLoad(slot, adapter))
            self.num_loads += 1
        self.slots[adapter] = slot
        self.num_users[adapter] += 1
        return slot

    def _replace(self) -> int:
        unused = next((one for one in self.slots if one not in self.num_users), None)
        assert unused is not None, "an adapter was acquired while all slots are in use"
        return self.slots.pop(unused)

    def release(self, adapter: str) -> None:
        assert self.num_users[adapter] > 0, f"adapter {adapter} was released more often than acquired"
        self.num_users[adapter] -= 1
        self.slots[adapter] = self.slots.pop(adapter)  # used last
        if not self.num_users[adapter]:
            del self.num_users[adapter]

    def forget(self, adapter: str) -> None:
        """The adapter is unloaded, and no request uses it."""
        assert adapter not in self.num_users, f"adapter {adapter} is in use"
        slot = self.slots.pop(adapter, None)
        if slot is not None:
            self._free.append(slot)
        self._loads = [load for load in self._loads if load.adapter != adapter]

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """What to load before the next pass, in order."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def faults(self) -> list[str]:
        """Violated invariants, one sentence each; `invariants.py` compares the users with the running requests."""
        taken = sorted([*self.slots.values(), *self._free])
        found = [] if taken == list(range(self.num_slots)) else [f"adapter slots {taken} are not each there once"]
        found += [f"adapter {one} is in use and has no slot" for one in self.num_users if one not in self.slots]
        return found
