"""
A tokenizer here is a tokenizer.json of the `tokenizers` library, with a token that opens every
document and a <mask>. prepare.py trains one, or takes another model's.
"""

import json
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from errors import die

# The first ids of a tokenizer that we train, in this order.
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<pad>", "<mask>"]
SPECIAL_TOKENS += [f"<special_{i}>" for i in range(11)]

# What other people's tokenizers call the token that opens a document.
BOS_NAMES = ["<s>", "<|begin_of_text|>", "<|endoftext|>"]


class SpecialIds(NamedTuple):
    bos: int  # <s> opens every document
    mask: int  # <mask> hides a token
    all: tuple[int, ...]  # these and the other special tokens: never masked


def find_special_ids(tokenizer_json):
    """Return the special ids of a tokenizer, given the text of its tokenizer.json."""
    ids = {}
    for token in json.loads(tokenizer_json).get("added_tokens", []):
        if token["special"]:
            ids[token["content"]] = token["id"]
    names = [name for name in BOS_NAMES if name in ids]
    if not names or "<mask>" not in ids:
        raise ValueError(f"no <mask> among its special tokens, or none of {', '.join(BOS_NAMES)}")
    return SpecialIds(ids[names[0]], ids["<mask>"], tuple(sorted(ids.values())))


# ---- reading -------------------------------------------------------------------------------------
def parse_tokenizer(tokenizer_json):
    """Return the tokenizer that the text of a tokenizer.json describes, or raise a ValueError.

    It encodes the whole of a text, whatever its length, and treats a literal <mask> as text.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it is written in Rust, and its panics have their own type
        raise ValueError(f"not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def with_mask_token(tokenizer_json):
    """Return the tokenizer.json with a special token <mask>, added as the next id if missing."""
    tokenizer = parse_tokenizer(tokenizer_json)
    if any(token.content == "<mask>" for token in tokenizer.get_added_tokens_decoder().values()):
        return tokenizer_json
    vocab = tokenizer.get_vocab()
    tokenizer.add_special_tokens(["<mask>"])
    # `tokenizers` counts the tokens to find a new id, which is wrong if some ids are unused.
    if tokenizer.token_to_id("<mask>") != vocab.get("<mask>", 1 + max(vocab.values())):
        raise ValueError("some of its ids are unused, so no <mask> can be added")
    return tokenizer.to_str(pretty=True)


def read_tokenizer(path):
    """Return the tokenizer.json at `path`, or in that folder, with a <mask>."""
    path = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
    try:
        tokenizer_json = with_mask_token(path.read_text("utf-8"))
        find_special_ids(tokenizer_json)  # refuses one without <s>
    except Exception as error:  # a damaged file can raise anything
        die(f"{path} is not a usable tokenizer.json: {type(error).__name__}: {error}")
    return tokenizer_json


# ---- training ------------------------------------------------------------------------------------
def new_tokenizer():
    """Return an empty byte-level BPE; without a normalizer, decode(encode(text)) == text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts, vocab_size):
    """Return the tokenizer.json of a BPE. Its ids: special tokens, the 256 bytes, the merges."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = new_tokenizer()
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def is_ours(tokenizer):
    """Return whether a tokenizer was made by train_tokenizer, whatever its vocabulary."""
    ours = new_tokenizer()
    ours.add_special_tokens(SPECIAL_TOKENS)
    configs = [json.loads(ours.to_str()), json.loads(tokenizer.to_str())]
    for config in configs:
        config.pop("post_processor")  # it only adds special tokens, which we never ask for
        config["model"].pop("vocab")
        config["model"].pop("merges", None)
    return configs[0] == configs[1]
