"""A tokenizer for random weights: any vocabulary size, any text, a chat template and an end token.

Ids 0 to 2 are special, then follow the 256 bytes, then strings of two, three and four letters. The bytes make every
text round-trip; the strings make an output of random ids readable and a prompt about as short as with a real tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from string import ascii_lowercase

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.model.spec import ModelError
from paceline.text.tokenizer import Tokenizer, byte_level_alphabet

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB_SIZE = len(_SPECIAL) + 256

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer with exactly the ids 0 to vocab_size - 1."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ModelError(
            f"vocab_size is {vocab_size}: a synthetic tokenizer needs at least {MIN_VOCAB_SIZE}, one id per byte and "
            "special token."
        )
    tokens = [*_SPECIAL, *sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)]
    merges = list(islice(_merges(), vocab_size - len(tokens)))
    tokens += [left + right for left, right in merges]
    # After all strings of four letters, the rest are names that no text encodes to.
    tokens += [f"<|extra_{index}|>" for index in range(len(tokens), vocab_size)]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(models.BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(_SPECIAL))
    return Tokenizer(core, eos_ids=(2,), bos_id=1, chat_template=CHATML)


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs to merge, shortest results first: two letters, a space and one or two letters, three letters, four."""
    pairs = ["".join(letters) for letters in product(ascii_lowercase, repeat=2)]
    yield from product(ascii_lowercase, repeat=2)
    yield from (("Ġ", letter) for letter in ascii_lowercase)
    yield from (("Ġ", pair) for pair in pairs)
    yield from ((pair, letter) for pair, letter in product(pairs, ascii_lowercase))
    yield from product(pairs, repeat=2)
