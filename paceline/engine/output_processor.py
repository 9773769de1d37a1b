"""What becomes of a pass's tokens: text, chances, pieces and ends, for every request that lives.

All of it on the engine's thread. A request ends here in exactly one last piece; whoever broke on the way, its text or
the one who listens, ends alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.engine.output import EngineFailed, OutputDelta, Timings, TokenLogprob, TokenUsage
from paceline.request import FinishReason, PacelineError, Request
from paceline.sampling.grammar import Compiled
from paceline.sampling.types import LogprobRun, Logprobs
from paceline.scheduler.plan import Finished, Updates

_QUIET_STEPS = 16  # in which every quiet request's text is made once, as far as it has come


class Text(Protocol):
    """Token ids to what a piece calls its text: `TextStream`, or `TokenText`."""

    @property
    def matched(self) -> str | None: ...

    def push(self, ids: Iterable[int]) -> str: ...

    def close(self) -> str: ...


class Sink(Protocol):
    """Where a request's pieces go. Called on the engine's thread; must not block."""

    @property
    def wants_all_at_once(self) -> bool:
        """Nothing before the end: text that nobody reads yet is not made."""

    def put(self, piece: OutputDelta) -> None: ...

    def refuse(self, error: PacelineError) -> None:
        """Instead of any piece: the request was not accepted."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    request: Request
    text: Text
    sink: Sink
    is_quiet: bool  # one piece, at the end; a stop string must be looked for all the time
    num_tokens: int = 0  # that have been told
    texts: list[str] = field(default_factory=list)  # of a quiet one, made and not told
    num_in_texts: int = 0  # tokens
    is_new: bool = True  # no piece has gone out
    logprobs: list[TokenLogprob] = field(default_factory=list)  # since the last piece
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # told with the first piece
    compiling: Future[Compiled] | None = None  # its grammar

    def take_logprobs(self) -> dict[str, Any]:
        """What a piece has to say of chances."""
        prompt = tuple(self.prompt_logprobs) if self.is_new else ()
        logprobs, self.logprobs, self.is_new = tuple(self.logprobs), [], False
        return {"logprobs": logprobs, "prompt_logprobs": prompt} if logprobs or prompt else {}

    def catch_up(self, end: int) -> None:
        """Makes the text of a quiet request's first `end` tokens, as far as it is not made."""
        self.texts.append(self.text.push(self.request.output[self.num_in_texts : end]))
        self.num_in_texts = end


class OutputProcessor:
    def __init__(self, finish: Callable[[str, FinishReason], object], leave: Callable[[Request], None]) -> None:
        """finish: ends a request that the scheduler may still run; leave: is told of every request that ends."""
        self.live: dict[str, ActiveRequest] = {}
        self._num_loud = 0  # of them, those that are not quiet
        self._finish, self._leave = finish, leave

    def add(self, live: ActiveRequest) -> None:
        self.live[live.request.id] = live
        self._num_loud += not live.is_quiet

    def take(
        self, updates: Updates, step: int, logprobs: Logprobs | None,
        prompt_logprobs: Iterable[tuple[Request, LogprobRun]],
    ) -> None:  # fmt: skip
        """All that a pass has said."""
        self._keep_prompt_logprobs(prompt_logprobs)
        if logprobs is not None:
            self._keep_logprobs(updates, logprobs)
        if self._num_loud:
            self._tell(updates)
        self._catch_up(updates.requests[step % _QUIET_STEPS :: _QUIET_STEPS])
        self.end_all(updates.finished)

    def end_all(self, finished: Iterable[Finished], error: str | None = None) -> None:
        for item in finished:
            live = self.live.get(item.request.id)
            if live is not None and live.request is item.request:
                why = error
                if item.reason is FinishReason.ERROR:
                    why = "the model's logits are no numbers: its weights are damaged, or too large for its dtype."
                self.end(live, item.reason, error=why)

    def end(
        self,
        live: ActiveRequest,
        reason: FinishReason,
        text: str = "",
        tokens: tuple[int, ...] = (),
        error: str | None = None,
    ) -> None:
        """The last piece, with what has not been told yet."""
        request = live.request
        self.forget(live)
        self._leave(request)
        if live.is_quiet and error is None:
            tokens, live.num_tokens = tuple(request.output), len(request.output)
            try:
                # The scheduler ended it with `stop` at its stop token: that one is no text.
                live.catch_up(len(tokens) - (reason is FinishReason.STOP))
                text = "".join(live.texts)
            except Exception as failure:  # of this request's text: the others go on
                reason, error = FinishReason.ERROR, repr(failure)
        elif live.is_quiet:
            live.logprobs = []  # of tokens that are not told
        if error is None:
            text += live.text.close()
        usage = TokenUsage(len(request.prompt), request.num_cached, live.num_tokens, request.num_fetched)
        vector = None
        if request.pooled is not None and reason is FinishReason.LENGTH:
            vector = request.pooled.vector().tobytes()
        self._put(
            live, OutputDelta(text, tokens, reason, usage, Timings.of(request), error, vector, **live.take_logprobs())
        )

    def forget(self, live: ActiveRequest) -> None:
        if self.live.get(live.request.id) is live:
            del self.live[live.request.id]
            self._num_loud -= not live.is_quiet

    def _keep_prompt_logprobs(self, told: Iterable[tuple[Request, LogprobRun]]) -> None:
        """What the last pass told of prompts, until their first piece."""
        for request, run in told:
            live = self.live.get(request.id)
            if live is None or live.request is not request:
                continue
            # After a retraction the same positions are computed and told again.
            known = len(live.prompt_logprobs) + 1 - run.first
            if known >= 0:
                tokens = request.prompt[run.first + known : run.first + len(run.chosen)].tolist()
                columns = (column[known:].tolist() for column in run[2:])
                for token, chosen, ids, chances in zip(tokens, *columns, strict=True):
                    live.prompt_logprobs.append(TokenLogprob(token, chosen, tuple(zip(ids, chances, strict=True))))

    def _keep_logprobs(self, updates: Updates, told: Logprobs) -> None:
        """What the last pass told of its tokens, until their piece."""
        # All rows' numbers at once: taken one by one out of the arrays they cost several times as much.
        columns = (column.tolist() for column in told)
        for request, token, chosen, ids, chances, asked in zip(
            updates.requests, updates.tokens.tolist(), *columns, strict=True
        ):
            count = request.params.logprobs
            live = None if count is None else self.live.get(request.id)
            if live is None or live.request is not request:
                continue
            top = tuple(zip(ids, chances, strict=True))[:count]  # all of them, where nobody asks more
            if asked:
                top += tuple(zip(request.params.logprob_token_ids, asked, strict=False))  # another row may ask more
            live.logprobs.append(TokenLogprob(token, chosen, top))

    def _tell(self, updates: Updates) -> None:
        """What this pass said, to those who want to hear it at once."""
        # A request that the scheduler ended with `stop` got its stop token in this very pass: that one is no text.
        stopped = {id(item.request) for item in updates.finished if item.reason is FinishReason.STOP}
        texts: dict[str, tuple[list[str], list[int]]] = {}
        for request, token in zip(updates.requests, updates.tokens.tolist(), strict=True):
            live = self.live.get(request.id)
            if live is None or live.is_quiet or live.request is not request:
                continue  # several tokens in one pass: those behind a stop string
            live.num_tokens += 1
            texts_of, tokens_of = texts.setdefault(request.id, ([], []))
            tokens_of.append(token)
            if id(request) in stopped and live.num_tokens == len(request.output):
                continue
            try:
                texts_of.append(live.text.push((token,)))
            except Exception as error:  # of this request's text: the others go on
                self.end(live, FinishReason.ERROR, "".join(texts_of), tuple(tokens_of), repr(error))
                self._finish(request.id, FinishReason.ERROR)
                del texts[request.id]
                continue
            if live.text.matched is not None:
                if not request.is_finished:
                    self._finish(request.id, FinishReason.STOP)
                self.end(live, FinishReason.STOP, "".join(texts_of), tuple(tokens_of))
                del texts[request.id]
        ended = {id(item.request): item.reason for item in updates.finished}
        for request_id, (texts_of, tokens_of) in texts.items():
            live = self.live[request_id]
            text, reason = "".join(texts_of), ended.get(id(live.request))
            if reason is not None:
                self.end(live, reason, text, tuple(tokens_of))
            else:
                self._put(live, OutputDelta(text, tuple(tokens_of), **live.take_logprobs()))

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Makes text that nobody waits for yet, a few requests in each step: at their ends, which come together where
        they began together, it would hold up the next pass."""
        for request in requests:
            live = self.live.get(request.id)
            if live is None or not live.is_quiet or live.request is not request or request.is_finished:
                continue  # of one that has ended, the last token may be no text
            try:
                live.catch_up(len(request.output))
            except Exception as error:  # of this request's text: the others go on
                self.end(live, FinishReason.ERROR, error=repr(error))
                self._finish(request.id, FinishReason.ERROR)

    def _put(self, live: ActiveRequest, piece: OutputDelta) -> None:
        try:
            live.sink.put(piece)
        except Exception as error:  # whoever listens is broken; the others are not
            self.forget(live)
            self._finish(live.request.id, FinishReason.ERROR)
            live.sink.refuse(EngineFailed(f"request {live.request.id} has nobody to take its output ({error!r})."))
