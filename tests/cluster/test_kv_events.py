"""KV events by hash, and their messages: what a router computes from them is what the tree has."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.cluster.block_hash import block_hashes, root_hash
from paceline.cluster.kv_events import KvEventBatch, KvEventLog, num_pages, to_message
from paceline.codec import encode
from paceline.scheduler import Scheduler
from paceline.scheduler.kv_events import Medium
from tests.helpers import harness, prompt, request
from tests.scheduler.test_state_machine import random_run

A, B, C = range(1, 17), range(21, 37), range(41, 57)  # four pages each


class HashedEvents:
    """A router that reads messages, decoded without our structs, and checks them against hashes made from scratch."""

    def __init__(self, scheduler: Scheduler, every: int = 1) -> None:
        self.known: dict[str, set[int]] = defaultdict(set)  # medium -> hashes
        self._scheduler, self._every, self._num_checks = scheduler, every, 0
        self.log = KvEventLog(scheduler.config.page_size)
        scheduler.listen(self.log)

    def read(self) -> list[dict[str, Any]]:
        batch = KvEventBatch(1.0, [to_message(event) for event in self.log.take()], 0)
        ts, events, rank = msgspec.msgpack.decode(encode(batch))
        assert (ts, rank) == (1.0, 0)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.known.clear()
                continue
            hashes, known = set(event["block_hashes"]), self.known[event["medium"]]
            assert len(hashes) == len(event["block_hashes"])
            if event["type"] == "BlockRemoved":
                assert hashes <= known
                known -= hashes
            else:
                assert not hashes & known
                assert len(event["token_ids"]) == len(hashes) * event["block_size"]
                known |= hashes
        return events

    def check(self) -> None:
        self._num_checks += 1
        if self._num_checks % self._every == 0:  # else hashes are computed late, after splits and evictions
            self.read()
            assert {medium: hashes for medium, hashes in self.known.items() if hashes} == self.cached()

    def cached(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = defaultdict(set)
        tree = self._scheduler.memory.tree
        for tenant, top in tree.root.children.items():
            for (salt, adapter), namespace in top.children.items():
                todo = [(namespace, b"")]
                while todo:
                    node, above = todo.pop()
                    path = above + node.key
                    hashes = block_hashes(
                        np.frombuffer(path, np.int32), tree.page_size, root_hash((tenant, salt, adapter))
                    )
                    for medium, pages in ((Medium.GPU, node.pages), (Medium.CPU, node.host_pages)):
                        if len(pages):
                            found[medium.value] |= set(hashes[-len(pages) :].tolist())
                    todo += [(child, path) for child in node.children.values()]
        return dict(found)


@pytest.mark.parametrize("every", [1, 7])
def test_messages_of_random_runs_give_the_hashes_of_all_cached_pages(every: int) -> None:
    for seed in range(5):
        options = {"prefix_cache": True, "num_host_pages": 12, "max_swap_pages": 3}
        random_run(seed, 20, 60, faults=0.05, listen=lambda scheduler: HashedEvents(scheduler, every), **options)


def test_stored_pages_name_their_parent_tokens_salt_and_adapter() -> None:
    subject = harness()
    events = HashedEvents(subject.scheduler)
    subject.add(request(prompt(A, 91), max_tokens=1))
    subject.run()
    cleared, first = events.read()
    assert cleared == {"type": "AllBlocksCleared"}
    hashes = block_hashes(np.array(A, np.int32), 4, root_hash(("default", "", ""))).tolist()
    assert first == {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(A),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    subject.add(request(prompt(A, B, 91), max_tokens=1))
    subject.run()
    (second,) = events.read()
    assert (second["parent_block_hash"], second["token_ids"]) == (hashes[-1], list(B))
    subject.add(request(prompt(A, 91), max_tokens=1, cache_salt="salt", adapter="lora@0123456789abcdef"))
    subject.run()
    (salted,) = events.read()
    assert (salted["extra_keys"], salted["lora_name"]) == ([["salt"], None, None, None], "lora")
    assert not set(salted["block_hashes"]) & set(hashes)


def test_a_second_report_of_all_pages_equals_what_the_events_gave() -> None:
    subject = harness(num_pages=6, num_host_pages=16)
    events = HashedEvents(subject.scheduler)
    for each in (A, B, C):
        subject.add(request(prompt(each, 91), max_tokens=1))
        subject.run()
    events.check()
    known = {medium: set(hashes) for medium, hashes in events.known.items()}
    subject.scheduler.listen(events.log)
    assert events.read()[0] == {"type": "AllBlocksCleared"}
    assert events.known == known


def test_two_listeners_hear_the_same_also_when_one_listens_again() -> None:
    """A replica publishes its events, and reports them to the router."""
    subject = harness(num_pages=6, num_host_pages=16)
    first, second = HashedEvents(subject.scheduler), HashedEvents(subject.scheduler)
    for each in (A, B, C):
        subject.add(request(prompt(each, 91), max_tokens=1))
        subject.run()
        first.check()
        subject.scheduler.listen(first.log)
    assert first.read()[0] == {"type": "AllBlocksCleared"}
    second.check()
    assert first.known == second.known == first.cached()
    subject.scheduler.memory.pool.allocate(1)  # without an owner
    assert subject.scheduler.check_idle(1.0), "the state is reset"
    for one in (first, second):
        assert [event["type"] for event in one.read()] == ["AllBlocksCleared"]
        assert len(subject.scheduler.memory.tree.listeners) == 2


def test_pages_are_counted() -> None:
    subject = harness()
    events = HashedEvents(subject.scheduler)
    subject.add(request(prompt(A, 91), max_tokens=1))
    subject.run()
    assert num_pages(events.log.take()) == 4
