"""Loads the tokenizer of a model: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from paceline.model.config_json import token_ids
from paceline.model.fetch import DEFAULT_MODEL, find_model
from paceline.model.gguf_file import is_gguf, open_gguf, whole_name
from paceline.model.spec import ModelError
from paceline.text.gguf_tokenizer import gguf_tokenizer
from paceline.text.synthetic import synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer


def load_tokenizer(source: str | Path | int) -> Tokenizer:
    """The tokenizer of a model, by path or name, or a synthetic one with that many tokens."""
    if isinstance(source, int):
        return synthetic_tokenizer(source)
    path = find_model(source)
    if is_gguf(path):
        return gguf_tokenizer(open_gguf(path))
    return _folder_tokenizer(path)


def model_name(model: str | None) -> str:
    """What clients call a model: its id, or the name of its file or folder."""
    if model is None:
        return DEFAULT_MODEL
    path = Path(model).expanduser()
    if not path.exists():
        return model  # a Hugging Face id, or the name of the default model
    return whole_name(path.name) if path.is_file() else path.resolve().name


def _folder_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json: save the model's fast tokenizer there, or use a GGUF file.")
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and a panic is not even that
        raise ModelError(f"{file} cannot be read ({error}): fetch it again.") from None
    core.no_truncation()
    core.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json")
    eos, bos = _token_id(core, config.get("eos_token")), _token_id(core, config.get("bos_token"))
    # The post-processor of tokenizer.json adds a BOS unless tokenizer_config.json disables it.
    prefix = core.encode("", add_special_tokens=True).ids
    if bos is None and prefix:
        bos = prefix[0]
    templates = _chat_templates(folder, config)
    return Tokenizer(
        core,
        eos_ids={*token_ids(generation.get("eos_token_id")), *(() if eos is None else (eos,))},
        bos_id=bos,
        add_bos=bool(config.get("add_bos_token", bool(prefix) and prefix[0] == bos)),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        eos_id=eos,
    )


def _token_id(core: tokenizers.Tokenizer, token: object) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return core.token_to_id(text) if isinstance(text, str) else None


def _chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The chat templates of a folder by name: most have `default` alone."""
    given = config.get("chat_template")
    found = (
        {item.get("name"): item.get("template") for item in given} if isinstance(given, list) else {"default": given}
    )
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    found |= {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    return {name: template for name, template in found.items() if isinstance(template, str)}


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch it again.") from None
    return value if isinstance(value, dict) else {}
