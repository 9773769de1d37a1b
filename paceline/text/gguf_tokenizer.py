"""The tokenizer inside a GGUF file.

The file contains the vocabulary, but only the name (`pre`) of the rule that splits text into words before merging. The
table below has the rules of the known names. An unknown name is refused: a wrong rule gives slightly wrong tokens and,
without any error, worse outputs.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from paceline.model.gguf_file import GGUFFile
from paceline.model.spec import ModelError
from paceline.text.tokenizer import Tokenizer

# Token types in GGUF files.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "gpt2", "digits"  # rules built into the library

# pre: (rule, whether a whole word in the vocabulary skips merging, whether to add a BOS if the file does not specify)
_PRE: dict[str, tuple[str, bool, bool]] = {
    "gpt-2": (_GPT2, False, False),
    "smollm": (_DIGITS, False, False),
    "starcoder": (_DIGITS, False, False),
    "refact": (_DIGITS, False, False),  # Granite 3
    "olmo": (_GPT2, False, False),
    "dbrx": (_WORDS % r"\p{N}{1,3}", False, False),  # OLMo 2, Phi-4
    "gpt-4o": (_O200K, False, False),  # Phi-4-mini
    "llama-bpe": (_WORDS % r"\p{N}{1,3}", True, True),
    "llama3": (_WORDS % r"\p{N}{1,3}", True, True),
    "llama-v3": (_WORDS % r"\p{N}{1,3}", True, True),
    "qwen2": (_WORDS % r"\p{N}", False, False),
    "deepseek-r1-qwen": (_WORDS % r"\p{N}", False, False),
    "tekken": (_TEKKEN, True, True),
}

# The special tokens of Phi-3's SentencePiece vocabulary take the white space that follows them, such as the newlines of
# its chat template. Files do not say it. These are the exceptions.
_PHI3_KEEPS_SPACES = frozenset(("<unk>", "<s>", "<|endoftext|>"))

# A file names one end token, but chat models have several. These are their names.
_END_TOKENS = frozenset(
    (
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "</s>",
        "<end_of_turn>",
    )
)
# gpt-oss ends its turn with one of these. With <|end|> it ends a message, and begins the next one.
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
_HARMONY_END = "<|end|>"


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece (`llama`)."""
    kind = file.get("tokenizer.ggml.model")
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    types: list[int] = file.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens but {len(types)} token types: fetch it again.")
    if kind == "gpt2":
        core, default_bos = _byte_level(file, tokens)
    elif kind == "llama":
        core, default_bos = _sentence_piece(file, tokens, types), True
    else:
        raise ModelError(f"tokenizer.ggml.model is {kind!r} in {file.path}: supported are gpt2 (BPE) and llama (SPM).")
    keeps_spaces = frozenset(tokens) if file.architecture != "phi3" or kind != "llama" else _PHI3_KEEPS_SPACES
    core.add_special_tokens(_added(tokens, types, _CONTROL, keeps_spaces, special=True))
    core.add_tokens(_added(tokens, types, _USER_DEFINED, keeps_spaces, special=False))
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    names = _END_TOKENS | _HARMONY_ENDS
    by_name = [index for index, token in enumerate(tokens) if types[index] == _CONTROL and token in names]
    not_an_end = tokens.index(_HARMONY_END) if {*_HARMONY_ENDS, _HARMONY_END} <= set(tokens) else None
    return Tokenizer(
        core,
        eos_ids={index for index in (*ends, *by_name) if index not in (None, not_an_end)},
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        add_bos=bool(file.metadata.get("tokenizer.ggml.add_bos_token", default_bos)),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        eos_id=ends[0],
    )


def _added(
    tokens: list[str], types: list[int], kind: int, keeps_spaces: frozenset[str], *, special: bool
) -> list[AddedToken]:
    """keeps_spaces: tokens that do not take the white space that follows them."""
    return [
        AddedToken(token, special=special, normalized=False, rstrip=token not in keeps_spaces)
        for token, found in zip(tokens, types, strict=True)
        if found == kind and token
    ]


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    pre = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE:
        raise ModelError(
            f"tokenizer.ggml.pre is {pre!r} in {file.path}, which is not supported: use the model's "
            f"Hugging Face folder, or a file with one of {', '.join(_PRE)}."
        )
    rule, ignore_merges, default_bos = _PRE[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    core = _core(file, tokens, merges, ignore_merges=ignore_merges)
    if rule in (_GPT2, _DIGITS):
        words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        steps = [pre_tokenizers.Digits(individual_digits=True), words] if rule == _DIGITS else [words]
    else:
        split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if "qwen" in pre:
        core.normalizer = normalizers.NFC()  # type: ignore[assignment, unused-ignore]
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[assignment, unused-ignore]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
    return core, default_bos


def _core(file: GGUFFile, tokens: list[str], merges: list[Any], **options: Any) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file.path} has an invalid vocabulary ({error}): fetch it again.") from None


def _sentence_piece(file: GGUFFile, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """SentencePiece merges the pair whose result has the highest score: BPE with merges ordered by score."""
    scores: list[float] = file.get("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens but {len(scores)} scores: fetch it again.")
    pieces = {token: index for index, token in enumerate(tokens) if types[index] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    merges: list[tuple[float, tuple[str, str]]] = []
    for piece, index in pieces.items():
        cuts = range(1, len(piece))
        known = [(left, right) for cut in cuts if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces]
        if len(known) > 1:
            known.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        merges.extend([(scores[index], pair) for pair in known])
    merges.sort(key=itemgetter(0), reverse=True)  # stable: equal scores stay in the order of the vocabulary
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    core = _core(
        file,
        tokens,
        [pair for _, pair in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    core.normalizer = normalizers.Sequence(spaces)  # type: ignore[assignment, unused-ignore]
    core.decoder = decoders.Sequence(steps)  # type: ignore[assignment, unused-ignore]
    return core
