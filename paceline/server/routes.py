"""The route table. The app, `GET /`, the OpenAPI document and the table in docs/serving.md are made from it.

To add an endpoint, write its handler and add one row here. tests/server/test_routes.py prints the table for the docs.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
from starlette.responses import Response

from paceline import __version__
from paceline.server.apis import anthropic, ollama, ollama_embed, rerank, responses
from paceline.server.apis.responses_request import ResponsesRequest
from paceline.server.batches import handlers as batches
from paceline.server.batches.objects import (
    BatchList,
    BatchObject,
    BatchQuery,
    BatchRequest,
    FileDeleted,
    FileForm,
    FileList,
    FileObject,
    FileQuery,
)
from paceline.server.chat import ChatResponse
from paceline.server.completions import CompletionResponse
from paceline.server.embeddings import EmbeddingResponse
from paceline.server.handlers import admin, health, lora, models, requests
from paceline.server.openapi import make_document
from paceline.server.request_types import (
    CacheAction,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    PauseRequest,
    TokenizeRequest,
    TraceRequest,
    UnloadAdapterRequest,
    WeightsRequest,
)
from paceline.server.response_types import (
    AdapterLoaded,
    AdapterUnloaded,
    AnthropicModel,
    AnthropicModelList,
    CacheFlushed,
    CacheState,
    ChatCompletion,
    DetokenizeResponse,
    DrainState,
    EmbeddingList,
    HealthReport,
    ModelCard,
    ModelList,
    PauseState,
    PrefixPinned,
    PrefixUnpinned,
    Readiness,
    RequestDeleted,
    RequestList,
    RequestParts,
    ServerInfo,
    TextCompletion,
    TokenizeResponse,
    WeightsState,
    WeightsUpdated,
)
from paceline.server.routing import Access, AnyRoute, Call, GenerationRoute, Route, json_response

PUBLIC, METRICS, TENANT, ADMIN = Access.PUBLIC, Access.METRICS, Access.TENANT, Access.ADMIN


async def get_info(call: Call) -> Response:
    paths = list(dict.fromkeys(route.path for route in ROUTES))
    return json_response(ServerInfo(__version__, call.state.model_name, paths))


async def get_openapi(call: Call) -> Response:
    state = call.state
    body = _document(state.model_name, state.api_keys.is_required, state.config.public_metrics)
    return Response(body, media_type="application/json")


@lru_cache(maxsize=8)
def _document(model: str, has_keys: bool, public_metrics: bool) -> bytes:
    """Made once: it takes 20 ms, in which no stream would get a token."""
    return msgspec.json.encode(make_document(ROUTES, model, has_keys=has_keys, public_metrics=public_metrics))


# fmt: off
ROUTES: tuple[AnyRoute, ...] = (
    GenerationRoute("/v1/chat/completions", ChatResponse, "OpenAI's chat completions; streams on request",
                    ChatRequest, (ChatCompletion,)),
    GenerationRoute("/v1/completions", CompletionResponse, "OpenAI's completions; streams on request",
                    CompletionRequest, (TextCompletion,)),
    GenerationRoute("/v1/responses", responses.ResponsesResponse, "OpenAI's responses; streams on request",
                    ResponsesRequest, (responses.ResponseObject,)),
    Route("GET", "/v1/responses/{id}", TENANT, responses.get_response, "a stored response; a tenant sees its own",
          responses=(responses.ResponseObject,)),
    Route("GET", "/v1/responses/{id}/input_items", TENANT, responses.list_input_items,
          "the input of a stored response", query=responses.InputItemsQuery, responses=(responses.InputItemList,)),
    Route("DELETE", "/v1/responses/{id}", TENANT, responses.delete_response, "deletes a stored response",
          responses=(responses.ResponseDeleted,)),
    GenerationRoute("/v1/messages", anthropic.MessagesResponse, "Anthropic's messages; streams on request",
                    anthropic.MessagesRequest, (anthropic.MessagesReply,)),
    Route("POST", "/v1/messages/count_tokens", TENANT, anthropic.send_count,
          "number of prompt tokens of Anthropic's messages",
          request=anthropic.CountTokensRequest, responses=(anthropic.TokenCount,), prepare=anthropic.count_tokens),
    GenerationRoute("/api/chat", ollama.OllamaChatResponse, "Ollama's chat; streams by default",
                    ollama.OllamaChatRequest, (ollama.OllamaChatReply,)),
    GenerationRoute("/api/generate", ollama.OllamaGenerateResponse, "Ollama's answer to a prompt; streams by default",
                    ollama.OllamaGenerateRequest, (ollama.OllamaGenerateReply,)),
    Route("GET", "/api/tags", TENANT, ollama.list_tags, "the served model, as Ollama lists it",
          responses=(ollama.OllamaModelList,)),
    GenerationRoute("/api/embed", ollama_embed.OllamaEmbedResponse, "Ollama's embeddings",
                    ollama_embed.OllamaEmbedRequest, (ollama_embed.OllamaEmbedding,), streams=False),
    GenerationRoute("/api/embeddings", ollama_embed.OllamaEmbeddingsResponse, "Ollama's older embeddings, of one text",
                    ollama_embed.OllamaEmbeddingsRequest, (ollama_embed.OllamaEmbeddingsReply,), streams=False),
    Route("GET", "/api/ps", TENANT, ollama.list_running, "the served model, as Ollama lists what is loaded",
          responses=(ollama.OllamaRunningList,)),
    Route("POST", "/api/show", TENANT, ollama.show_model, "the served model, as Ollama describes it",
          request=ollama.ShowRequest, responses=(ollama.OllamaModelInfo,)),
    Route("GET", "/api/version", PUBLIC, ollama.get_version, "version of the server, for Ollama's clients",
          responses=(ollama.OllamaVersion,)),
    GenerationRoute("/v1/embeddings", EmbeddingResponse, "OpenAI's embeddings: pooled hidden states of the model",
                    EmbeddingRequest, (EmbeddingList,), streams=False),
    GenerationRoute("/v1/rerank", rerank.RerankResponse, "orders documents by the similarity of embeddings to a query",
                    rerank.RerankRequest, (rerank.RerankResult,), streams=False),
    GenerationRoute("/score", rerank.ScoreResponse, "similarity of the embeddings of pairs of texts, in vLLM's form",
                    rerank.ScoreRequest, (rerank.ScoreList,), streams=False),
    Route("GET", "/v1/models", TENANT, models.list_models,
          "the served model and its LoRA adapters, as a list; with the header `anthropic-version` as Anthropic's",
          responses=(ModelList, AnthropicModelList)),
    Route("GET", "/v1/models/{name:path}", TENANT, models.get_model, "the served model, or one of its adapters",
          responses=(ModelCard, AnthropicModel)),
    Route("POST", "/v1/load_lora_adapter", ADMIN, lora.load_adapter,
          "loads a LoRA adapter: a PEFT folder below `lora_folder`",
          request=LoadAdapterRequest, responses=(AdapterLoaded,)),
    Route("POST", "/v1/unload_lora_adapter", ADMIN, lora.unload_adapter,
          "unloads a LoRA adapter; 409 while requests use it",
          request=UnloadAdapterRequest, responses=(AdapterUnloaded,)),
    Route("POST", "/tokenize", TENANT, models.send_prepared, "text or messages to token ids",
          request=TokenizeRequest, responses=(TokenizeResponse,), prepare=models.prepare_tokenize),
    Route("POST", "/detokenize", TENANT, models.send_prepared, "token ids to text",
          request=DetokenizeRequest, responses=(DetokenizeResponse,), prepare=models.prepare_detokenize),
    Route("POST", "/v1/files", TENANT, batches.upload_file, "OpenAI's files: uploads the requests of a batch",
          form=FileForm, responses=(FileObject,)),
    Route("GET", "/v1/files", TENANT, batches.list_files, "uploaded files and outputs; a tenant sees its own",
          query=FileQuery, responses=(FileList,)),
    Route("GET", "/v1/files/{id}", TENANT, batches.get_file, "name, size and expiry of a file",
          responses=(FileObject,)),
    Route("GET", "/v1/files/{id}/content", TENANT, batches.get_content, "the content of a file", binary=True),
    Route("DELETE", "/v1/files/{id}", TENANT, batches.delete_file, "deletes a file", responses=(FileDeleted,)),
    Route("POST", "/v1/batches", TENANT, batches.create_batch,
          "OpenAI's batches: runs the requests of a file while no others wait",
          request=BatchRequest, responses=(BatchObject,)),
    Route("GET", "/v1/batches", TENANT, batches.list_batches, "batches, the newest first; a tenant sees its own",
          query=BatchQuery, responses=(BatchList,)),
    Route("GET", "/v1/batches/{id}", TENANT, batches.get_batch, "status, counts and output files of a batch",
          responses=(BatchObject,)),
    Route("POST", "/v1/batches/{id}/cancel", TENANT, batches.cancel_batch, "cancels a batch; its results so far stay",
          responses=(BatchObject,)),
    Route("GET", "/v1/requests", TENANT, requests.list_requests,
          "requests in progress: state, tokens, why they wait; a tenant sees its own", responses=(RequestList,)),
    Route("GET", "/v1/requests/{id}", TENANT, requests.get_request,
          "one request; its id is the response's `id`, also in the header `X-Request-Id`", responses=(RequestParts,)),
    Route("DELETE", "/v1/requests/{id}", TENANT, requests.abort_request, "aborts a request",
          responses=(RequestDeleted,)),
    Route("GET", "/health", PUBLIC, health.get_health,
          "liveness: 200 while an engine works or loads, else 503 with the failure",
          responses=(HealthReport,), error_statuses=(503,)),
    Route("GET", "/ready", PUBLIC, health.get_ready,
          "readiness: 200 when a request sent now would be served, else 503",
          responses=(Readiness,), error_statuses=(503,)),
    Route("GET", "/metrics", METRICS, health.get_metrics, "Prometheus metrics; `public_metrics`: for everyone"),
    Route("GET", "/admin/cache", ADMIN, admin.get_cache, "KV cache capacity and pinned prefixes",
          responses=(CacheState,)),
    Route("POST", "/admin/cache", ADMIN, admin.change_cache, "flushes the prefix cache, pins or unpins a prefix",
          request=CacheAction, responses=(CacheFlushed, PrefixPinned, PrefixUnpinned), prepare=admin.prepare_pin),
    Route("GET", "/admin/drain", ADMIN, admin.get_drain, "whether new requests are refused", responses=(DrainState,)),
    Route("POST", "/admin/drain", ADMIN, admin.start_drain, "refuses new requests", responses=(DrainState,)),
    Route("DELETE", "/admin/drain", ADMIN, admin.stop_drain, "accepts new requests again", responses=(DrainState,)),
    Route("GET", "/admin/pause", ADMIN, admin.get_pause, "whether the engine is paused", responses=(PauseState,)),
    Route("POST", "/admin/pause", ADMIN, admin.pause,
          "stops between forward passes; `mode`: running requests finish first (`wait`), are aborted (`abort`), or "
          "`continue` later", request=PauseRequest, responses=(PauseState,)),
    Route("POST", "/admin/resume", ADMIN, admin.resume, "resumes a paused engine", responses=(PauseState,)),
    Route("GET", "/admin/weights", ADMIN, admin.get_weights, "the version of the weights", responses=(WeightsState,)),
    Route("POST", "/admin/weights", ADMIN, admin.update_weights,
          "replaces the weights by those of a folder of the same shape; `mode` as for pause",
          request=WeightsRequest, responses=(WeightsUpdated,)),
    Route("POST", "/admin/trace", ADMIN, admin.record_trace,
          "records scheduler, host, device and requests for some `seconds`; the response is a file for ui.perfetto.dev",
          request=TraceRequest, responses=(dict,)),
    Route("GET", "/", PUBLIC, get_info, "version, model and routes; the live page for browsers",
          responses=(ServerInfo,)),
    Route("GET", "/openapi.json", PUBLIC, get_openapi, "this interface as an OpenAPI document", responses=(dict,)),
)
# fmt: on


def documentation() -> str:
    """The table of docs/serving.md."""
    rows = [
        f"| `{route.method} {route.path.replace(':path', '')}` | {route.access.value} | {route.summary} |"
        for route in ROUTES
    ]
    return "\n".join(["| route | access | what it does |", "|---|---|---|", *rows])
