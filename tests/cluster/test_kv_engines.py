"""Prefill/decode disaggregation with two engines in one process: same tokens, and a fault costs only time."""

from __future__ import annotations

import errno
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cluster import breaker, handshakes, kv_connection, kv_receiver, kv_sender
from paceline.cluster.kv_protocol import KvMessage, PagesSent, PrefillDone
from paceline.cluster.kv_transfer import GRACE_S
from paceline.engine.build import build_engine
from paceline.engine.job import Job
from paceline.request import FinishReason, SamplingParams
from tests.cluster.disaggregated import TINY, Answer, Pair

RNG = np.random.default_rng(3)
SHARED = RNG.integers(3, 500, 24).tolist()
PROMPTS = [[*SHARED, *RNG.integers(3, 500, 10 + 9 * number).tolist()] for number in range(6)]

# What is sent and not acknowledged ends a connection after 15 s; an idle one is probed every 5 s.
TCP_OPTIONS = {"TCP_USER_TIMEOUT": 15_000, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_NODELAY": 1}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    engine = build_engine(**TINY)
    found = []
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for tokens in PROMPTS:
        engine.submit(Job(tokens, params), answer := Answer())
        answer.result()
        found.append(answer.token_ids)
    engine.close()
    return found


def wait_until(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def ask_all(pair: Pair, expected: list[list[int]]) -> list[Any]:
    answers = [pair.submit(tokens) for tokens in PROMPTS]
    last = [answer.result() for answer in answers]
    assert [answer.token_ids for answer in answers] == expected
    return last


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_tokens_are_those_of_one_engine(
    tmp_path: Path, expected: list[list[int]], transport: str, overlap: str
) -> None:
    with Pair(tmp_path, transport, options={**TINY, "overlap": overlap}) as pair:
        ask_all(pair, expected)
        counters = pair.decode.scheduler.counters
        assert counters.received_pages > 40
        assert counters.computed_tokens < 4 * len(PROMPTS) + 8, "only the ends of the prompts"
        assert pair.remote.num_completed == len(PROMPTS) and pair.remote.num_recomputed == 0
        assert pair.remote.num_bytes == pair.server.num_bytes > 0
        pair.check()
        assert pair.num_reserved() == 0


def test_prompt_tokens_that_were_computed_for_the_request_do_not_count_as_cached(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        first = pair.submit(PROMPTS[0]).result()
        assert first.usage.cached_tokens == 0 and first.usage.prompt_tokens == len(PROMPTS[0])
        again = pair.submit(PROMPTS[0]).result()
        assert again.usage.cached_tokens == len(PROMPTS[0]) // 4 * 4
        other = pair.submit(PROMPTS[3]).result()
        assert other.usage.cached_tokens == len(SHARED), "the beginning, which the decode engine has"
        pair.decode.call(lambda scheduler: scheduler.flush_cache()).result()
        other = pair.submit(PROMPTS[4]).result()
        assert other.usage.cached_tokens == len(SHARED), "the beginning, which the prefill engine has"


def test_pages_belong_to_the_keys_of_a_prompt(tmp_path: Path) -> None:
    """Equal tokens that stand for another image are computed and sent again."""
    tokens = np.array(PROMPTS[0], np.int32)
    images = [np.where(np.arange(len(tokens)) < 8, tokens, 1_000_000 + image).astype(np.int32) for image in range(2)]
    with Pair(tmp_path) as pair:
        cached, outputs = [], []
        for keys in (images[0], images[0], images[1]):
            answer = pair.submit(tokens, keys=keys)
            cached.append(answer.result().usage.cached_tokens)
            outputs.append(answer.token_ids)
        assert cached == [0, len(tokens) // 4 * 4, 8] and outputs[0] == outputs[1] == outputs[2]
        pair.decode.call(lambda scheduler: scheduler.flush_cache()).result()
        again = pair.submit(tokens, keys=images[1]).result()
        assert again.usage.cached_tokens == len(tokens) // 4 * 4 - 4, "the prefill engine has it"
        pair.check()


def test_pages_that_the_decode_engine_has_are_not_sent(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        pair.submit(PROMPTS[1]).result()
        sent = pair.server.num_bytes
        pair.submit([*PROMPTS[1][:40], *range(3, 19)]).result()
        assert pair.server.num_bytes - sent <= 5 * pair.remote.layout.page_bytes
        sent = pair.server.num_bytes
        pair.submit([*PROMPTS[1], 5]).result()
        assert pair.server.num_bytes == sent, "too little is missing: it is computed there"


def test_short_prompts_are_computed_by_the_decode_engine(tmp_path: Path) -> None:
    with Pair(tmp_path, min_tokens=40) as pair:
        pair.submit(PROMPTS[0]).result()
        assert pair.remote.num_started == 0 and pair.server.num_started == 0


def test_host_memory_that_is_too_small_means_computing(tmp_path: Path, expected: list[list[int]]) -> None:
    with Pair(tmp_path, decode={"num_host_pages": 9}) as pair:
        ask_all(pair, expected)
        assert pair.remote.num_started < len(PROMPTS)
        pair.check()


def test_little_memory_on_both_sides_gives_the_same_tokens(tmp_path: Path, expected: list[list[int]]) -> None:
    with Pair(tmp_path, "tcp", prefill={"num_pages": 30}, decode={"num_pages": 30, "num_host_pages": 30}) as pair:
        for _ in range(3):
            ask_all(pair, expected)
        pair.check()
        assert pair.prefill.scheduler.counters.evicted_pages > 0


# ---------------------------------------------------------------------- failure


def test_without_a_prefill_engine_prompts_are_computed(tmp_path: Path, expected: list[list[int]]) -> None:
    with Pair(tmp_path) as pair:
        pair.server.close()
        pair.prefill.close()
        ask_all(pair, expected)
        assert pair.remote.failures.get("connection", 0) == pair.remote.num_recomputed
        wait_until(lambda: pair.num_reserved() == 0, GRACE_S + 30)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode_token": "wrong"}, "kv_token"),
        ({"model": "other"}, "model is 'm' here and 'other' there"),
        ({"decode": {"page_size": 8}}, "page_size is 4 here and 8 there"),
    ],
)
def test_a_peer_that_does_not_fit_is_rejected_with_a_reason(
    tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture, fields: dict[str, Any], message: str
) -> None:
    with caplog.at_level("WARNING"), Pair(tmp_path, "tcp", **fields) as pair:
        ask_all(pair, expected)
        assert pair.remote.num_completed == 0
        wait_until(lambda: pair.server.failures["rejected"])
    assert message in caplog.text


def change_messages(monkeypatch: pytest.MonkeyPatch, change: Callable[[KvMessage], list[KvMessage]]) -> None:
    """Changes what the prefill engine sends: a list of messages for each."""

    def send(self: Any, message: KvMessage, **options: Any) -> None:
        for one in change(message):
            plain(self, one, **options)

    def send_pages(self: Any, message: PagesSent, *rest: Any) -> None:
        for one in change(message):
            plain_pages(self, one, *rest)

    plain, plain_pages = kv_connection.KvConnection.send, kv_connection.KvConnection.send_pages
    monkeypatch.setattr(kv_connection.KvConnection, "send", send)
    monkeypatch.setattr(kv_connection.KvConnection, "send_pages", send_pages)


def lose_pages(message: KvMessage) -> list[KvMessage]:
    return [] if isinstance(message, PagesSent) and message.first else [message]


def repeat(message: KvMessage) -> list[KvMessage]:
    return [message, message] if isinstance(message, PagesSent) else [message]


def wrong_id(message: KvMessage) -> list[KvMessage]:
    if isinstance(message, PagesSent) and message.first:
        return [PagesSent("no such transfer", message.first, message.count), message]
    return [message]


def wrong_count(message: KvMessage) -> list[KvMessage]:
    return [PrefillDone(message.id, 99, 0, "0")] if isinstance(message, PrefillDone) else [message]


def wrong_weights(message: KvMessage) -> list[KvMessage]:
    return [PrefillDone(message.id, message.num_pages, 0, "x")] if isinstance(message, PrefillDone) else [message]


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("fault", [lose_pages, repeat, wrong_id, wrong_count, wrong_weights])
def test_faulty_messages_cost_only_time(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, transport: str, fault: Any
) -> None:
    change_messages(monkeypatch, fault)
    with Pair(tmp_path, transport) as pair:
        ask_all(pair, expected)
        pair.check()
        wait_until(lambda: pair.num_reserved() == 0)
        assert bool(pair.remote.failures) == (fault not in (repeat, wrong_id))


def test_damaged_pages_are_noticed_over_tcp(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = kv_connection.KvConnection.send_pages

    def send_pages(self: Any, message: PagesSent, memory: Any, pages: Any, after: Any) -> None:
        def damage() -> None:
            data = memory.read(pages)
            data[0, 0] ^= 1
            header = PagesSent(message.id, message.first, message.count, data.nbytes, 12345)
            self._peer.sendall(kv_connection.encode_frame(header))
            self._peer.sendall(data.data)

        if message.first:
            self._put(kv_connection._Sending(damage, after))
        else:
            plain(self, message, memory, pages, after)

    monkeypatch.setattr(kv_connection.KvConnection, "send_pages", send_pages)
    with Pair(tmp_path, "tcp") as pair:
        ask_all(pair, expected)
        assert pair.remote.failures["damaged"] == pair.remote.num_recomputed > 0
        assert pair.num_reserved() == 0
        pair.check()


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_prefill_engine_that_never_answers_is_given_up(
    tmp_path: Path, expected: list[list[int]], transport: str
) -> None:
    with Pair(tmp_path, transport, timeout_s=0.2) as pair:
        pair.prefill.pause().result()
        ask_all(pair, expected)
        assert pair.remote.num_recomputed == len(PROMPTS)
        # The prefill engine knows the deadline too, and may be the first to give up.
        assert sum(pair.remote.failures.values()) == len(PROMPTS) and pair.remote.failures.keys() <= {
            "timeout",
            "refused",
        }
        pair.prefill.resume()
        wait_until(lambda: pair.num_reserved() == 0 and pair.server.num_open == 0)
        pair.check()


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_prefill_engine_that_is_stopped_is_left_out_until_it_continues(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """As SIGSTOP does it: what was sent to it is answered when it continues."""
    monkeypatch.setattr(kv_receiver, "_BEAT_S", 0.05)
    runs, on_message = threading.Event(), kv_sender._Link.on_message

    def held(link: Any, message: Any, payload: Any) -> None:
        assert runs.wait(120)
        on_message(link, message, payload)

    monkeypatch.setattr(kv_sender._Link, "on_message", held)
    with Pair(tmp_path, transport, timeout_s=600.0) as pair:
        ask_all(pair, expected)  # well before the timeout
        assert pair.remote.failures == {"silent": pair.remote.num_started} and pair.remote.num_started > 0
        started = pair.remote.num_started
        assert pair.submit(PROMPTS[5], cache_salt="next").result()
        assert pair.remote.num_started == started, "it is not asked again"
        runs.set()
        salts = map(str, itertools.count())
        wait_until(lambda: pair.submit(PROMPTS[5], cache_salt=next(salts)).result() and pair.remote.num_completed)
        wait_until(lambda: pair.num_reserved() == 0 and pair.server.num_open == 0)
        pair.check()


def test_after_a_timeout_prompts_are_computed_here_and_one_tests_the_prefill_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers pings, and computes nothing."""
    monkeypatch.setattr(breaker, "FIRST_DELAY_S", 1000.0)
    monkeypatch.setattr(breaker, "MAX_DELAY_S", 4000.0)
    with Pair(tmp_path, timeout_s=0.2) as pair:
        later, clock, salts = [0.0], pair.remote.clock, map(str, itertools.count())
        pair.remote.clock = lambda: clock() + later[0]  # type: ignore[method-assign]

        def ask(count: int) -> int:
            """Sends this many prompts. Returns how many of them the prefill engine was asked for."""
            before, salt = pair.remote.num_started, next(salts)
            answers = [pair.submit(PROMPTS[number], cache_salt=salt) for number in range(count)]
            assert all(answer.result() for answer in answers)
            return pair.remote.num_started - before

        pair.prefill.pause().result()
        assert ask(1) == 1
        assert ask(4) == 0
        for delay in (1000, 2000):
            later[0] += delay
            assert ask(4) == 1, "one of them is the probe"
            assert ask(4) == 0
        pair.prefill.resume()
        assert ask(4) == 0, "it is not tried before"
        later[0] += 4000
        pair.remote._timeout_s = 600.0
        assert ask(1) == 1 and ask(4) == 4
        wait_until(lambda: pair.num_reserved() == 0 and pair.server.num_open == 0)
        pair.check()


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_an_aborted_request_ends_on_both_sides(tmp_path: Path, transport: str) -> None:
    with Pair(tmp_path, transport) as pair:
        pair.prefill.pause().result()
        answer = pair.submit(PROMPTS[5], id="aborted")
        wait_until(lambda: pair.prefill.scheduler.requests)
        assert pair.remote.finish("aborted", FinishReason.ABORT)
        assert answer.result().finish_reason is FinishReason.ABORT
        wait_until(lambda: not pair.prefill.scheduler.requests and pair.num_reserved() == 0)
        assert not pair.remote.finish("aborted", FinishReason.ABORT)
        pair.prefill.resume()
        pair.check()


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_lost_connection_at_any_moment_costs_only_time(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The connection ends before message 1, 2, 3 … of the prefill engine."""
    count = threading.Semaphore(0)

    def cut(message: KvMessage) -> list[KvMessage]:
        if isinstance(message, PagesSent | PrefillDone) and not count.acquire(blocking=False):
            for link in list(pair.server._links):
                link.connection.close("cut")
            return []
        return [message]

    change_messages(monkeypatch, cut)
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Pair(folder, transport) as pair:
            while count.acquire(blocking=False):
                pass
            for _ in range(number):
                count.release()
            ask_all(pair, expected)
            assert pair.remote.failures.get("connection", 0) >= 1
            wait_until(lambda: pair.server.num_open == 0)
            pair.check()
            wait_until(lambda: pair.num_reserved() == 0, GRACE_S + 30)


def test_new_weights_on_one_side_are_noticed(tmp_path: Path, expected: list[list[int]]) -> None:
    with Pair(tmp_path) as pair:
        pair.prefill.weights.replace("1", 0.0)
        ask_all(pair, expected)
        assert pair.remote.failures == {"refused": len(PROMPTS)}


def test_a_prompt_that_is_given_up_before_its_first_step_leaves_no_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer ends between the arrival of the request and its first pass; its abort comes after that pass."""
    with Pair(tmp_path) as pair:
        add, finish, aborted = pair.prefill.scheduler.add, pair.prefill.finish, threading.Event()

        def add_and_fail(request: Any, now: float) -> Any:
            added = add(request, now)
            monkeypatch.setattr(pair.prefill, "finish", lambda *_: None)
            for one in list(pair.server._transfers.values()):
                pair.server._abort(one, "connection")
            monkeypatch.setattr(pair.prefill, "finish", finish)
            aborted.set()
            return added

        monkeypatch.setattr(pair.prefill.scheduler, "add", add_and_fail)
        pair.submit(PROMPTS[0]).result()
        assert aborted.wait(30)
        wait_until(lambda: not pair.prefill.scheduler.has_work)
        pair.check()


def kv_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("paceline-kv")]


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_no_thread_of_a_connection_outlives_its_engine(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that has noticed the end of its connection and still cleans up."""
    with Pair(tmp_path, transport) as pair:
        disconnected, has_begun = pair.server.disconnected, threading.Event()

        def slow(link: Any) -> None:
            has_begun.set()
            disconnected(link)
            time.sleep(0.3)

        monkeypatch.setattr(pair.server, "disconnected", slow)
        pair.submit(PROMPTS[0]).result()
        assert kv_threads()
        pair.remote.close()
        assert has_begun.wait(30)
    assert not kv_threads()


def test_no_handshake_outlives_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with a decode engine that says nothing, nor with such a prefill engine."""
    monkeypatch.setattr(kv_connection, "HANDSHAKE_S", 120.0)
    with Pair(tmp_path, "tcp") as pair, socket.create_server(("127.0.0.1", 0)) as silent:
        pair.remote._peer(f"tcp://127.0.0.1:{silent.getsockname()[1]}").connect()
        with silent.accept()[0], socket.create_connection(("127.0.0.1", pair.server.port)):
            wait_until(lambda: pair.server._handshakes)
            pair.close()
            assert not kv_threads()


def test_no_handshake_begins_when_its_engine_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is there when the engine is closed, and its thread has not seen it yet."""
    monkeypatch.setattr(kv_connection, "HANDSHAKE_S", 120.0)
    is_closing = threading.Event()

    def slow_connect(address: str) -> socket.socket:
        found = kv_connection.connect(address)
        assert is_closing.wait(30)
        return found

    monkeypatch.setattr(kv_receiver, "connect", slow_connect)
    with Pair(tmp_path, "tcp") as pair, socket.create_server(("127.0.0.1", 0)) as silent:
        peer = pair.remote._peer(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        peer.connect()
        with silent.accept()[0]:
            closing = threading.Thread(target=peer.close)
            closing.start()
            wait_until(lambda: peer._is_closed)
            is_closing.set()
            closing.join(30)
            assert not closing.is_alive() and peer._connector is not None and not peer._connector.is_alive()


# ---------------------------------------------------------------------- strangers at the address of a prefill engine


def test_both_ends_of_a_connection_notice_a_link_that_is_cut(tmp_path: Path, expected: list[list[int]]) -> None:
    with Pair(tmp_path, "tcp") as pair:
        ask_all(pair, expected)
        ends = [link.connection for link in pair.server._links] if pair.server is not None else []
        ends += [peer._connection for peer in pair.remote._peers.values()]
        assert len(ends) == 2
        for end in ends:
            assert end is not None
            options = {name: end._peer.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in TCP_OPTIONS}
            assert options == TCP_OPTIONS
            assert end._peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_flood_of_connections_harms_no_transfer(tmp_path: Path, expected: list[list[int]]) -> None:
    with Pair(tmp_path, "tcp") as pair:
        address = ("127.0.0.1", pair.server.port)
        strangers = [socket.create_connection(address) for _ in range(handshakes.MAX_HANDSHAKES + 4)]
        wait_until(lambda: pair.server.failures["rejected"] >= 4)
        ask_all(pair, expected)
        for one in strangers:
            one.close()
        wait_until(lambda: not pair.server._handshakes)
        assert pair.server.failures["rejected"] >= len(strangers)  # the decode engine may have tried meanwhile


def test_strangers_that_hold_all_handshakes_keep_no_peer_out(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_connection, "HANDSHAKE_S", 600.0)  # they are not cut off in time
    with caplog.at_level("WARNING"), Pair(tmp_path, "tcp") as pair:
        ask_all(pair, expected)
        address = ("127.0.0.1", pair.server.port)
        strangers = [socket.create_connection(address) for _ in range(handshakes.MAX_HANDSHAKES)]
        wait_until(lambda: len(pair.server._handshakes) == handshakes.MAX_HANDSHAKES)
        for link in list(pair.server._links):
            link.connection.close("cut")
        salts = map(str, itertools.count())
        done = pair.remote.num_completed
        wait_until(
            lambda: pair.submit(PROMPTS[5], cache_salt=next(salts)).result() and pair.remote.num_completed > done
        )
        for one in strangers:
            one.close()
        wait_until(lambda: not pair.server._handshakes)
    assert caplog.text.count("rejected") == 1, "one line for all of them"


def test_a_stranger_that_sends_byte_by_byte_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_connection, "HANDSHAKE_S", 0.3)
    with Pair(tmp_path, "tcp") as pair, socket.create_connection(("127.0.0.1", pair.server.port)) as stranger:
        stranger.sendall(struct.pack(">I", 60_000))

        def is_cut_off() -> bool:
            try:
                stranger.sendall(b"x")
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        wait_until(is_cut_off)
        assert pair.server.failures["rejected"] == 1


def test_a_stranger_cannot_announce_a_long_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_connection, "HANDSHAKE_S", 120.0)  # it is not the deadline that ends the connection
    with Pair(tmp_path, "tcp") as pair, socket.create_connection(("127.0.0.1", pair.server.port)) as stranger:
        stranger.sendall(struct.pack(">I", 1 << 20))
        wait_until(lambda: pair.server.failures["rejected"] == 1)


def test_a_failed_accept_is_tried_again(tmp_path: Path, expected: list[list[int]]) -> None:
    """As when the process has no descriptor left."""
    with Pair(tmp_path, "tcp") as pair:
        listener, errors = pair.server._socket, [OSError(errno.EMFILE, "too many open files")]

        class Failing:
            def accept(self) -> Any:
                if errors:
                    raise errors.pop()
                return listener.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(listener, name)

        pair.server._socket = Failing()  # type: ignore[assignment]
        for number in range(1, 3):  # the first is accepted by the call that waits already
            with socket.create_connection(("127.0.0.1", pair.server.port)) as stranger:
                stranger.sendall(struct.pack(">I", 1 << 20))
                wait_until(lambda count=number: pair.server.failures["rejected"] == count)  # type: ignore[misc]
        assert not errors
        ask_all(pair, expected)
