"""Turns the tokens of each forward pass into outputs: text, logprobs, deltas and finish reasons.

Runs on the engine's thread. Every request receives exactly one final delta or an error. If detokenizing a request or
delivering to its sink fails, only that request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.engine.loop import StepOutput
from paceline.engine.output import EngineFailed, OutputDelta, Timings, TokenLogprob, TokenUsage
from paceline.engine.pooling import PooledStates, Pooler
from paceline.request import FinishReason, PacelineError, Refused
from paceline.sampling.grammar import Compiling
from paceline.sampling.types import LogprobRun, Logprobs
from paceline.scheduler.plan import Finished, Updates
from paceline.scheduler.tracked_request import TrackedRequest
from paceline.text.stop import TextStream

_DETOKENIZE_STEPS = 16  # steps in which each request that is not streamed is detokenized once


class Sink(Protocol):
    """Receives the output of one request. Called on the engine's thread; must not block."""

    def put(self, delta: OutputDelta) -> None: ...

    def refuse(self, error: PacelineError) -> None:
        """The request was not accepted, or left the queue before it began; no delta follows."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request from its submission to its final delta."""

    request: TrackedRequest  # a new one until the scheduler has accepted it
    sink: Sink
    text: TextStream | None  # None: token ids only
    is_streamed: bool  # False: one delta at the end. With stop strings always True: they are searched in every delta
    num_tokens: int = 0  # delivered
    texts: list[str] = field(default_factory=list)  # not streamed: detokenized so far
    num_detokenized: int = 0  # not streamed: tokens in `texts`
    is_first: bool = True  # no delta was delivered yet
    logprobs: list[TokenLogprob] = field(default_factory=list)  # since the last delta
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # delivered with the first delta
    compiling: Compiling | None = None  # its grammar
    pooler: Pooler | None = None  # of an embedding

    def take_logprobs(self) -> dict[str, Any]:
        """The logprob fields of the next delta."""
        prompt = tuple(self.prompt_logprobs) if self.is_first else ()
        logprobs, self.logprobs, self.is_first = tuple(self.logprobs), [], False
        return {"logprobs": logprobs, "prompt_logprobs": prompt} if logprobs or prompt else {}

    def push(self, token: int) -> str:
        return "" if self.text is None else self.text.push((token,))

    def detokenize_until(self, end: int) -> None:
        """Detokenizes the first `end` output tokens of a request that is not streamed."""
        if self.text is not None:
            self.texts.append(self.text.push(self.request.output[self.num_detokenized : end]))
        self.num_detokenized = end


class OutputProcessor:
    def __init__(
        self,
        finish: Callable[[str, FinishReason], object],
        on_finished: Callable[[TrackedRequest], None],
        weight_versions: Callable[[TrackedRequest], tuple[str, ...]] = lambda _: (),
        retry_after_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`finish` ends a request that the scheduler may still run; `on_finished` is called once for each request;
        `weight_versions` are those that computed it; `retry_after_s` is when a refused one is likely to be accepted."""
        self.active: dict[str, ActiveRequest] = {}
        self._num_streamed = 0
        self._finish, self._on_finished, self._weight_versions = finish, on_finished, weight_versions
        self._retry_after_s = retry_after_s

    def add(self, active: ActiveRequest) -> None:
        self.active[active.request.id] = active
        self._num_streamed += active.is_streamed

    def process(self, output: StepOutput) -> None:
        """Delivers everything that one step produced."""
        updates = output.updates
        for request, run in output.prompt_logprobs:
            self._keep_prompt_logprobs(request, run)
        for request, states in output.pooled:
            self._keep_states(request, states)
        if output.logprobs is not None:
            self._keep_logprobs(updates, output.logprobs)
        if self._num_streamed:
            self._stream(updates)
        self._detokenize(updates.requests[output.step % _DETOKENIZE_STEPS :: _DETOKENIZE_STEPS])
        self.end_all(updates.finished)
        for request, why in output.grammar_failures:
            if (active := self._find(request)) is not None:
                self._finish(request.id, FinishReason.ERROR)
                self.end(active, FinishReason.ERROR, error=why)

    def end_all(self, finished: Iterable[Finished], error: str | None = None) -> None:
        for item in finished:
            if (active := self._find(item.request)) is not None:
                if item.reason is FinishReason.DISPLACED:
                    self._refuse(active)
                    continue
                why = error
                if item.reason is FinishReason.ERROR:
                    why = "the logits contain NaN: the weights are damaged, or overflow in this dtype."
                self.end(active, item.reason, error=why)

    def end(
        self,
        active: ActiveRequest,
        reason: FinishReason,
        text: str = "",
        tokens: tuple[int, ...] = (),
        error: str | None = None,
    ) -> None:
        """Delivers the final delta."""
        request = active.request
        self.forget(active)
        self._on_finished(request)
        if not active.is_streamed and error is None:
            tokens, active.num_tokens = tuple(request.output), len(request.output)
            try:
                # With reason stop, the last token is the stop token, which is not part of the text.
                active.detokenize_until(len(tokens) - (reason is FinishReason.STOP))
                text = "".join(active.texts)
            except Exception as failure:  # detokenizing this request failed; the others continue
                reason, error = FinishReason.ERROR, repr(failure)
        elif not active.is_streamed:
            active.logprobs = []  # of tokens that are not delivered
        if error is None and active.text is not None:
            text += active.text.close()
        num_prefilled = request.request.num_prefilled
        usage = TokenUsage(
            len(request.prompt),
            max(0, request.num_cached - num_prefilled),
            active.num_tokens,
            max(0, request.num_fetched - num_prefilled),
            request.num_drafted,
            min(request.num_accepted, active.num_tokens),  # a stop string may cut off accepted ones
        )
        vector = None
        if active.pooler is not None and reason is FinishReason.LENGTH:
            vector = active.pooler.vector().tobytes()
        more = {
            "weight_versions": self._weight_versions(request),
            "clipped_max_tokens": request.clipped_max_tokens,
            "matched_stop": None if active.text is None else active.text.matched,
            **active.take_logprobs(),
        }
        self._put(active, OutputDelta(text, tokens, reason, usage, Timings.of(request), error, vector, **more))

    def _refuse(self, active: ActiveRequest) -> None:
        """It has left the queue and has no output: its caller gets the error of a request that found the queue full."""
        self.forget(active)
        self._on_finished(active.request)
        active.sink.refuse(
            Refused(
                "a request of higher priority took its place in the full queue (full_queue): retry later.",
                retry=True,
                retry_after_s=self._retry_after_s(),
            )
        )

    def forget(self, active: ActiveRequest) -> None:
        if self.active.get(active.request.id) is active:
            del self.active[active.request.id]
            self._num_streamed -= active.is_streamed

    def _find(self, request: TrackedRequest) -> ActiveRequest | None:
        """The active request, unless it has ended and its id belongs to another one."""
        active = self.active.get(request.id)
        return active if active is not None and active.request is request else None

    def _keep_states(self, request: TrackedRequest, states: PooledStates) -> None:
        active = self._find(request)
        if active is not None and active.pooler is not None:
            active.pooler.add(states)

    def _keep_prompt_logprobs(self, request: TrackedRequest, run: LogprobRun) -> None:
        if (active := self._find(request)) is None:
            return
        # When a request is requeued, the same positions are computed and reported again. The last report counts: the
        # first may be of KV with NaN.
        first = run.first - max(request.params.prompt_logprobs_start, 1)
        if first <= len(active.prompt_logprobs):
            tokens = request.prompt[run.first : run.first + len(run.chosen)].tolist()
            columns = (column.tolist() for column in run[2:])
            active.prompt_logprobs[first:] = [
                TokenLogprob(token, chosen, tuple(zip(ids, logprobs, strict=True)))
                for token, chosen, ids, logprobs in zip(tokens, *columns, strict=True)
            ]

    def _keep_logprobs(self, updates: Updates, logprobs: Logprobs) -> None:
        # All rows at once: indexing the arrays row by row costs several times as much.
        columns = (column.tolist() for column in logprobs)
        for request, token, chosen, ids, values, asked in zip(
            updates.requests, updates.tokens.tolist(), *columns, strict=True
        ):
            count = request.params.logprobs
            active = None if count is None else self._find(request)
            if active is None:
                continue
            top = tuple(zip(ids, values, strict=True))[:count]
            if asked:
                top += tuple(zip(request.params.logprob_token_ids, asked, strict=False))  # another row may ask for more
            active.logprobs.append(TokenLogprob(token, chosen, top))

    def _stream(self, updates: Updates) -> None:
        """Delivers this pass's tokens of streamed requests."""
        # A request that the scheduler finished with `stop` got its stop token in this pass: that token is not text.
        stopped = {id(item.request) for item in updates.finished if item.reason is FinishReason.STOP}
        new: dict[str, tuple[list[str], list[int]]] = {}  # request id -> texts, tokens
        for request, token in zip(updates.requests, updates.tokens.tolist(), strict=True):
            active = self.active.get(request.id)
            if active is None or not active.is_streamed or active.request is not request:
                continue  # also: further tokens of the same pass behind a stop string
            active.num_tokens += 1
            texts, tokens = new.setdefault(request.id, ([], []))
            tokens.append(token)
            if id(request) in stopped and active.num_tokens == len(request.output):
                continue
            try:
                texts.append(active.push(token))
            except Exception as error:  # detokenizing this request failed; the others continue
                self.end(active, FinishReason.ERROR, "".join(texts), tuple(tokens), repr(error))
                self._finish(request.id, FinishReason.ERROR)
                del new[request.id]
                continue
            if active.text is not None and active.text.matched is not None:
                if not request.is_finished:
                    self._finish(request.id, FinishReason.STOP)
                self.end(active, FinishReason.STOP, "".join(texts), tuple(tokens))
                del new[request.id]
        ended = {id(item.request): item.reason for item in updates.finished}
        for request_id, (texts, tokens) in new.items():
            active = self.active[request_id]
            text, reason = "".join(texts), ended.get(id(active.request))
            if reason is not None:
                self.end(active, reason, text, tuple(tokens))
            else:
                self._put(active, OutputDelta(text, tuple(tokens), **active.take_logprobs()))

    def _detokenize(self, requests: Sequence[TrackedRequest]) -> None:
        """Detokenizes requests that are not streamed, a few in each step. Requests that start together often end
        together; detokenizing them all at their end would delay the next pass."""
        for request in requests:
            active = self._find(request)
            if active is None or active.is_streamed or request.is_finished:
                continue  # the last token of a finished request may be its stop token
            try:
                active.detokenize_until(len(request.output))
            except Exception as error:  # detokenizing this request failed; the others continue
                self.end(active, FinishReason.ERROR, error=repr(error))
                self._finish(request.id, FinishReason.ERROR)

    def _put(self, active: ActiveRequest, delta: OutputDelta) -> None:
        try:
            active.sink.put(delta)
        except Exception as error:  # this sink is broken; the others continue
            self.forget(active)
            self._finish(active.request.id, FinishReason.ERROR)
            active.sink.refuse(
                EngineFailed(f"the output of request {active.request.id} cannot be delivered ({error!r}).")
            )
