"""WordLevel, WordPiece, Unigram and BPE tokenizers decode as the library does, whole and one token at a time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tokenizers
from corpus import strings
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from paceline.model.spec import ModelError
from paceline.request import InvalidRequest
from paceline.text.detokenize import Detokenizer
from paceline.text.tokenizer import Tokenizer

SPECIAL = ["[UNK]", "[EOS]"]
TEXTS = [*strings(200), "It's, isn't it? We 're here ! I do not know . They 've said ' so ' .", "a </w> b"]


def word_level(decoder: Any) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))  # type: ignore[call-arg, unused-ignore]
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator(TEXTS, trainers.WordLevelTrainer(vocab_size=300, special_tokens=SPECIAL))
    core.decoder = decoder
    return core


def word_piece(decoder: Any) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg, unused-ignore]
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL))
    core.decoder = decoder
    core.add_tokens(["n't", "'s", "do not", "'"])
    return core


def unigram(decoder: Any) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="[UNK]")
    core.train_from_iterator(TEXTS, trainer)
    core.decoder = decoder
    core.add_tokens(["▁▁▁", "a▁b"])
    return core


def suffix_bpe(decoder: Any) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, end_of_word_suffix="</w>")
    core.train_from_iterator(TEXTS, trainer)
    core.decoder = decoder
    core.add_tokens(["a</w>b", "</w>"])
    return core


CORES: dict[str, Any] = {
    "WordLevel": lambda: word_level(None),
    "WordLevel, WordPiece": lambda: word_level(decoders.WordPiece()),
    "WordPiece": lambda: word_piece(decoders.WordPiece()),
    "WordPiece, no cleanup": lambda: word_piece(decoders.WordPiece(cleanup=False)),
    "Unigram, Metaspace": lambda: unigram(decoders.Metaspace()),
    "Unigram, Metaspace never": lambda: unigram(decoders.Metaspace(prepend_scheme="never")),
    "Unigram, Metaspace first": lambda: unigram(decoders.Metaspace(prepend_scheme="first")),
    "Unigram, Replace, Fuse": lambda: unigram(decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])),
    "Unigram, Replace, Strip": lambda: unigram(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    ),
    "BPE, suffix": lambda: suffix_bpe(decoders.BPEDecoder()),
    "BPE, none": lambda: suffix_bpe(None),
}


@cache
def made(name: str) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    core = CORES[name]()
    return core, Tokenizer(core, eos_ids=(1,))


def streamed(ours: Tokenizer, groups: list[list[int]], **options: bool) -> str:
    stream = Detokenizer(ours, **options)
    return "".join(stream.push(group) for group in groups) + stream.flush()


@given(data=st.data(), name=st.sampled_from(list(CORES)), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_ids_decode_as_the_library_decodes_them(data: st.DataObject, name: str, skip: bool) -> None:
    core, ours = made(name)
    last = st.integers(ours.vocab_size - 4, ours.vocab_size - 1)  # the added tokens, drawn more often
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3) | last, max_size=14))
    theirs = core.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids, skip_special=skip) == theirs
    assert streamed(ours, [[index] for index in ids], skip_special=skip, at_start=True) == theirs
    cut = data.draw(st.integers(0, len(ids)))
    assert streamed(ours, [ids[:cut], [], ids[cut:]], skip_special=skip, at_start=True) == theirs
    # An output continues a prompt: its text is what it adds to the prompt's.
    words = (index for index in range(2, 50) if core.id_to_token(index).isalnum())  # not ##s or s</w>
    before = next(words)
    whole, prompt = core.decode([before, *ids], skip_special_tokens=skip), core.decode([before])
    assert streamed(ours, [[index] for index in ids], skip_special=skip) == whole[len(prompt) :]


@pytest.mark.parametrize("name", CORES)
def test_text_is_encoded_and_streamed_back(name: str) -> None:
    core, ours = made(name)
    for text in TEXTS[:60]:
        ids = ours.encode(text, add_special=False)
        assert ids == core.encode(text, add_special_tokens=False).ids
        assert streamed(ours, [[index] for index in ids], at_start=True) == core.decode(ids)


def test_special_tokens_have_no_space_in_a_chat_template() -> None:
    core, _ = made("WordPiece")
    ours = Tokenizer(core, eos_ids=(1,), chat_template="{{ messages[0].content }}{{ eos_token }}")
    assert ours.render_chat([{"role": "user", "content": "hi"}]).text == "hi[EOS]"


def test_text_is_held_back_only_where_the_next_token_matters() -> None:
    core, ours = made("BPE, suffix")
    ids = ours.encode("the man", add_special=False)
    stream = Detokenizer(ours, at_start=True)
    assert not any(stream.push([index]).endswith(" ") for index in ids) and stream.flush() == ""
    assert core.decode(ids) == "the man"


@pytest.mark.parametrize(
    "decoder",
    [decoders.CTC(), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])],
    ids=["CTC", "Strip after Fuse"],
)
def test_a_decoder_that_depends_on_more_is_refused(decoder: Any) -> None:
    with pytest.raises(ModelError, match=r"^tokenizer.json has the decoder (CTC|Fuse, Strip), which is not supported"):
        Tokenizer(word_level(decoder))


def test_a_text_that_the_tokenizer_cannot_encode_is_an_invalid_request() -> None:
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = Tokenizer(core)
    assert ours.encode("a b") == [0, 1]
    for encode in (ours.encode, lambda text: ours.encode_batch([text])):
        with pytest.raises(InvalidRequest, match="cannot be encoded"):
            encode("a c")
