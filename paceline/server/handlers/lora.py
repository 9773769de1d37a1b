"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: LoRA adapters while the server runs, as vLLM names them.

A client names a folder, and the server reads it: only folders below `lora_folder` are allowed, with symbolic links
resolved first. Without that option nothing can be loaded over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from starlette.responses import Response

from paceline.engine.output import UnknownAdapter
from paceline.request import PacelineError
from paceline.server.errors import ApiError
from paceline.server.queries import LoadAdapter, UnloadAdapter
from paceline.server.request_types import LoadAdapterRequest, UnloadAdapterRequest
from paceline.server.response_types import AdapterLoaded, AdapterUnloaded
from paceline.server.routing import Call, json_response


async def load_adapter(call: Call) -> Response:
    body, state = call.body, call.state
    assert isinstance(body, LoadAdapterRequest), "the route's request type"
    if body.lora_name == state.model_name:
        raise ApiError(
            f"lora_name is {body.lora_name!r}, the name of the served model: choose another name.",
            param="lora_name",
            code="invalid_value",
        )
    path = await asyncio.to_thread(_allowed_path, state.config.lora_folder, body.lora_path)
    await state.refresh_adapters()
    was_loaded = body.lora_name in state.adapters
    query = LoadAdapter(name=body.lora_name, path=path, replace=body.load_inplace)
    try:
        loaded = await state.client.query(query)
    except PacelineError:
        if state.config.replicas > 1 and not was_loaded:  # some engines may have it: either all or none
            with contextlib.suppress(PacelineError):
                await state.client.query(UnloadAdapter(name=body.lora_name))
        raise
    finally:
        await state.refresh_adapters()
    return json_response(AdapterLoaded(loaded.name, loaded.rank, loaded.num_bytes))


def _allowed_path(folder: str | None, path: str) -> str:
    """`path`, absolute or relative to the allowed folder, if it is below that."""
    if folder is None:
        raise ApiError(
            "lora_path is given and the server has no lora_folder: start it with --lora-folder, below which adapters "
            "may be loaded.",
            status=403,
            param="lora_path",
            code="lora_folder_required",
        )
    allowed = Path(folder).expanduser().resolve()
    try:
        found = (allowed / path).resolve()
    except (OSError, ValueError):  # too many links, or a NUL
        found = Path("/")
    if allowed not in found.parents and found != allowed:
        raise ApiError(
            "lora_path is not below the lora_folder of this server: give a folder there, relative to it or absolute.",
            status=403,
            param="lora_path",
            code="path_not_allowed",
        )
    return str(found)


async def unload_adapter(call: Call) -> Response:
    body, state = call.body, call.state
    assert isinstance(body, UnloadAdapterRequest), "the route's request type"
    try:
        await state.client.query(UnloadAdapter(name=body.lora_name))
    except UnknownAdapter as error:
        raise ApiError(str(error), status=404, param="lora_name", code="not_found") from None
    finally:
        await state.refresh_adapters()
    return json_response(AdapterUnloaded(body.lora_name))
