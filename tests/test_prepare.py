"""prepare.py: any mix of text files becomes the same tokens; nothing is lost or leaked."""

import contextlib
import gzip
import io
import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import data
import prepare
from configurator import fill_in, make_settings, read_settings
from conftest import ROOT, prose
from tokenizer import SPECIAL_TOKENS, find_special_ids, with_mask_token

SCRIPT = os.path.join(ROOT, "prepare.py")
N_SPECIAL = len(SPECIAL_TOKENS)


def run_prepare(*argv):
    """Run the command in this process; return what it prints."""
    old_argv = sys.argv
    sys.argv = [SCRIPT, *map(str, argv)]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            prepare.main()
    finally:
        sys.argv = old_argv
    return printed.getvalue()


def jsonl(texts):
    lines = [json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)]
    return "".join(lines).encode()


def zstd(content):
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def load_tokenizer(folder):
    """Load the tokenizer of a prepared folder, to encode as prepare.py does."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def decode_split(folder, split):
    """Return the texts of a prepared split."""
    tokenizer = load_tokenizer(folder)
    corpus = data.open_corpus(folder)
    tokens, starts = getattr(corpus, split)
    texts = []
    for start, end in zip(starts[:-1], starts[1:]):
        ids = tokens[start + 1 : end].tolist()
        texts.append(tokenizer.decode(ids, skip_special_tokens=False))
    return texts


def decode_all(folder):
    return decode_split(folder, "train") + decode_split(folder, "val")


@pytest.fixture(scope="module")
def texts():
    """What a corpus may hold, plain prose first."""
    odd = [
        "<mask> is <s>text</s>, like <pad> and <special_3>",
        "naïve 漢字 😀 e\u0301 \u200d\0",
        "  \n\n\ta \r\n b  ",
        "x" * 900,
        "don't we'll I'VE ’s",
        "1234567890 ½ ٣ Ⅷ",
        "a\u2028b\x85c\x1cd",
    ]
    return prose(200) + odd


@pytest.fixture(scope="module")
def plain(tmp_path_factory, texts):
    """A folder with text.jsonl, prepared into out."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "text.jsonl").write_bytes(jsonl(texts))
    run_prepare("--input", folder / "text.jsonl", "--out", folder / "out", "--vocab_size", 400)
    return folder


# ---- what is written -----------------------------------------------------------------------------
def test_all_formats_give_the_same_files(tmp_path, plain, texts):
    """Several gzip members or zstd frames, foreign line ends, blank lines, byte order marks."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts[:50]).replace(b"\n", b"\r\n\n"))

    lines = jsonl(texts[50:100])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]))

    lines = jsonl(texts[100:180]).rstrip(b"\n")
    skippable_frame = bytes.fromhex("502a4d18 03000000 616263")
    (tmp_path / "c.jsonl.zst").write_bytes(zstd(lines[:777]) + skippable_frame + zstd(lines[777:]))

    for i, text in enumerate(texts[180:]):
        mark = b"\xef\xbb\xbf" if i % 2 else b""
        (tmp_path / f"{i:02}.txt").write_bytes(mark + text.encode())

    inputs = ["a.jsonl", "*.gz", "c.jsonl.zst", "[0-9]*.txt"]
    inputs = [tmp_path / name for name in inputs]
    run_prepare("--input", *inputs, "--out", tmp_path / "out", "--vocab_size", 400)
    new, old = contents(tmp_path / "out"), contents(plain / "out")
    assert new.keys() == old.keys() == {*data.FILES, "meta.json"}
    assert all(new[name] == old[name] for name in data.FILES)


def test_standard_input_gives_the_same_bytes_under_any_hash_seed(tmp_path, plain):
    for seed, threads in (("1", "1"), ("2", "2")):
        out = tmp_path / seed
        subprocess.run(
            [sys.executable, SCRIPT, "--input", "-", "--out", out, "--vocab_size", "400"],
            check=True,
            input=(plain / "text.jsonl").read_bytes(),
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
        )
    first, second, old = contents(tmp_path / "1"), contents(tmp_path / "2"), contents(plain / "out")
    assert first == second and first.keys() == old.keys()  # nothing else is left
    assert all(first[name] == old[name] for name in data.FILES)


def test_every_document_is_there_once_behind_its_bos(plain, texts):
    corpus = data.open_corpus(plain / "out")
    meta = json.loads((plain / "out" / "meta.json").read_text())
    for name in ("train", "val"):
        tokens, starts = getattr(corpus, name)
        assert np.array_equal(np.flatnonzero(np.isin(tokens, corpus.special.all)), starts[:-1])
        assert set(tokens[starts[:-1]]) == {corpus.special.bos}
        decoded = decode_split(plain / "out", name)
        assert decoded == [text for text in texts if text in decoded]  # in order
        n_bytes = sum(len(text.encode()) for text in decoded)
        counts = {"documents": len(decoded), "tokens": len(tokens), "bytes": n_bytes}
        assert meta[name] == counts
    assert sorted(decode_all(plain / "out")) == sorted(texts) and meta["vocab_size"] == 400


def test_the_special_tokens_have_the_first_ids(plain):
    tokenizer = load_tokenizer(plain / "out")
    assert [tokenizer.id_to_token(i) for i in range(N_SPECIAL)] == SPECIAL_TOKENS
    special = find_special_ids((plain / "out" / "tokenizer.json").read_text())
    assert special == (1, 4, tuple(range(N_SPECIAL)))


def test_without_any_merge_the_text_is_still_exact(tmp_path, plain, texts):
    """16 special tokens and 256 bytes: the smallest vocabulary."""
    run_prepare("--input", plain / "text.jsonl", "--out", tmp_path, "--vocab_size", 272)
    assert sorted(decode_all(tmp_path)) == sorted(texts)
    assert np.fromfile(tmp_path / "train.bin", np.uint16).max() < 272


def test_the_first_of_equal_documents_stays(tmp_path, texts):
    """Wherever the others are; blank ones go; both are counted."""
    once = texts[:30]
    (tmp_path / "a.jsonl").write_bytes(jsonl(once + once[::-1] + ["", " \n"]))
    (tmp_path / "b.txt").write_text(once[3])
    printed = run_prepare("--input", tmp_path / "*.*", "--out", tmp_path / "out")
    train = decode_split(tmp_path / "out", "train")
    assert train == [text for text in once if text in train]
    assert sorted(decode_all(tmp_path / "out")) == sorted(once)
    assert "30 documents" in printed and "0 malformed, 33 duplicate or empty" in printed


def test_a_document_stays_on_its_side_when_the_corpus_grows(tmp_path):
    documents = prose(600)
    sides = []
    for n in (300, 600):
        shuffled = random.Random(n).sample(documents[:n], n)
        (tmp_path / "text.jsonl").write_bytes(jsonl(shuffled))
        out = tmp_path / str(n)
        run_prepare("--input", tmp_path / "text.jsonl", "--out", out, "--val_fraction", 0.2)
        train, val = set(decode_split(out, "train")), set(decode_split(out, "val"))
        assert not train & val and len(train | val) == n
        sides.append((train, val))
    assert sides[0][0] < sides[1][0] and sides[0][1] < sides[1][1]
    assert abs(len(sides[1][1]) - 120) < 5 * (600 * 0.2 * 0.8) ** 0.5


def test_the_tokenizer_learns_from_training_documents_only(tmp_path, plain):
    """Without the held-out documents (but for one) the tokenizer is the same."""
    train, val = decode_split(plain / "out", "train"), decode_split(plain / "out", "val")
    (tmp_path / "val.jsonl").write_bytes(jsonl(val))
    hashes, _, _ = prepare.hash_documents([str(tmp_path / "val.jsonl")])
    (tmp_path / "x.jsonl").write_bytes(jsonl([*train, val[hashes.argmin()]]))
    flags = ["--vocab_size", 400, "--val_fraction", 0]
    run_prepare("--input", tmp_path / "x.jsonl", "--out", tmp_path / "out", *flags)
    new, old = contents(tmp_path / "out"), contents(plain / "out")
    assert len(val) > 5 and new["tokenizer.json"] == old["tokenizer.json"]


def test_the_next_command_fits_the_corpus(tmp_path, plain, monkeypatch):
    """Its path is quoted; it has no more changes of the demo than needed."""
    monkeypatch.chdir(tmp_path)
    out = "data/my text"
    printed = run_prepare("--input", plain / "text.jsonl", "--out", out, "--vocab_size", 400)
    command = shlex.split(printed.splitlines()[-1].partition("Next: ")[2])
    assert command[:4] == ["python", "train.py", "config/demo.py", f"--data_dir={out}"]
    monkeypatch.chdir(ROOT)
    demo = make_settings(read_settings(command[2:], ""))
    assert demo.out_dir == "out/my text"
    corpus = data.open_corpus(tmp_path / demo.data_dir)
    fill_in(demo, corpus.vocab_size, len(corpus.train.tokens))
    data.Stream(corpus, demo)  # not refused
    assert prepare.next_command(Path("data/pydocs")) == "python train.py config/demo.py"


# ---- small and large .txt files ------------------------------------------------------------------
def write_text(path, n_bytes, separator):
    text = separator.join(prose(n_bytes // 100, seed=n_bytes))[:n_bytes]
    assert len(text) == n_bytes
    path.write_text(text)
    return text


@pytest.mark.parametrize("separator", ["\n\n", "\n", " "], ids=["paragraphs", "lines", "no lines"])
@pytest.mark.parametrize("kilobytes", [20, 25, 66, 198, 1000])
def test_a_small_text_has_about_the_held_out_share_asked_for(tmp_path, kilobytes, separator):
    text = write_text(tmp_path / "mine.txt", kilobytes * 1000, separator)
    hashes, sizes, _ = prepare.hash_documents([str(tmp_path / "mine.txt")])
    for share in (0.1, 0.2):
        keep, val = prepare.choose_split(hashes, sizes, share)
        assert share / 2 <= sizes[val].sum() / sizes[keep].sum() <= 2 * share
    assert keep.all() and sizes.sum() > 0.99 * len(text) and sizes.max() < max(4000, len(text) / 30)


def test_the_share_does_not_depend_on_luck():
    """From 20 KB on, cut into pieces of 1 to 3 KB as without blank lines, with any hashes."""
    rng = np.random.default_rng(0)
    shares = []
    while len(shares) < 1000:
        sizes = rng.integers(1000, 3000, rng.integers(10, 40))
        if sizes.sum() < 20000:
            continue
        hashes = rng.integers(1, 2**64, len(sizes), np.uint64)
        keep, val = prepare.choose_split(hashes, sizes, 0.1)
        shares.append(sizes[val].sum() / sizes.sum())
        assert keep.all() and 0.05 <= shares[-1] <= 0.2
    assert 0.09 < np.mean(shares) < 0.12


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_neither_side_is_ever_empty(share):
    hashes = np.array([3, 2**64 - 1], np.uint64)
    for order in (hashes, hashes[::-1]):
        keep, val = prepare.choose_split(order, np.array([10, 10**6]), share)
        assert keep.all() and val.sum() == 1


def test_texts_of_any_shape_are_cut_into_bounded_pieces(tmp_path):
    """At blank lines, else at lines, else anywhere. Nothing but line ends is lost."""
    paragraphs = ["\n".join(prose(i % 20 + 1, seed=i)) + "\n" for i in range(300)]
    shapes = ["\n".join(paragraphs), "\n".join(prose(2000)), "".join(prose(2000)), "\n" * 300000]
    for text in (*shapes, "é" * 300000):
        (tmp_path / "long.txt").write_text(text)
        pieces = [text for text, _ in prepare.read_documents([str(tmp_path / "long.txt")])]
        assert len(pieces) > 20 and max(map(len, pieces)) < len(text) / 10
        assert "".join(pieces).replace("\n", "") == text.replace("\n", "")

    (tmp_path / "long.txt").write_text(shapes[0])
    pieces = [text for text, _ in prepare.read_documents([str(tmp_path / "long.txt")])]
    assert sum(piece.startswith(tuple(paragraphs)) for piece in pieces) > len(pieces) / 2


def test_pieces_of_a_large_text_have_64_kib(tmp_path):
    (tmp_path / "large.txt").write_text("\n\n".join(prose(2000)) * 20)
    assert os.path.getsize(tmp_path / "large.txt") > 100 * 2**16
    documents = prepare.read_documents([str(tmp_path / "large.txt")])
    sizes = [len(text) for text, _ in documents]
    assert min(sizes[:-1]) >= 2**16 and max(sizes) < 2**16 + 1000


# ---- the encoder ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(plain):
    return load_tokenizer(plain / "out")


@pytest.fixture(scope="module")
def encode(tokenizer):
    return prepare.make_encoder(tokenizer, np.uint16)


PARTS = [*SPECIAL_TOKENS, " ", "\n", "  ", "\u3000", "'s", "'ll", "e\u0301"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.text(), st.sampled_from(PARTS))))
def test_encoding_is_that_of_tokenizers_and_can_be_undone(encode, tokenizer, parts):
    text = "".join(parts)
    [tokens] = encode([text])
    assert tokens.dtype == np.uint16 and (tokens >= N_SPECIAL).all()
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert tokens.tolist() == tokenizer.encode(text).ids


def test_encoders_agree_on_every_kind_of_character(encode, tokenizer):
    """A regular sample of all code points, beside letters, digits, spaces, marks, apostrophes."""
    code_points = [*range(0x3000), *range(0x3000, 0xD800, 17), *range(0xE000, 0x110000, 97)]
    characters = [chr(code_point) for code_point in code_points]
    for beside in ("a", "1", " ", "!", "'", "\n "):
        text = beside.join(characters)
        assert encode([text])[0].tolist() == tokenizer.encode(text).ids, beside


RUNS = [(" ", 10**6), ("\n \t\u00a0", 10**6), ("a", 10**5), ("ab", 10**5), ("!", 10**5)]
RUNS += [("漢", 10**5), ("\0", 10**5), ("7", 10**5), ("word ", 10**5)]


@pytest.mark.parametrize("unit, length", RUNS)
def test_endless_white_space_or_words_take_seconds(encode, tokenizer, unit, length):
    text = "Before" + (unit * length)[:length] + "after."
    start = time.time()
    [tokens] = encode([text])
    assert time.time() - start < 30
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert length > 10**5 or tokens.tolist() == tokenizer.encode(text).ids


def test_disagreement_of_the_encoders_is_found(tmp_path, plain, monkeypatch):
    monkeypatch.setattr(prepare, "PATTERN", r"\s+|\S+")
    with pytest.raises(SystemExit, match="error: tiktoken and tokenizers disagree"):
        run_prepare("--input", plain / "text.jsonl", "--out", tmp_path)


def test_encoding_keeps_the_order_and_never_reads_far_ahead(tmp_path, encode):
    documents = [f"{i} " * random.Random(i).randint(1, 300) for i in range(5000)]
    drawn = []
    encoded = []

    def draw():
        for text in documents:
            drawn.append(text)
            yield text

    def encode_and_watch(texts):
        encoded.extend(texts)
        assert drawn == encoded and len(texts) <= 1024
        return encode(texts)

    val = np.arange(5000) % 7 == 0
    lengths = prepare.encode_corpus(draw(), val, encode_and_watch, 1, tmp_path)
    tokens = [np.append(np.uint16(1), part) for part in encode(documents)]
    assert lengths.tolist() == [len(part) for part in tokens]
    for name, wanted in (("train", ~val), ("val", val)):
        expected = np.concatenate([part for part, take in zip(tokens, wanted) if take])
        assert np.array_equal(np.fromfile(tmp_path / f"{name}.bin", np.uint16), expected)


# ---- the tokenizers of others --------------------------------------------------------------------
def trained_on_prose(tokenizer, special, vocab_size=400, alphabet=()):
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose(300), trainer)
    return tokenizer


def like_llama3():
    """Byte-level BPE with a pattern of its own; <|begin_of_text|> is added to every text."""
    pattern = tokenizers.Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|[^\p{L}]|\s+")
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trained_on_prose(tokenizer, [], alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    bos = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def like_llama2():
    """Spells a space as ▁, puts one in front of every text; rare characters become bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trained_on_prose(tokenizer, ["<unk>", "<s>", "</s>", *bytes_], vocab_size=700)
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = config["added_tokens"][:3]  # bytes are ordinary tokens
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(config))
    bos = ("<s>", 1)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[bos])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16, pad_id=0, pad_token="<unk>")
    return tokenizer


FOREIGN = {"like Llama 3": (like_llama3, "<|begin_of_text|>"), "like Llama 2": (like_llama2, "<s>")}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_tokenizer_encodes_as_it_does_by_itself(tmp_path, plain, texts, name):
    """One bos opens each document; <mask> has the next id; a literal special token is text."""
    make, bos = FOREIGN[name]
    foreign = make()
    foreign.save(str(tmp_path / "tokenizer.json"))
    n_tokens = foreign.get_vocab_size()
    flags = ["--tokenizer", tmp_path / "tokenizer.json"]
    run_prepare("--input", plain / "text.jsonl", "--out", tmp_path / "out", *flags)

    corpus = data.open_corpus(tmp_path / "out")
    assert corpus.special.mask == n_tokens
    assert corpus.special.bos == foreign.token_to_id(bos)
    foreign.no_truncation()
    foreign.no_padding()
    foreign.encode_special_tokens = True
    found = []
    for tokens, starts in (corpus.train, corpus.val):
        for start, end in zip(starts[:-1], starts[1:]):
            found.append(tokens[start:end].tolist())
    expected = []
    for text in texts:
        expected.append([corpus.special.bos, *foreign.encode(text, add_special_tokens=False).ids])
    assert sorted(found) == sorted(expected)
    assert {token for ids in found for token in ids[1:]}.isdisjoint(corpus.special.all)
    assert sorted(decode_all(tmp_path / "out")) == sorted(texts)


def test_a_tokenizer_of_ours_is_reused_by_the_fast_encoder(tmp_path, plain, monkeypatch):
    """The same files come out, even if its post-processor adds <s>, as in an exported folder."""
    exported = load_tokenizer(plain / "out")
    exported.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    exported.save(str(tmp_path / "tokenizer.json"))
    coders = []

    def new_coder(*args, coder=prepare.tiktoken.Encoding, **named):
        coders.append(coder(*args, **named))
        return coders[-1]

    monkeypatch.setattr(prepare.tiktoken, "Encoding", new_coder)
    for i, path in enumerate((plain / "out" / "tokenizer.json", tmp_path / "tokenizer.json")):
        out = tmp_path / str(i)
        run_prepare("--input", plain / "text.jsonl", "--out", out, "--tokenizer", path)
        new, old = contents(out), contents(plain / "out")
        assert all(new[name] == old[name] for name in data.FILES if name.endswith((".bin", ".idx")))
    assert len(coders) == 2
    assert contents(tmp_path / "0")["tokenizer.json"] == old["tokenizer.json"]


def word_level(vocab):
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


@pytest.mark.parametrize("n_words, dtype", [(65533, np.uint16), (65534, np.uint32)])
def test_large_vocabularies_have_four_bytes_a_token(tmp_path, n_words, dtype):
    """With <unk>, <s> and <mask> these are 65,536 and 65,537 tokens."""
    words = [f"w{i}" for i in range(n_words)]
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", *words])}
    word_level(vocab).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.jsonl").write_bytes(jsonl([f"{words[-1]} {word}" for word in words[:50]]))
    flags = ["--tokenizer", tmp_path / "tokenizer.json"]
    run_prepare("--input", tmp_path / "x.jsonl", "--out", tmp_path / "out", *flags)
    corpus = data.open_corpus(tmp_path / "out")
    assert corpus.train.tokens.dtype == dtype and corpus.special.mask == n_words + 2
    assert corpus.train.tokens[:2].tolist() == [1, n_words + 1]


def test_a_mask_is_added_once_and_always_the_same():
    tokenizer_json = like_llama3().to_str()
    with_mask = with_mask_token(tokenizer_json)
    assert with_mask == with_mask_token(tokenizer_json)
    assert with_mask == with_mask_token(with_mask)
    old, new = json.loads(tokenizer_json), json.loads(with_mask)
    assert new["added_tokens"][:-1] == old["added_tokens"] and new["model"] == old["model"]
    token = new["added_tokens"][-1]
    assert (token["content"], token["special"]) == ("<mask>", True)
    assert token["id"] == 1 + max(
        tokenizers.Tokenizer.from_str(tokenizer_json).get_vocab().values()
    )
    # An ordinary token of that name becomes the special one, and keeps its id.
    ordinary = word_level({"<unk>": 0, "<s>": 1, "<mask>": 2, "word": 3}).to_str()
    assert find_special_ids(with_mask_token(ordinary)) == (1, 2, (0, 1, 2))


BAD_TOKENIZERS = {
    "not JSON": (b"{", "is not a tokenizer.json that can be used"),
    "other JSON": (b"[]", "is not a tokenizer.json that can be used"),
    "no model": (b'{"added_tokens": []}', "is not a tokenizer.json that can be used"),
    "binary": (b"\xff\x00", "is not a tokenizer.json that can be used"),
    "gap": (word_level({"<unk>": 0, "<s>": 1, "a": 7}).to_str().encode(), "ids are unused"),
    "no bos": (
        tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str().encode(),
        "none of <s>, <|begin_of_text|>, <|endoftext|>",
    ),
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_a_bad_tokenizer_is_one_line_before_the_text_is_read(tmp_path, plain, monkeypatch, name):
    content, message = BAD_TOKENIZERS[name]
    (tmp_path / "t.json").write_bytes(content)
    monkeypatch.delattr(prepare, "hash_documents")
    with pytest.raises(SystemExit) as caught:
        flags = ["--tokenizer", tmp_path / "t.json"]
        run_prepare("--input", plain / "text.jsonl", "--out", tmp_path / "out", *flags)
    line = str(caught.value)
    assert line.startswith("error: ") and "t.json" in line and message in line
    assert "\n" not in line and not os.listdir(tmp_path / "out")


# ---- the embedded corpus -------------------------------------------------------------------------
def test_the_embedded_corpus_has_megabytes_of_english():
    texts = prepare.embedded_corpus()
    assert 300 < len(texts) < 1000 and all(texts)
    assert 1.2e6 < sum(map(len, texts)) < 4e6
    assert any('The "with" statement' in text for text in texts)
    words = " ".join(texts).split()
    assert words.count("the") > len(words) / 50


def test_the_embedded_corpus_is_read_not_run(tmp_path, monkeypatch):
    """In a fixed order: distinct docstrings of modules, classes, functions; topics; no tests."""
    long = "word " * 10**5
    sources = {
        "b.py": f'"""{long}b"""\nraise SystemExit\n'
        'class C:\n    """C."""\n    def f(self):\n        """f."""\n',
        "a.py": f'"""{long}a"""\nif x:\n    async def g():\n        "f."\n'
        '        def h(): "C."; "not me"\ny = "nor me"\ndef again(): "f."\n',
        "pydoc_data/topics.py": f"# topics\ntopics = {{'q': {long + 'q'!r}, 'p': 'topic p'}}\n",
        "none.py": "x = 1\n",
        "test/t.py": '"""Test."""',
        "json/tests/t.py": '"""Test."""',
        "site-packages/s.py": '"""S."""',
        "json/__init__.py": '"""J."""',
    }
    for path, source in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    expected = [f"{long}a\n\nf.\n\nC.", f"{long}b\n\nC.\n\nf.", "J.", long + "q", "topic p"]
    assert prepare.embedded_corpus() == expected

    (tmp_path / "a.py").unlink()
    (tmp_path / "b.py").unlink()
    with pytest.raises(SystemExit, match="error: this Python has no documentation in .* --input"):
        prepare.embedded_corpus()


# ---- bad input -----------------------------------------------------------------------------------
# fmt: off
MALFORMED = [b"{", b'"text"', b"[1]", b"5", b"null", b"{}", b'{"text": 5}', b'{"text": null}',
             b'{"text": ["a"]}', b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"[" * 100000,
             b"\xff\xfe\x00", b'{"text": "a}']
# fmt: on


def test_up_to_one_percent_malformed_documents_are_skipped_and_counted(tmp_path):
    lines = jsonl(prose(1386)).splitlines()
    lines[7:7] = MALFORMED
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    printed = run_prepare("--input", tmp_path / "x.jsonl", "--out", tmp_path / "out")
    assert "14 malformed, 0 duplicate" in printed
    assert len(decode_all(tmp_path / "out")) == 1386


def truncated(content):
    return content[:-9]


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


GOOD = jsonl(prose(1000))
LATIN1 = "déjà vu".encode("latin-1")
ARRAY = json.dumps([{"text": text} for text in prose(9)]).encode()
NO_FIELD = 'document 1 of .*x.jsonl has no text in a field named "text"'
NOT_JSON = "document 1 of .*x.jsonl is not a line of JSON"
UNREADABLE = "cannot read .*x.jsonl"

# fmt: off
BAD_FILES = {
    "many malformed":  ("x.jsonl", b"\n".join(MALFORMED[:11]) + b"\n" + GOOD, "11 of 1,011 docume"),
    "no text field":   ("x.jsonl", b'{"content": "a"}\n' * 9, f"9 of 9 documents .*{NO_FIELD}"),
    "no string":       ("x.jsonl", b'{"text": 1}\n' * 9, NO_FIELD),
    "one JSON array":  ("x.jsonl", ARRAY, f"1 of 1 documents .*{NO_FIELD}"),
    "plain text":      ("x.jsonl", b"Hello, world.\n" * 9, NOT_JSON),
    "Latin-1":         ("x.txt", LATIN1, "document 1 of .*x.txt is not UTF-8.*iconv"),
    "Latin-1 JSON":    ("x.jsonl", b'{"text": "%s"}' % LATIN1, "document 1 .* is not UTF-8.*iconv"),
    "UTF-16":          ("x.txt", "hello world\n".encode("utf-16") * 99, "is not UTF-8"),
    "random bytes":    ("x.jsonl", random.Random(0).randbytes(9999), "documents cannot be used"),
    "empty":           ("x.jsonl", b"", "text: 0; .* none is left .* give more text"),
    "empty text":      ("x.txt", b"", "distinct documents with text: 0"),
    "blank":           ("x.jsonl", b"\n \n\n", "distinct documents with text: 0"),
    "empty texts":     ("x.jsonl", jsonl(["", " "]), "distinct documents with text: 0"),
    "one document":    ("x.jsonl", jsonl(["a", "a"]), "with text: 1; .* none is left"),
    "truncated gzip":  ("x.jsonl.gz", truncated(gzip.compress(GOOD)), UNREADABLE),
    "corrupt gzip":    ("x.jsonl.gz", flipped(gzip.compress(GOOD)), UNREADABLE),
    "no deflate":      ("x.jsonl.gz", gzip.compress(GOOD)[:10] + GOOD, UNREADABLE),
    "no gzip":         ("x.jsonl.gz", GOOD, UNREADABLE),
    "truncated zstd":  ("x.jsonl.zst", truncated(zstd(GOOD)), f"{UNREADABLE}.zst: it ends in the"),
    "a frame missing": ("x.jsonl.zst", zstd(GOOD) + zstd(GOOD)[:3], f"{UNREADABLE}.zst: it ends"),
    "corrupt zstd":    ("x.jsonl.zst", flipped(zstd(GOOD)), UNREADABLE),
    "no zstd":         ("x.jsonl.zst", GOOD, UNREADABLE),
    "other format":    ("x.parquet", GOOD, "none of .txt .*x.parquet"),
}
# fmt: on


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_leaves_nothing_behind(tmp_path, name):
    file, content, message = BAD_FILES[name]
    (tmp_path / file).write_bytes(content)
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match=f"^error: .*{message}[^\n]*$"):
        run_prepare("--input", tmp_path / file, "--out", out, "--vocab_size", 300)
    assert not out.exists() or not os.listdir(out)


@pytest.mark.parametrize("missing", [1, 5, 100, 1000, 5000])
def test_a_truncated_zstd_file_is_found_wherever_it_ends(tmp_path, missing):
    """Among good files, in its first or its last frame, with and without a checksum."""
    compress = zstandard.ZstdCompressor().compress
    packed = compress(GOOD[:50000]) + compress(GOOD[50000:])
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    (tmp_path / "x.jsonl.zst").write_bytes(packed)
    assert len(list(prepare.read_documents([str(tmp_path / "x.jsonl.zst")]))) == 1000
    (tmp_path / "x.jsonl.zst").write_bytes(packed[:-missing])
    with pytest.raises(
        SystemExit, match="^error: cannot read .*x.jsonl.zst: it ends in the middle"
    ):
        run_prepare("--input", tmp_path / "*.*", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--vocab_size", 271], "--vocab_size must be from 272 to 65535"),
        (["--vocab_size", 65536], "--vocab_size must be"),
        (["--vocab_size", 0], "--vocab_size must be"),
        (["--val_fraction", 1], "--val_fraction"),
        (["--val_fraction", "nan"], "--val_fraction"),
        (["--input", "no/*.jsonl"], "no such file.*no/"),
        (["--input", "."], "no such file"),
        (["--out", ""], "--out data/NAME"),
        (["--tasks"], "--tasks goes with --out alone"),
        (["--tokenizer", "t.json", "--vocab_size", 300], "leave it out"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_written(tmp_path, plain, flags, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        run_prepare("--input", plain / "text.jsonl", "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_every_flag_has_a_help_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "-h"])
    with pytest.raises(SystemExit):
        prepare.main()
    options = capsys.readouterr().out.partition("options:")[2]
    flags = re.findall(
        r"^  (?:-h, )?(--\w+)(?: [A-Z].*?)?(?:  |\n {20}) *\w", options, re.MULTILINE
    )
    names = ["help", "input", "out", "vocab_size", "tokenizer", "val_fraction", "tasks"]
    assert flags == [f"--{name}" for name in names]


def test_tasks_are_downloaded_by_tasks_py(tmp_path, monkeypatch):
    folders = []
    module = types.SimpleNamespace(download_tasks=folders.append)
    monkeypatch.setitem(sys.modules, "tasks", module)
    run_prepare("--tasks")
    run_prepare("--tasks", "--out", tmp_path)
    assert folders == [Path("data/tasks"), tmp_path]


def test_without_zstandard_one_line_says_what_to_install(tmp_path):
    (tmp_path / "x.jsonl.zst").write_bytes(zstd(GOOD))
    (tmp_path / "zstandard.py").write_text("raise ImportError('no zstd', name='zstandard')")
    result = subprocess.run(
        [sys.executable, SCRIPT, "--input", tmp_path / "x.jsonl.zst", "--out", tmp_path / "out"],
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 1 and result.stderr == "error: no zstd: pip install zstandard\n"
    assert not os.listdir(tmp_path / "out")


def test_a_line_without_end_does_not_fill_the_memory(tmp_path):
    """It comes in malformed pieces of bounded size."""
    packer = zstandard.ZstdCompressor().compressobj()
    with open(tmp_path / "x.jsonl.zst", "wb") as file:
        for _ in range(80):
            file.write(packer.compress(b"[" * 2**22))
        file.write(packer.flush())
    sizes = [len(line) for line in prepare.read_lines(str(tmp_path / "x.jsonl.zst"))]
    assert sum(sizes) == 80 * 2**22 and 2**28 <= max(sizes) <= 2**28 + 2**25


def test_a_run_that_fails_leaves_the_earlier_folder_as_it_was(tmp_path, plain):
    """Damaged input, a full disk, no folder to write to: one line each."""
    out, good = tmp_path / "out", plain / "text.jsonl"
    damaged = tmp_path / "x.jsonl.gz"
    damaged.write_bytes(truncated(gzip.compress(GOOD)))
    run_prepare("--input", good, "--out", out, "--vocab_size", 300)
    before = contents(out)

    no_limit = 10**9
    cases = [
        (damaged, out, no_limit),
        (good, out, 20000),
        (good, good, no_limit),
        (good, good / "x", no_limit),
    ]
    for source, target, limit in cases:

        def limit_file_size(limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        result = subprocess.run(
            [sys.executable, SCRIPT, "--input", source, "--out", target, "--vocab_size", "400"],
            text=True,
            capture_output=True,
            preexec_fn=limit_file_size,
        )
        assert result.returncode == 1 and "Next:" not in result.stdout
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
        assert contents(out) == before


def test_control_c_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--input", "-", "--out", tmp_path / "out"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests that run in the background may have been told to ignore this signal.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while not list(tmp_path.glob("out/*/*")):  # until it waits for its input
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130  # with its input still open
    _, errors = process.communicate()
    assert not errors
    assert not os.listdir(tmp_path / "out")
