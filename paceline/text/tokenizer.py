"""Text to token ids and back.

Encoding is the `tokenizers` library's. Decoding is ours, and deliberately simple: every token is a fixed
run of bytes (`token_bytes`), a text is the bytes of its tokens read as UTF-8. That is true of both kinds
of vocabulary we support, byte-level BPE and SentencePiece with byte fallback, and it is what makes
decoding one token at a time exact (see `detokenize.py`). A tokenizer whose decoder does anything else is
refused at load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paceline.model.gguf_file import is_gguf, open_gguf
from paceline.model.registry import token_ids
from paceline.model.spec import ModelError
from paceline.request import InvalidRequest
from paceline.text.chat import ChatTemplate

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary, as GPT-2 chose them: printable bytes
    stand for themselves, the others for characters from 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_level_alphabet()
_FOREIGN = 0x10000  # no byte: what is below 256 and not in the alphabet
_BYTES = dict.fromkeys(range(256), _FOREIGN) | {ord(character): byte for character, byte in _ALPHABET.items()}


class _Bytes(dict[int, bytes]):
    """By id, computed when first asked for."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, index: int) -> bytes:
        found = self[int(index)] = self._compute(int(index))
        return found


class Tokenizer:
    """The vocabulary of one model, its special tokens and its chat template. Safe to use from several
    threads."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        eos_id: int | None = None,
    ) -> None:
        """`eos_ids` all end an answer; `eos_id` is the one that templates call eos_token."""
        self._core = core
        self._plain: tokenizers.Tokenizer | None = None  # made on first use: reads special tokens as text
        self._bytes = _Bytes(self._compute_bytes)
        self._byte_level, self.strips_leading_space = _decoder_kind(core)
        added = core.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.add_bos = add_bos and bos_id is not None
        self.chat: ChatTemplate | None = None
        if chat_template:
            self.chat = ChatTemplate(
                chat_template,
                bos_token=self._text_of(bos_id),
                eos_token=self._text_of(min(self.eos_ids, default=None) if eos_id is None else eos_id),
            )

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> list[int]:
        """The ids of `text`. `add_special` puts a BOS in front if the model wants one; a text that came
        out of a chat template has it already. Without `allow_special`, text such as <|im_end|> is only
        text."""
        _check_text(text)
        core = self._core if allow_special else self._without_special()
        ids = core.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if add_special and self.add_bos and self.bos_id is not None else ids

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """As `encode`, for many texts at once, on all cores."""
        for text in texts:
            _check_text(text)
        prefix = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        found = self._core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [prefix + encoding.ids for encoding in found]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a conversation, ready for the model's answer; `options` as in `ChatTemplate.render`."""
        return self.encode(self.render_chat(messages, **options), add_special=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if self.chat is None:
            raise InvalidRequest("messages were given, but this model has no chat template: send a plain prompt.")
        return self.chat.render(messages, **options)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD. `at_start`: the ids begin a text, so
        the space that SentencePiece puts before the first word is dropped."""
        skip = self.special_ids if skip_special else frozenset()
        data = self.bytes_of(ids, skip)
        if at_start and self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, index: int) -> bytes:
        """What one token adds to a text. An id beyond the vocabulary adds nothing: models are often
        padded."""
        return self._bytes[index]

    def bytes_of(self, ids: Iterable[int], skip: frozenset[int] = frozenset()) -> bytes:
        """What all of them add, without those to skip."""
        known = self._bytes
        return b"".join([known[index] for index in ids if index not in skip])

    def to_json(self) -> str:
        """As tokenizer.json has it."""
        return self._core.to_str()

    def token_id(self, token: str) -> int | None:
        """The id of a token given as the vocabulary spells it."""
        found = self._core.token_to_id(token)
        return None if found is None else int(found)

    def check_fits(self, vocab_size: int) -> None:
        """Raises ModelError if text could turn into an id that a model of this vocabulary does not have."""
        if self.vocab_size > vocab_size:
            raise ModelError(
                f"the tokenizer has {self.vocab_size} tokens and the model only {vocab_size}: "
                "they are of different models."
            )

    def _compute_bytes(self, index: int) -> bytes:
        token = self._core.id_to_token(index) if index >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            # Added tokens are plain text; where one happens to be spelt in the alphabet it reads the same.
            try:
                return token.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode("utf-8")
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode("utf-8")

    def _text_of(self, index: int | None) -> str:
        return "" if index is None else self.token_bytes(index).decode("utf-8", "replace")

    def _without_special(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            plain = tokenizers.Tokenizer.from_str(self._core.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text has a lone surrogate {text[error.start]!r} at character {error.start}: send valid Unicode."
        ) from None


def _decoder_kind(core: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether the vocabulary is byte-level, and whether decoding drops a leading space."""
    # Its pickled state is its JSON; `core.to_str()` would write out the whole vocabulary.
    decoder = json.loads(core.decoder.__getstate__()) if core.decoder else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    if "Metaspace" in kinds:
        return False, steps[kinds.index("Metaspace")].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return False, any(step.get("type") == "Strip" and step.get("start") for step in steps)
    raise ModelError(f"tokenizer.json has the decoder {kinds}: supported are byte-level BPE and SentencePiece BPE.")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model at `path`: a Hugging Face folder or a GGUF file."""
    path = Path(path)
    if is_gguf(path):
        from paceline.text.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(open_gguf(path))
    return _folder_tokenizer(path)


def _folder_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json: save the model's fast tokenizer there, or use a GGUF file.")
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} cannot be read ({error}): fetch it again.") from None
    core.no_truncation()
    core.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json")
    eos, bos = _token_id(core, config.get("eos_token")), _token_id(core, config.get("bos_token"))
    # The post-processor of tokenizer.json adds a BOS unless tokenizer_config.json says otherwise.
    prefix = core.encode("", add_special_tokens=True).ids
    if bos is None and prefix:
        bos = prefix[0]
    return Tokenizer(
        core,
        eos_ids={*token_ids(generation.get("eos_token_id")), *(() if eos is None else (eos,))},
        bos_id=bos,
        add_bos=bool(config.get("add_bos_token", bool(prefix) and prefix[0] == bos)),
        chat_template=_chat_template(folder, config),
        eos_id=eos,
    )


def _token_id(core: tokenizers.Tokenizer, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return core.token_to_id(text) if isinstance(text, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch it again.") from None
    return value if isinstance(value, dict) else {}
