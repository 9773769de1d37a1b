"""The ring: every reader gets every message, in order, whatever its size."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from paceline.parallel.ring import RingReader, RingWriter, create_memory

CAPACITY = 1 << 12


@pytest.fixture
def ends() -> Iterator[tuple[RingWriter, list[RingReader], list[tuple[int, int]]]]:
    memory = create_memory(CAPACITY)
    pipes = [os.pipe(), os.pipe()]
    writer = RingWriter(memory, [write for _, write in pipes], lambda: None)
    yield writer, [RingReader(memory, index, read) for index, (read, _) in enumerate(pipes)], pipes
    os.close(memory)
    for pipe in pipes:
        for end in pipe:
            try:
                os.close(end)
            except OSError:
                continue  # closed by the test


Ends = tuple[RingWriter, list[RingReader], list[tuple[int, int]]]


def messages() -> list[bytes]:
    rng = random.Random(4)
    sizes = [0, 1, 55, 56, 57, 64, CAPACITY, 5 * CAPACITY + 3, *(rng.randrange(3 * CAPACITY) for _ in range(200))]
    return [rng.randbytes(size) for size in sizes]


def test_all_readers_get_all_messages_in_order(ends: Ends) -> None:
    writer, readers, _ = ends
    found: list[list[bytes | None]] = [[] for _ in readers]

    def read(index: int) -> None:
        found[index].extend(readers[index].read() for _ in messages())

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(readers))]
    for thread in threads:
        thread.start()
    for message in messages():
        writer.write(message)
    for thread in threads:
        thread.join()
    assert found == [messages(), messages()]


def test_a_reader_sees_that_the_writer_is_gone(ends: Ends) -> None:
    writer, readers, pipes = ends
    writer.write(b"last")
    os.close(pipes[0][1])
    assert [readers[0].read(), readers[0].read()] == [b"last", None]


def test_a_full_ring_asks_whether_the_readers_are_alive(ends: Ends) -> None:
    memory = create_memory(CAPACITY)
    read, write = os.pipe()

    def check() -> None:
        raise RuntimeError("a reader is gone")

    writer = RingWriter(memory, [write], check)
    with pytest.raises(RuntimeError, match="a reader is gone"):
        writer.write(bytes(2 * CAPACITY))
    for end in (memory, read, write):
        os.close(end)


def test_signs_of_life_are_counted_by_reader(ends: Ends) -> None:
    writer, readers, _ = ends
    readers[1].beat()
    readers[1].beat()
    assert writer.beats() == [0, 2]


def test_another_process_reads_the_memory_by_its_descriptor() -> None:
    memory = create_memory()
    code = (
        "import sys; from paceline.parallel.ring import RingReader; "
        "reader = RingReader(int(sys.argv[1]), 0, 0); print(reader.read().decode(), reader.read())"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(memory,)
    )
    assert child.stdin is not None
    RingWriter(memory, [child.stdin.fileno()], lambda: None).write(b"hello")
    output, _ = child.communicate()
    os.close(memory)
    assert output.split() == [b"hello", b"None"]
