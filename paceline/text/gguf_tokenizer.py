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
# Letters of scripts with cases, as DeepSeek's regular expression lists them; escaped, since some look like others.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_MARKS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Steps that are built into the library; others are regular expressions.
_GPT2, _DIGITS, _NUMBERS, _PUNCTUATION = "gpt2", "digits", "numbers", "punctuation"

# pre: (steps, whether a whole word in the vocabulary skips merging, whether to add a BOS if the file does not specify)
_PRE: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    "gpt-2": ((_GPT2,), False, False),
    "smollm": ((_DIGITS, _GPT2), False, False),
    "starcoder": ((_DIGITS, _GPT2), False, False),
    "refact": ((_DIGITS, _GPT2), False, False),  # Granite 3
    "command-r": ((_DIGITS, _GPT2), False, False),
    "olmo": ((_GPT2,), False, False),
    "dbrx": ((_WORDS % r"\p{N}{1,3}",), False, False),  # OLMo 2, Phi-4
    "gpt-4o": ((_O200K,), False, False),  # Phi-4-mini
    "llama-bpe": ((_WORDS % r"\p{N}{1,3}",), True, True),
    "llama3": ((_WORDS % r"\p{N}{1,3}",), True, True),
    "llama-v3": ((_WORDS % r"\p{N}{1,3}",), True, True),
    "qwen2": ((_WORDS % r"\p{N}",), False, False),
    "deepseek-r1-qwen": ((_WORDS % r"\p{N}",), False, False),
    "tekken": ((_TEKKEN,), True, True),
    "deepseek-llm": ((r"[\r\n]", rf"\s?[{_CASED}]+", _MARKS, r"\s+$", _CJK, _DIGITS), False, False),
    "deepseek-coder": ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGITS), False, False),
    "falcon": ((_PUNCTUATION, _GPT2, _NUMBERS, "[0-9][0-9][0-9]"), False, False),
}
_COMPOSED = frozenset(("qwen2", "deepseek-r1-qwen", "command-r"))  # text in NFC

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
    steps, ignore_merges, default_bos = _PRE[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    core = _core(file, tokens, merges, ignore_merges=ignore_merges)
    splits = [_split(step) for step in steps]
    if _GPT2 not in steps:  # which does it, too
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if pre in _COMPOSED:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(splits)
    core.decoder = decoders.ByteLevel()
    return core, default_bos


def _split(step: str) -> pre_tokenizers.PreTokenizer:
    if step == _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if step in (_DIGITS, _NUMBERS):
        return pre_tokenizers.Digits(individual_digits=step == _DIGITS)
    if step == _PUNCTUATION:
        return pre_tokenizers.Punctuation(behavior="contiguous")
    return pre_tokenizers.Split(Regex(step), behavior="isolated")


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
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    core.normalizer = normalizers.Sequence(spaces)
    core.decoder = decoders.Sequence(steps)
    return core
