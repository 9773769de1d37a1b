"""Job: one request as it travels from a caller to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.request import SAME_AS_TOKENS, SamplingParams, Tokens, as_tokens, keys_of
from paceline.scheduler.plan import NO_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One prompt and how to process it. `n` and `best_of` are resolved: each choice is a job of its own."""

    prompt: Tokens  # token ids; `Engine.encode` makes them from text
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = ""  # unique among unfinished requests; the engine chooses one if empty
    tenant: str = "default"
    priority: int = 0  # larger goes first
    timeout_s: float | None = None  # after which the request ends with reason deadline
    queue_timeout_s: float | None = None  # the same before its admission, with reason queue_timeout
    running_timeout_s: float | None = None  # the same after its admission, with reason running_timeout
    cache_salt: str = ""  # requests share cached prefixes only within one tenant, salt and adapter
    adapter: str = ""  # name of a LoRA adapter; "": the base model
    adapter_version: str = ""  # what a front end believes that the engine calls it: for routing alone
    pooling: str | None = None  # mean or last: the prompt is embedded, nothing is generated
    stream: bool = True  # False: a single output at the end is enough
    draft_source: Tokens = field(default_factory=lambda: NO_TOKENS)  # tokens that the output is likely to have

    prefill_at: str = ""  # address of a prefill engine that may compute the prompt
    is_exported: bool = False  # the pages of its prompt are copied to another engine
    num_prefilled: int = 0  # prompt tokens that another engine has computed for it: they do not count as cached

    # What prefixes of the prompt are compared by (`Request.keys`); empty: its tokens.
    keys: Tokens = field(default_factory=lambda: NO_TOKENS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", as_tokens(self.prompt))
        if len(self.keys):
            object.__setattr__(self, "keys", keys_of(self.prompt, self.keys))
        object.__setattr__(self, "draft_source", as_tokens(self.draft_source, "draft_source"))

    @property
    def request_keys(self) -> Tokens:
        """As a `Request` takes them."""
        return self.keys if len(self.keys) else SAME_AS_TOKENS

    @property
    def prefix_keys(self) -> Tokens:
        """One for each token of the prompt."""
        return self.keys if len(self.keys) else self.prompt
