"""Limits of the HTTP interface that are not options; those that are options are in `ServerConfig`.

Bounds of sampling parameters are in `paceline/request.py`.
"""

from __future__ import annotations

MAX_CACHE_SALT_CHARACTERS = 256
MAX_PRIORITY = 2**31 - 1  # of a request, in both directions; tenants have a lower one, `max_priority`
MAX_DEADLINE_MS = 1e10
MAX_TOKEN_ID = 2**31 - 1  # in the document; each model has its own vocabulary
MAX_LISTED_REQUESTS = 1000
MAX_WEIGHT_VERSION_CHARACTERS = 256
DEFAULT_FLUSH_TIMEOUT_S, MAX_FLUSH_TIMEOUT_S = 60.0, 3600.0  # new requests wait for that long at most
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions alone
LONG_BODY_BYTES = 131_072  # a longer body is handled in another process: see body_workers.py
MAX_LONG_BODIES = 16  # of one front end at a time; more get 503
MAX_TOKENIZE_CHARACTERS = 1_048_576
MAX_DETOKENIZE_TOKENS = 1_048_576
