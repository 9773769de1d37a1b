"""Layouts of packed int32 words that the host writes and kernels read, or the other way round: field offsets by name.

The host uses the enums (`words[SamplingWord.TOP_K]`). Kernels use the same values as `tl.constexpr`, by `constants`:
Triton reads no other globals, and these are part of the key under which it stores compiled kernels.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from paceline.kernels._triton import tl
from paceline.request import MAX_LOGPROBS


def constants(layout: type[IntEnum]) -> tuple[Any, ...]:
    """The offsets of a layout in the order of its fields, as constants for kernels."""
    return tuple(tl.constexpr(field.value) for field in layout)


class DiffHeader(IntEnum):
    """The header of a packed diff (slot_state.py). The counts give the sizes of the columns that follow it."""

    NUM_PAGES = 0
    NUM_STARTS = 1
    NUM_JOINS = 2
    NUM_RUNS = 3
    NUM_TOKENS = 4
    NUM_ROWS = 5  # 0: the rows did not change
    SHARING = 6  # 1 + the number of shared work units; 0: what is shared did not change
    NUM_QUERIES = 7
    NUM_SHARED_ROWS = 8
    SHARED_CHUNK = 9  # positions of a chunk of a row's own, where rows share


DIFF_HEADER_WORDS = 16


class SamplingWord(IntEnum):
    """The sampling parameters of a slot. Floats are stored as their bits."""

    TEMPERATURE = 0  # 0: greedy
    TOP_K = 1  # 0: off
    TOP_P = 2  # 1.0: off
    MIN_P = 3  # 0: off
    SEED_LOW = 4
    SEED_HIGH = 5
    MAX_LENGTH = 6  # prompt and output at full length
    ADAPTER = 7  # 0: the base model; else 1 + the slot of the request's LoRA adapter
    LOGPROBS = 8  # 0: none requested; else 1 + the number of alternatives
    NUM_LOGPROB_IDS = 9
    LOGPROB_IDS = 10  # the first of MAX_LOGPROBS


SAMPLING_WORDS = SamplingWord.LOGPROB_IDS + MAX_LOGPROBS


class LogprobWord(IntEnum):
    """The logprobs of one sampled token. Floats are stored as their bits; lists have MAX_LOGPROBS places each."""

    CHOSEN = 0
    TOP_LOGPROBS = 1
    TOP_IDS = 1 + MAX_LOGPROBS
    REQUESTED = 1 + 2 * MAX_LOGPROBS  # of the ids named in the slot's sampling words


LOGPROB_WORDS = 1 + 3 * MAX_LOGPROBS


class DraftWord(IntEnum):
    """What a row of a pass with drafts (drafts.py) tells the host."""

    NUM_FED = 0  # its next token and its drafts
    COUNT = 1  # tokens that it got
    TOKENS = 2  # the first of them


DRAFT_WORDS = 10


class SourceWord(IntEnum):
    """The draft source of a slot: a text that its output may follow (drafts.py)."""

    NUM_TOKENS = 0  # 0: none
    NUM_PROMPT_TOKENS = 1
    TOKENS = 2  # the first of them


class AdjustHeader(IntEnum):
    """The header of a slot's lists of penalties, biases and forbidden tokens (adjust.py). Floats are their bits."""

    FLAGS = 0
    REPETITION = 1
    FREQUENCY = 2
    PRESENCE = 3
    NUM_BIASES = 4
    NUM_FORBIDDEN = 5
    NUM_SEEN = 6
    NUM_COUNTED = 7  # tokens of the row that are in the list of seen tokens


ADJUST_HEADER_WORDS = 8
MAX_BIASES = 1024
MAX_FORBIDDEN = 2048
MAX_PREFIX_TOKENS = 4096
PENALTIES, LISTS = 1, 2  # flags: the slot has penalties; it has biases or forbidden tokens


class AdjustList(IntEnum):
    """Where the lists of a slot begin, after its header. Token counts have as many words as seen ids (max_length)."""

    BIAS_IDS = ADJUST_HEADER_WORDS
    BIAS_VALUES = BIAS_IDS + MAX_BIASES
    FORBIDDEN_IDS = BIAS_VALUES + MAX_BIASES
    FORBIDDEN_UNTIL = FORBIDDEN_IDS + MAX_FORBIDDEN  # forbidden at positions below this
    PREFIX_FIRST = FORBIDDEN_UNTIL + MAX_FORBIDDEN  # forbidden only after these prefix tokens
    PREFIX_COUNT = PREFIX_FIRST + MAX_FORBIDDEN
    PREFIX_TOKENS = PREFIX_COUNT + MAX_FORBIDDEN
    SEEN_IDS = PREFIX_TOKENS + MAX_PREFIX_TOKENS


def adjust_words(max_length: int) -> int:
    """Words of a slot: its header, its lists, and the ids and counts of seen tokens."""
    return AdjustList.SEEN_IDS + 2 * max_length


class RunColumn(IntEnum):
    """Columns of packed runs: copies of consecutive words into slots. The words follow the columns."""

    SLOT = 0
    FIRST = 1  # word or position of the slot where the run begins
    OFFSET = 2  # in the packed words
    COUNT = 3


RUN_COLUMNS = 4


class UnitWord(IntEnum):
    """A work unit of decode attention. What the unit needs to know of its row is copied into it: every further lookup
    would cost a round trip to memory in every layer."""

    ROW = 0
    SLOT = 1
    FIRST_QUERY = 2  # in the query rows of shared units
    NUM_QUERIES = 3
    BEGIN = 4  # positions BEGIN..END of the cache
    END = 5
    INDEX = 6  # among the row's partial results
    IS_TAIL = 7
    POSITION = 8  # these three: of the row, as in `RowWord`
    NUM_CHUNKS = 9
    FIRST_PARTIAL = 10


UNIT_WORDS = 16


class RowWord(IntEnum):
    """A row of a decode batch."""

    POSITION = 0
    NUM_CHUNKS = 1
    FIRST_PARTIAL = 2
    SLOT = 3


ROW_WORDS = 4


class SharedUnitWord(IntEnum):
    """A work unit that several decode rows share, as the host names it. All words but the first are also in `UnitWord`,
    in the same order."""

    ROW = 0  # one of its rows: the pages are read from this row's page table
    FIRST_QUERY = 1
    NUM_QUERIES = 2
    BEGIN = 3
    END = 4
    INDEX = 5


SHARED_UNIT_WORDS = 6


class SharedRowWord(IntEnum):
    """What the shared units compute of a decode row, as the host names it."""

    NUM_TOKENS = 0  # leading positions that are in shared units
    NUM_SEGMENTS = 1  # shared units that these positions are in, and partial results


SHARED_ROW_WORDS = 2


class ExtendUnitWord(IntEnum):
    """A work unit of prefill attention: a tile of queries and all of its keys, or one split of them. The first split of
    a tile also stands for the tile where its splits are merged."""

    ROW = 0  # -1: padding
    FIRST_TOKEN = 1  # within the row's queries
    SPLIT = 2
    NUM_SPLITS = 3
    FIRST_PARTIAL = 4  # of the tile, in the workspace


EXTEND_UNIT_WORDS = 5


class SharedTileWord(IntEnum):
    """A tile of prefill queries of several rows that begin with the same positions."""

    FIRST_ROW = 0  # in the list of rows of all such tiles
    NUM_ROWS = 1
    NUM_COMMON = 2  # positions that all of them begin with


SHARED_TILE_WORDS = 3
