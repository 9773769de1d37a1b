"""The headers of a model on the Hugging Face hub, without its weights.

They become a folder like that of a downloaded model, in which each safetensors file has its header and, where its
values would be, nothing: a hole that takes no space. So whatever reads headers reads this folder, too.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from paceline.model.fetch import CONNECT_SECONDS, HUB_ID, ModelUnavailable, may_pass
from paceline.model.spec import ModelError

_FIRST_BYTES = 100_000  # of a file: the header of most fits into them
_MAX_HEADER = 100 << 20  # of the format
_LENGTH = struct.Struct("<Q")
_NAME = "model.safetensors"


def fetch_headers(name: str, folder: Path) -> Path:
    """Fills `folder` with what is known of the model `name` before it is downloaded."""
    match = HUB_ID.match(name)
    if match is None or match["file"]:
        raise ModelError(
            f"model is {name!r}, which is not on this machine: give the hub id of a folder with safetensors, whose "
            f"headers can be read apart, or run `paceline pull {name}` first."
        )
    try:
        _fetch(name, folder)
    except ModelError:
        raise
    except Exception as error:  # the types of errors differ between versions of the hub client
        kind = ModelUnavailable if may_pass(error) else ModelError
        raise kind(
            f"headers of {name!r} could not be fetched from the Hugging Face hub ({type(error).__name__}: "
            f"{(str(error) or 'no details').splitlines()[0]}): check the name and the network, and set HF_TOKEN if the "
            "model is gated."
        ) from None
    return folder


def _fetch(name: str, folder: Path) -> None:
    from huggingface_hub import HfApi, hf_hub_download

    files = {one.rfilename for one in HfApi().model_info(name, timeout=CONNECT_SECONDS).siblings or ()}
    index = f"{_NAME}.index.json"
    wanted = [one for one in ("config.json", "generation_config.json", index) if one in files]
    for file in wanted:
        hf_hub_download(name, file, local_dir=folder, etag_timeout=CONNECT_SECONDS)
    if index in files:
        weights = sorted(set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        weights = [_NAME] if _NAME in files else sorted(one for one in files if one.endswith(".safetensors"))
    for file in weights:
        if not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise ModelError(
                f"{name} has a file of weights called {file!r}: expected a name that ends in .safetensors."
            )
        _write_header(_reader(name, file), folder / file)


def _reader(name: str, file: str) -> Callable[[int, int], tuple[bytes, int]]:
    """A function that reads bytes `first` to `last` of a file, and how many it has."""
    import huggingface_hub.utils

    hub: ModuleType = huggingface_hub.utils  # it exports these functions lazily, so their types are not known
    url, headers = huggingface_hub.hf_hub_url(name, file), hub.build_hf_headers()

    def read(first: int, last: int) -> tuple[bytes, int]:
        response = hub.get_session().get(
            url, headers={**headers, "range": f"bytes={first}-{last}"}, timeout=CONNECT_SECONDS
        )
        hub.hf_raise_for_status(response)
        size = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("content-range", ""))
        if response.status_code != 206 or size is None:
            raise ModelError(f"{url} cannot be read in part: run `paceline pull {name}` first.")
        return response.content, int(size[1])

    return read


def _write_header(read: Callable[[int, int], tuple[bytes, int]], path: Path) -> None:
    data, size = read(0, _FIRST_BYTES - 1)
    if len(data) < _LENGTH.size:
        raise ModelError(f"{path.name} has {size} bytes: it is not a safetensors file.")
    end = _LENGTH.size + _LENGTH.unpack(data[: _LENGTH.size])[0]
    if end > min(size, _MAX_HEADER):
        raise ModelError(f"{path.name} has a header of {end} bytes, and {size} in all: it is not a safetensors file.")
    if end > len(data):
        data += read(len(data), end - 1)[0]
    with path.open("wb") as file:
        file.write(data[:end])
        file.truncate(size)
