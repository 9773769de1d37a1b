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
# A body with more bytes, or with more JSON objects, is a long one and handled in another process: see body_workers.py.
LONG_BODY_BYTES, LONG_BODY_OBJECTS = 4096, 32
# Of bodies that wait or are handled in one front end: of all tenants, of one. More get 429.
MAX_QUEUED_BODY_BYTES, MAX_TENANT_QUEUED_BODY_BYTES = 1 << 30, 1 << 28
BODY_BYTES_PER_TOKEN = 4  # what a prompt is charged for until its tokens are known
MAX_TOKENIZE_CHARACTERS = 1_048_576

# Files and batches
BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
COMPLETION_WINDOW_S = 86_400
MAX_BATCH_LINES = 50_000  # of a file, as at OpenAI
MAX_BATCH_LINE_BYTES = 1_048_576
MAX_BATCH_ERRORS = 100  # of one input file that are reported
MAX_BATCH_LINES_IN_FLIGHT = 1024  # of all batches: twice as many as max_running of a GPU
MAX_BATCH_BYTES_IN_FLIGHT = 67_108_864  # of one batch
MAX_BATCH_ATTEMPTS = 3  # for a line whose engine died
MAX_UNFINISHED_BATCHES, MAX_BATCHES = 100, 1000  # of one tenant; the oldest finished ones are removed
MAX_LISTED_FILES, MAX_LISTED_BATCHES = 10_000, 100
MAX_CUSTOM_ID_CHARACTERS = 512
MAX_METADATA_PAIRS, MAX_METADATA_KEY_CHARACTERS, MAX_METADATA_CHARACTERS = 16, 64, 512
MAX_UPLOADS = 4  # of a tenant at one front end at a time; more get 503
MAX_UPLOAD_S = 600.0
MAX_FORM_PARTS, MAX_FIELD_BYTES, MAX_FILENAME_CHARACTERS = 8, 1024, 255
MIN_FILE_EXPIRY_S = 3600

MAX_DETOKENIZE_TOKENS = 1_048_576
