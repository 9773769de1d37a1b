"""Stop strings, which may begin and end anywhere within tokens.

Text that may be the beginning of a stop string is held back until it is clear that it is not, so a client never sees
half of one. The automaton (Aho-Corasick) reads every character once, however many stop strings there are, and its state
is exactly how much text must be held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from paceline.request import SamplingParams, check_stops
from paceline.text.detokenize import Detokenizer
from paceline.text.tokenizer import Tokenizer


class _Automaton:
    """All prefixes of the stop strings as states; state 0 is the empty one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends in this state
        self.fail = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self.next[state]:
                    self.next[state][character] = len(self.next)
                    self.next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(None)
                    self.fail.append(0)
                state = self.next[state][character]
            self.match[state] = stop
        queue = list(self.next[0].values())
        for state in queue:  # breadth first: a fail link leads to a shallower, finished state
            for character, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], character)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        while character not in self.next[state]:
            if state == 0:
                return 0
            state = self.fail[state]
        return self.next[state][character]


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class StopScanner:
    """Emits text up to the stop string that ends first (the longest, if several end at the same character)."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._automaton = _automaton(check_stops(stops))
        self._include = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None  # the stop string that was found
        self.num_characters = 0  # of the emitted text

    def push(self, text: str) -> str:
        """The text that can be emitted after `text`. Always empty once `matched` is set."""
        if self.matched is not None:
            return ""
        automaton, state = self._automaton, self._state
        step, first = automaton.step, automaton.next[0]
        for index, character in enumerate(text):
            if state == 0 and character not in first:
                continue
            state = step(state, character)
            if (found := automaton.match[state]) is not None:
                self.matched = found
                whole = self._held + text[: index + 1]
                return self._emit(whole if self._include else whole[: -len(found)], held="")
        self._state = state
        whole = self._held + text
        cut = len(whole) - automaton.depth[state]
        return self._emit(whole[:cut], held=whole[cut:])

    def flush(self) -> str:
        """The text held back: the output has ended without completing a stop string."""
        return self._emit(self._held, held="")

    def _emit(self, text: str, *, held: str) -> str:
        self._held = held
        self.num_characters += len(text)
        return text


class TextStream:
    """The output of one request: token ids in, text for the client out, until a stop string or the end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._min_tokens = min_tokens  # stop strings are ignored before this many tokens
        self._scanner = StopScanner(stop, include_stop=include_stop) if stop else None
        self.num_tokens = 0  # ids pushed, up to the one that completed the stop string

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams) -> TextStream:
        """A stream with the stop strings and options of `params`."""
        return cls(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop,
            skip_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._scanner.matched if self._scanner else None

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids add. Ids after a completed stop string are ignored."""
        if self._scanner is None:
            ids = list(ids)
            self.num_tokens += len(ids)
            return self._detokenizer.push(ids)
        pieces = []
        for index in ids:
            if self._scanner.matched is not None:
                break
            self.num_tokens += 1
            text = self._detokenizer.push((index,))
            pieces.append(text if self.num_tokens < self._min_tokens else self._scanner.push(text))
        return "".join(pieces)

    def close(self) -> str:
        """The rest of the text: the request has finished. An incomplete character becomes U+FFFD."""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest
        if self._scanner.matched is not None:
            return ""
        return self._scanner.push(rest) + self._scanner.flush()
