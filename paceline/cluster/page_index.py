"""Which replica has which KV page, by page hash: what KV events say, and what routing assumes until they say it.

One dictionary maps a hash to the set of replicas that hold the page, as the bits of an int. The longest prefix that
each replica holds is found by walking the hashes of a prompt once, for all replicas together: one lookup per page,
until no replica is left. A binary search would need fewer, but is right only while every replica holds all pages before
each of its pages, which is not so while events are late or lost, or for engines that evict in another order.

Assumed pages have a dictionary of their own. It is small, so a decision writes to memory that is in the cache of the
CPU, and what events said is never mixed with what was assumed.

Memory: a replica holds at most `num_pages` pages, all together at most `MAX_ASSUMED` are assumed, and pages of cleared
replicas are dropped when they are half of all; about 130 bytes a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

MAX_ASSUMED = 1 << 20  # pages, of which those that expire first are dropped
_MIN_COMPACTED = 4096  # entries; below that dropping what cleared replicas held is not worth a pass over all of them
_Assumption = tuple[float, int, int, Sequence[int]]  # when it expires, its number, the bit of the replica, the pages


class PageIndex:
    def __init__(self, num_replicas: int) -> None:
        self._holders: dict[int, int] = {}  # page hash -> the bits of the replicas that hold it
        self._assumed: dict[int, int] = {}  # the same for replicas that are assumed to hold it
        self._assumptions: list[_Assumption] = []  # a heap
        self._num_assumptions = 0  # so far
        self._num_assumed = 0  # pages of all assumptions in the heap
        self._counts = [0] * num_replicas
        # A cleared replica gets a new bit, so that clearing takes no time; entries keep its old one until `_compact`.
        self._bits = [1 << replica for replica in range(num_replicas)]
        self._replicas = {bit: replica for replica, bit in enumerate(self._bits)}
        self._live = sum(self._bits)  # the bits in use; others belong to cleared replicas
        self._next_bit = 1 << num_replicas

    def __len__(self) -> int:
        """Pages in memory."""
        return len(self._holders) + len(self._assumed)

    def prefix_pages(self, pages: Iterable[int]) -> list[int]:
        """How many of the first pages of a prompt each replica holds."""
        found = [0] * len(self._bits)
        left, replicas, number = self._live, self._replicas, 0
        get, get_assumed = self._holders.get, self._assumed.get
        for page in pages:
            kept = left & get(page, 0)
            if kept != left:
                kept |= left & get_assumed(page, 0)
                lost, left = left ^ kept, kept
                while lost and number:  # 0 is what they have
                    bit = lost & -lost
                    found[replicas[bit]] = number
                    lost ^= bit
                if not left:
                    return found
            number += 1
        while left:
            bit = left & -left
            found[replicas[bit]] = number
            left ^= bit
        return found

    # ------------------------------------------------------------------ events

    def stored(self, replica: int, pages: Iterable[int]) -> None:
        bit, holders, assumed, count = self._bits[replica], self._holders, self._assumed, self._counts[replica]
        others, together = 0, bit  # pages of one prompt share the int object: less memory to read in `prefix_pages`
        for page in pages:
            found = holders.get(page, 0)
            if not found & bit:
                if found != others:
                    others, together = found, found | bit
                holders[page] = together
                count += 1
                if page in assumed:
                    _remove(assumed, page, bit)
        self._counts[replica] = count

    def removed(self, replica: int, pages: Iterable[int]) -> None:
        bit, holders = self._bits[replica], self._holders
        for page in pages:
            self._counts[replica] -= _remove(holders, page, bit)

    def clear(self, replica: int) -> None:
        """Nothing is held, or assumed, of a replica."""
        old, new = self._bits[replica], self._next_bit
        self._bits[replica], self._next_bit = new, new << 1
        del self._replicas[old]
        self._replicas[new] = replica
        self._live ^= old | new
        self._counts[replica] = 0
        if len(self) > max(_MIN_COMPACTED, 2 * sum(self._counts)) or new.bit_length() > 4 * len(self._bits) + 64:
            self._compact()

    def check_capacity(self, replica: int, num_pages: int) -> None:
        """A replica that is said to hold more pages than it has lost the event of a removal: it is cleared."""
        if self._counts[replica] > num_pages:
            self.clear(replica)

    # ------------------------------------------------------------------ assumptions

    def assume(self, replica: int, pages: Sequence[int], expires: float) -> None:
        """The replica is about to compute these pages."""
        bit, assumed = self._bits[replica], self._assumed
        for page in pages:
            others = assumed.get(page, 0)
            assumed[page] = others | bit if others else bit
        self._num_assumptions += 1
        heappush(self._assumptions, (expires, self._num_assumptions, bit, pages))
        self._num_assumed += len(pages)
        while self._num_assumed > MAX_ASSUMED:
            self._drop_assumption()

    def expire(self, now: float) -> None:
        while self._assumptions and self._assumptions[0][0] <= now:
            self._drop_assumption()

    def _drop_assumption(self) -> None:
        _, _, bit, pages = heappop(self._assumptions)
        self._num_assumed -= len(pages)
        for page in pages:
            _remove(self._assumed, page, bit)

    def _compact(self) -> None:
        """Drops what cleared replicas held, and numbers the bits anew."""
        new = {bit: 1 << replica for bit, replica in self._replicas.items()}

        def moved(bits: int) -> int:
            left, found = bits & self._live, 0
            while left:
                bit = left & -left
                found |= new[bit]
                left ^= bit
            return found

        self._holders = {page: bits for page, old in self._holders.items() if (bits := moved(old))}
        self._assumed = {page: bits for page, old in self._assumed.items() if (bits := moved(old))}
        kept = [(at, number, new[bit], pages) for at, number, bit, pages in self._assumptions if bit in new]
        self._assumptions = sorted(kept)  # a sorted list is a heap
        self._num_assumed = sum(len(pages) for *_, pages in kept)
        self._bits = [1 << replica for replica in range(len(self._bits))]
        self._replicas = {bit: replica for replica, bit in enumerate(self._bits)}
        self._live, self._next_bit = sum(self._bits), 1 << len(self._bits)


def _remove(entries: dict[int, int], page: int, bit: int) -> int:
    """Removes a replica from a page. Returns whether it was there, as 0 or 1."""
    bits = entries.get(page, 0)
    if not bits & bit:
        return 0
    if bits == bit:
        del entries[page]
    else:
        entries[page] = bits ^ bit
    return 1
