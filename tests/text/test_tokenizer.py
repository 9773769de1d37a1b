"""Tokenizers against independent implementations."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import tokenizers
from corpus import strings
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from paceline.model.gguf_file import open_gguf
from paceline.model.shapes import SHAPES
from paceline.model.spec import ModelError
from paceline.request import InvalidRequest
from paceline.text import synthetic
from paceline.text.load import load_tokenizer
from paceline.text.synthetic import MIN_VOCAB_SIZE, synthetic_tokenizer
from paceline.text.tokenizer import Tokenizer, byte_level_alphabet
from tests.lazy import Lazy

transformers = Lazy("transformers")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TO_CHARACTER = {byte: character for character, byte in byte_level_alphabet().items()}


class NaiveBPE:
    """Byte-level BPE as in its paper: merge the pair of lowest rank until there is none."""

    def __init__(self, tokens: list[str], merges: list[str], rules: list[str]) -> None:
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        self.rules = rules

    def encode(self, text: str) -> list[int]:
        pieces = [text] if text else []
        for rule in self.rules:
            pieces = [part for piece in pieces for part in self.cut(rule, piece)]
        return [index for piece in pieces for index in self.merge(piece)]

    @staticmethod
    def cut(rule: str, piece: str) -> list[str]:
        found, end = [], 0
        for match in regex.finditer(rule, piece):
            found += [piece[end : match.start()], match.group()]
            end = match.end()
        return [part for part in [*found, piece[end:]] if part]

    def merge(self, piece: str) -> list[int]:
        word = [TO_CHARACTER[byte] for byte in piece.encode()]
        while len(word) > 1:
            pairs = list(itertools.pairwise(word))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 60))
            if best not in self.ranks:
                break
            joined, index = [], 0
            while index < len(word):
                if tuple(word[index : index + 2]) == best:
                    joined.append("".join(best))
                    index += 2
                else:
                    joined.append(word[index])
                    index += 1
            word = joined
        return [self.ids[part] for part in word]


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def test_smollm2_equals_naive_bpe_on_a_thousand_strings(smollm2: Tokenizer, smollm2_path: Path) -> None:
    metadata = open_gguf(smollm2_path).metadata
    naive = NaiveBPE(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], [r"\p{N}", GPT2])
    texts = strings()
    assert len(texts) == 1000
    for text in texts:
        found = smollm2.encode(text)
        assert found == naive.encode(text), text
        assert smollm2.decode(found) == text
    assert smollm2.encode_batch(texts[:50]) == [smollm2.encode(text) for text in texts[:50]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_equals_transformers_on_the_same_file(smollm2: Tokenizer, smollm2_path: Path) -> None:
    theirs: Any = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    # transformers does not read the file's word rule and so does not split off digits, as the model was
    # trained to.
    without_digits = [text for text in strings() if not regex.search(r"\p{N}", text)]
    assert len(without_digits) > 300
    for text in without_digits:
        assert smollm2.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.encode("a<|im_end|>b") == [81, 2, 82]
    assert smollm2.decode([81, 2, 82]) == "ab"
    assert smollm2.decode([81, 2, 82], skip_special=False) == "a<|im_end|>b"
    assert 2 in smollm2.eos_ids
    assert smollm2.add_bos is False
    assert smollm2.vocab_size == 49152


def test_special_tokens_in_plain_text_can_be_only_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a<|im_end|>b", allow_special=False)
    assert not smollm2.special_ids & set(ids)
    assert smollm2.decode(ids) == "a<|im_end|>b"


def test_ids_beyond_the_vocabulary_decode_to_nothing(smollm2: Tokenizer) -> None:
    assert smollm2.decode([81, 60_000, -3, 82]) == "ab"


def test_smollm2_chat(smollm2: Tokenizer) -> None:
    text = smollm2.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]).text
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert smollm2.decode(ids, skip_special=False).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_decoding_equals_the_library(smollm2: Tokenizer) -> None:
    rng = np.random.default_rng(3)
    # Most random sequences break characters at token borders, which is the point.
    broken = 0
    for _ in range(1000):
        ids = rng.integers(0, 49152, rng.integers(1, 12)).tolist()
        if rng.random() < 0.5:
            raw = [smollm2.token_id(TO_CHARACTER[byte]) for byte in rng.integers(0x70, 256, 6).tolist()]
            ids = [index for index in raw if index is not None] + ids
        for skip in (True, False):
            found = smollm2.decode(ids, skip_special=skip)
            assert found == smollm2._core.decode(ids, skip_special_tokens=skip)
        broken += "\ufffd" in found
    assert broken > 300


def test_lone_surrogate_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"lone surrogate '\\ud800' at character 2"):
        smollm2.encode("ab\ud800")
    with pytest.raises(InvalidRequest, match=r"lone surrogate"):
        smollm2.encode_batch(["fine", "\udfff"])


def write_gguf(path: Path, model: str, tokens: list[str], arch: str = "llama", **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for name, value in metadata.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def trained_bpe(size: int = 700) -> tuple[list[str], list[str]]:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(strings(400), trainer)
    saved = json.loads(core.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].get)
    return tokens, [" ".join(pair) for pair in saved["merges"]]


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pre", "rules"),
    [
        ("gpt-2", [GPT2]),
        ("smollm", [r"\p{N}", GPT2]),
        ("llama-bpe", [LLAMA3]),
        ("qwen2", [LLAMA3.replace("{1,3}", "")]),
        ("dbrx", [LLAMA3]),
        ("refact", [r"\p{N}", GPT2]),
        ("gpt-4o", [O200K]),
    ],
)
def test_word_rules_of_gguf_files_equal_naive_bpe(pre: str, rules: list[str], tmp_path: Path) -> None:
    tokens, merges = trained_bpe()
    path = write_gguf(tmp_path / "t.gguf", "gpt2", tokens, pre=pre, merges=merges)
    ours, naive = load_tokenizer(path), NaiveBPE(tokens, merges, rules)
    for text in strings():
        if pre == "qwen2":
            text = unicodedata.normalize("NFC", text)  # Qwen composes accents before it splits
        expected = naive.encode(text)
        found = ours.encode(text, add_special=False)
        if pre != "llama-bpe":
            assert found == expected, text
        # A whole word of the vocabulary skips merging in llama-bpe: never more tokens than merging gives.
        assert len(found) <= len(expected)
        assert ours.decode(found) == text


def isolated(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
EACH_DIGIT = {"type": "Digits", "individual_digits": True}
CJK = isolated("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
# `pre_tokenizer` in tokenizer.json of deepseek-coder-6.7b, c4ai-command-r-v01 and falcon-7b.
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "deepseek-coder": [
        isolated("[\r\n]"), isolated(r"\s?\p{L}+"), isolated(r"\s?\p{P}+"), CJK, EACH_DIGIT, BYTES,
    ],
    "command-r": [EACH_DIGIT, {**BYTES, "use_regex": True}],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        {**BYTES, "use_regex": True},
        {"type": "Digits", "individual_digits": False},
        isolated("[0-9][0-9][0-9]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("pre", PUBLISHED)
def test_word_rules_of_gguf_files_equal_the_published_ones(pre: str, tmp_path: Path) -> None:
    tokens, merges = trained_bpe()
    ours = load_tokenizer(write_gguf(tmp_path / "t.gguf", "gpt2", tokens, pre=pre, merges=merges))
    published = json.loads(tokenizers.Tokenizer(models.BPE(dict(zip(tokens, range(700), strict=True)), [])).to_str())
    published["model"]["merges"] = merges
    published["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PUBLISHED[pre]}
    published["normalizer"] = {"type": "NFC"} if pre == "command-r" else None
    theirs = tokenizers.Tokenizer.from_str(json.dumps(published))
    hard = [
        "price: 12,345.67",
        "12½3456",
        "м and мир 999",
        "x²y",
        "a\r\nb",
        "don't!!! stop",
        "你好 wörld",
        "e\u0301",
        "$5+3",
    ]
    for text in [*strings(), *hard]:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids, text


def test_words_of_deepseek_llm_are_cased_letters_marks_and_chinese(tmp_path: Path) -> None:
    """Checked against sets of characters: the published expression lists them as ranges."""
    tokens, merges = trained_bpe()
    path = write_gguf(tmp_path / "t.gguf", "gpt2", tokens, pre="deepseek-llm", merges=merges)
    core: Any = load_tokenizer(path)._core.pre_tokenizer

    def words(text: str) -> list[str]:
        return [text[start:end] for _, (start, end) in core.pre_tokenize_str(text)]

    assert words("Hello World, it's 2026!\n你好 мир Ωmega") == [
        "Hello", " World", ",", " it", "'", "s", " ", "2", "0", "2", "6", "!", "\n", "你好", " мир", " Ω", "mega",
    ]  # fmt: skip
    assert words(" Wörld") == [" W", "ö", "rld"]  # the range of marks :-~ includes the letters of ASCII
    assert words("a  b   ") == ["a", " ", " b", "   "]  # white space at the end is one word
    for character in "µ\u0370\u052f\U00010400\U0001e943":
        assert words(f" я{character}я") == [f" я{character}я"]
    for character in "\u01bb\u02b0\u0294\u0561\u05d0":  # letters without case, or not listed
        assert words(f"я{character}я") == ["я", character, "я"]


def test_qwen_composes_accents_and_others_leave_them(tmp_path: Path) -> None:
    tokens, merges = trained_bpe()
    for pre, composes in (("qwen2", True), ("llama-bpe", False)):
        ours = load_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", "gpt2", tokens, pre=pre, merges=merges))
        assert (ours.encode("e\u0301") == ours.encode("\u00e9")) is composes


def test_whole_word_of_the_vocabulary_skips_merging_where_the_model_does_so(tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "ab", "abc"]  # no merge leads to abc
    for pre, expected in (("llama-bpe", [4]), ("gpt-2", [3, 2])):
        path = write_gguf(tmp_path / f"{pre}.gguf", "gpt2", tokens, pre=pre, merges=["a b"])
        assert load_tokenizer(path).encode("abc") == expected


def test_unknown_word_rule_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", "gpt2", ["a", "b"], pre="marvin", merges=["a b"])
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre is 'marvin'.*not supported.*smollm"):
        load_tokenizer(path)
    path = write_gguf(tmp_path / "u.gguf", "t5", ["a", "b"])
    with pytest.raises(ModelError, match=r"tokenizer.ggml.model is 't5'.*supported are gpt2 .*llama"):
        load_tokenizer(path)
    path = write_gguf(tmp_path / "v.gguf", "gpt2", ["a", "b"], pre="gpt-2", merges=["x y"])
    with pytest.raises(ModelError, match=r"invalid vocabulary"):
        load_tokenizer(path)


@pytest.mark.parametrize(("written", "expected"), [(True, [3, 0, 1]), (False, [0, 1]), (None, [3, 0, 1])])
def test_add_bos_of_gguf_files_is_honoured(tmp_path: Path, written: bool | None, expected: list[int]) -> None:
    options: dict[str, Any] = {} if written is None else {"add_bos_token": written}
    tokens = ["a", "b", "</s>", "<s>", "bb"]
    path = write_gguf(
        tmp_path / "t.gguf",
        "gpt2",
        tokens,
        pre="llama-bpe",
        merges=["b b"],
        bos_token_id=3,
        token_type=[1, 1, 3, 3, 1],
        **options,
    )
    ours = load_tokenizer(path)
    assert ours.encode("ab") == expected
    assert ours.encode("ab", add_special=False) == [0, 1]
    assert ours.encode_batch(["ab"]) == [expected]


def sentence_piece_file(folder: Path, **options: Any) -> tuple[Path, dict[str, float]]:
    """A small SentencePiece vocabulary: control and byte tokens, characters, and pieces in order of score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *([6] * 256)]
    scores = [0.0] * len(tokens)
    pieces = [
        "▁t",
        "he",
        "▁the",
        "in",
        "▁a",
        "er",
        "ing",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁world",
        "th",
        "the",
        "▁▁",
        "▁▁▁▁",
    ]
    characters = list("▁abcdefghijklmnopqrstuvwxyzTH.,é")
    for rank, piece in enumerate(pieces + characters):
        tokens.append(piece)
        types.append(1)
        scores.append(-float(rank))
    found = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    path = write_gguf(
        folder / "spm.gguf",
        "llama",
        tokens,
        token_type=types,
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return path, found


def naive_sentence_piece(text: str, scores: dict[str, float], prefix: bool) -> list[str]:
    """Merge the neighbours whose result scores highest, leftmost first, until none is a piece."""
    text = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    pieces = list(text)
    while True:
        joined = [(scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not joined:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found = []
    for piece in pieces:
        found += [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return found


def test_special_tokens_of_phi3_take_the_white_space_that_follows(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>", "▁", "H", "i", "Hi", "\n"]
    types, scores = [2, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1], [0.0] * 9 + [-1.0, 0.0]
    for arch, between in (("phi3", []), ("llama", [10])):
        options = {"token_type": types, "scores": scores, "add_space_prefix": False, "add_bos_token": False}
        path = write_gguf(tmp_path / f"{arch}.gguf", "llama", tokens, arch, **options)
        ours = load_tokenizer(path)
        assert ours.encode("<|user|>\nHi<|end|>\n") == [4, *between, 9, 5, *between]
        assert ours.encode("<|endoftext|>\nHi") == [3, 10, 9]


def test_end_of_a_message_is_not_the_end_of_a_turn_of_gpt_oss(tmp_path: Path) -> None:
    tokens = ["<|endoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|start|>", "a", "aa"]
    options = {
        "token_type": [3, 3, 3, 3, 3, 1, 1],
        "merges": ["a a"],
        "pre": "gpt-4o",
        "eos_token_id": 1,
        "eot_token_id": 3,
    }
    assert load_tokenizer(write_gguf(tmp_path / "a.gguf", "gpt2", tokens, "gpt-oss", **options)).eos_ids == {0, 1, 2}
    others = ["<|endoftext|>", "x", "y", *tokens[3:]]
    path = write_gguf(tmp_path / "b.gguf", "gpt2", others, "phi3", **options)
    assert load_tokenizer(path).eos_ids == {0, 1, 3}, "of other models it is"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_equals_a_naive_one(tmp_path: Path, prefix: bool) -> None:
    path, scores = sentence_piece_file(tmp_path, add_space_prefix=prefix)
    ours = load_tokenizer(path)
    words = [
        "the",
        "world",
        "a",
        "there",
        "thing",
        "Th",
        "ing",
        " ",
        "  ",
        "    ",
        "é",
        "日本",
        "🎉",
        ".",
        "wworld",
        "\n",
    ]
    rng = np.random.default_rng(1)
    for _ in range(500):
        text = "".join(rng.choice(words) + rng.choice(["", " "]) for _ in range(rng.integers(0, 7)))
        expected = [ours.token_id(piece) for piece in naive_sentence_piece(text, scores, prefix)]
        found = ours.encode(text, add_special=False)
        assert found == expected, text
        assert ours.decode(found) == text
    assert ours.encode("a")[0] == ours.bos_id == 1
    assert ours.eos_ids == {2}


def saved_folder(folder: Path, *, template_adds_bos: bool, **config: Any) -> Path:
    tokens, merges = trained_bpe()
    vocab = {token: index for index, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(models.BPE(vocab, [tuple(merge.split(" ", 1)) for merge in merges]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if template_adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, **config})
    )
    return folder


@pytest.mark.parametrize(
    ("template_adds_bos", "config", "adds"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
    ],
)
def test_add_bos_of_folders_is_honoured(
    tmp_path: Path, template_adds_bos: bool, config: dict[str, Any], adds: bool
) -> None:
    ours = load_tokenizer(saved_folder(tmp_path, template_adds_bos=template_adds_bos, **config))
    assert ours.add_bos is adds
    assert (ours.encode("hi")[0] == ours.token_id("<s>")) is adds


def test_folder_tokenizer_equals_transformers(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    folder = saved_folder(
        tmp_path, template_adds_bos=True, chat_template=template, tokenizer_class="PreTrainedTokenizerFast"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert ours.eos_ids == {5, 9, ours.token_id("</s>")}
    for text in strings(300):
        assert ours.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": "Hé <b>"}, {"role": "assistant", "content": "ok"}]
    assert ours.render_chat(messages).text == theirs.apply_chat_template(messages, tokenize=False)
    (folder / "chat_template.jinja").write_text("a file wins")
    assert load_tokenizer(folder).render_chat(messages).text == "a file wins"


TEMPLATES = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]


@pytest.mark.parametrize("in_files", [False, True])
def test_the_tool_template_is_used_when_tools_are_given(tmp_path: Path, in_files: bool) -> None:
    folder = saved_folder(tmp_path, template_adds_bos=True, chat_template=None if in_files else TEMPLATES)
    if in_files:  # as newer versions of transformers save them
        (folder / "chat_template.jinja").write_text("plain")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools[0].name }}")
    ours, messages = load_tokenizer(folder), [{"role": "user", "content": "x"}]
    assert ours.render_chat(messages, tools=[{"name": "f"}]).text == "f"
    assert ours.render_chat(messages, tools=[]).text == ours.render_chat(messages).text == "plain"


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    core.decoder = decoders.CTC()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"has the decoder CTC, which is not supported: use a tokenizer with"):
        load_tokenizer(tmp_path)


def test_no_chat_template_is_a_clear_error(tmp_path: Path) -> None:
    ours = load_tokenizer(saved_folder(tmp_path, template_adds_bos=False))
    with pytest.raises(InvalidRequest, match=r"no chat template: send a prompt instead"):
        ours.render_chat([{"role": "user", "content": "x"}])


SYNTHETIC = {size: synthetic_tokenizer(size) for size in (259, 512, 49_152)}


@given(text=st.text(), size=st.sampled_from(sorted(SYNTHETIC)))
@settings(max_examples=150, deadline=None)
def test_synthetic_tokenizer_round_trips_any_text(text: str, size: int) -> None:
    ours = SYNTHETIC[size]
    ids = ours.encode(text)
    assert all(0 <= index < size for index in ids)
    assert ours.decode(ids, skip_special=False) == text


def test_synthetic_tokenizer_fits_every_named_shape() -> None:
    """Made for the largest of them, and for smaller ones above."""
    for name, spec in SHAPES.items():
        assert (spec.bos_id, spec.eos_ids) == (1, (2,)) and spec.vocab_size >= MIN_VOCAB_SIZE, name
    largest = max(spec.vocab_size for spec in SHAPES.values())
    for size in (*SYNTHETIC, largest):
        ours = SYNTHETIC.get(size) or synthetic_tokenizer(size)
        assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (size, 1, {2})
        ours.check_fits(size)
        assert all(ours.token_bytes(index) for index in range(0, size, 997))
    with pytest.raises(ModelError, match=r"tokens and the model only 300"):
        ours.check_fits(300)
    assert ours.render_chat([{"role": "user", "content": "Hi"}]).text.endswith("Hi<|im_end|>\n<|im_start|>assistant\n")


def test_synthetic_tokenizer_needs_an_id_for_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"vocab_size is 258: a synthetic tokenizer needs at least 259"):
        synthetic_tokenizer(258)
    monkeypatch.setattr(synthetic, "ascii_lowercase", "abc")  # with 26 letters, this takes more than 476,189 tokens
    assert synthetic_tokenizer(600).vocab_size == 600
    assert synthetic_tokenizer(600).token_bytes(599) == b"<|extra_599|>", "there are ids after all strings of letters"


def test_text_package_imports_no_torch() -> None:
    code = "import sys, paceline.text.stop, paceline.text.gguf_tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
