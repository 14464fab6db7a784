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
import tracemalloc
import types
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import data
import prepare
from configurator import fill_in, make_settings, read_settings
from conftest import ROOT, prose, read_records, run
from model import Block
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
    module = prepare.import_zstd()
    return module.compress(content, options={module.CompressionParameter.checksum_flag: True})


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
def test_all_kinds_of_json_lines_give_the_same_files(tmp_path, plain, texts):
    """Several gzip members or zstd frames, CR LF line ends, blank lines, a byte order mark."""
    lines = jsonl(texts[:50]).replace(b"\n", b"\r\n\n")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)

    lines = jsonl(texts[50:100])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]))

    lines = jsonl(texts[100:180]).rstrip(b"\n")
    skippable_frame = bytes.fromhex("502a4d18 03000000 616263")
    (tmp_path / "c.jsonl.zst").write_bytes(zstd(lines[:777]) + skippable_frame + zstd(lines[777:]))

    (tmp_path / "d.JSON").write_bytes(jsonl(texts[180:190]))
    (tmp_path / "e.ndjson").write_bytes(jsonl(texts[190:]))

    inputs = ["a.jsonl", "*.gz", "c.jsonl.zst", "[de].*"]
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
        assert meta[name] == {
            "documents": len(decoded),
            "tokens": len(tokens),
            "bytes": sum(len(text.encode()) for text in decoded),
            "words": len(" ".join(decoded).split()),
        }
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
    """Wherever the others are; blank ones are dropped; both are counted."""
    once = texts[:30]
    (tmp_path / "a.jsonl").write_bytes(jsonl(once + once[::-1] + ["", " \n"]))
    (tmp_path / "b.txt").write_text(once[3])
    printed = run_prepare("--input", tmp_path / "*.*", "--out", tmp_path / "out")
    train = decode_split(tmp_path / "out", "train")
    assert train == [text for text in once if text in train]
    assert sorted(decode_all(tmp_path / "out")) == sorted(once)
    assert "documents: 63; dropped as duplicate, empty or malformed: 33" in printed


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
    """Without the held-out documents (except for one), the tokenizer is the same."""
    train, val = decode_split(plain / "out", "train"), decode_split(plain / "out", "val")
    (tmp_path / "val.jsonl").write_bytes(jsonl(val))
    hashes, _, _ = prepare.hash_documents([str(tmp_path / "val.jsonl")])
    (tmp_path / "x.jsonl").write_bytes(jsonl([*train, val[hashes.argmin()]]))
    flags = ["--vocab_size", 400, "--val_fraction", 0]
    run_prepare("--input", tmp_path / "x.jsonl", "--out", tmp_path / "out", *flags)
    new, old = contents(tmp_path / "out"), contents(plain / "out")
    assert len(val) > 5 and new["tokenizer.json"] == old["tokenizer.json"]


# ---- files and folders ---------------------------------------------------------------------------
def read_all(*patterns):
    """Return the documents of all files that the patterns find; none may be malformed."""
    paths = prepare.find_files(map(str, patterns)).values()
    documents = list(prepare.read_documents(paths))
    assert not any(problem for _, _, problem in documents)
    return [text for _, text, _ in documents]


def test_any_other_file_is_plain_text(tmp_path):
    """Whatever its ending, compressed or not; CR LF becomes LF; a byte order mark is dropped."""
    text = "\n\n".join(prose(40)) + "\n漢字\n"
    windows = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    (tmp_path / "a.txt").write_text(text)
    expected = read_all(tmp_path / "a.txt")
    assert "".join(expected) == text
    files = {"b.md": windows, "c.train": windows, "noending": windows}
    files |= {"d.txt.gz": gzip.compress(windows), "e.zst": zstd(windows)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert read_all(tmp_path / name) == expected, name


def test_a_folder_is_all_files_in_it_each_once(tmp_path):
    """Sorted, with its subfolders; hidden files and folders are left out."""
    names = ["b.txt", "a/z.md", "a/sub/x", "c [1].txt", ".hidden", ".git/config", "a/.x/y.txt"]
    folder = tmp_path / "in [2]"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    os.symlink("b.txt", folder / "link.txt")
    visible = ["a/sub/x", "a/z.md", "b.txt", "c [1].txt"]
    found = [f"text of {name}" for name in visible]
    assert read_all(folder) == read_all(folder, folder / "a") == found
    assert read_all(tmp_path / "in*/**") == found
    assert read_all(folder / "c [1].txt", tmp_path / "in*/*.txt") == [found[3], found[2]]


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_standard_input_is_json_lines_if_it_begins_so(tmp_path, name):
    texts = prose(50)
    content = jsonl(texts) if name == "x.jsonl" else "\n".join(texts).encode()
    (tmp_path / name).write_bytes(content)
    run_prepare("--input", tmp_path / name, "--out", tmp_path / "file", "--vocab_size", 300)
    arguments = ["--input", "-", "--out", tmp_path / "stdin", "--vocab_size", "300"]
    subprocess.run([sys.executable, SCRIPT, *arguments], check=True, input=content)
    new, old = contents(tmp_path / "stdin"), contents(tmp_path / "file")
    assert new.keys() == old.keys()  # nothing else is left
    assert all(new[name] == old[name] for name in data.FILES)


def test_a_prepared_folder_that_is_replaced_is_said(tmp_path, plain):
    arguments = ["--input", plain / "text.jsonl", "--out", tmp_path, "--vocab_size", 300]
    assert "earlier" not in run_prepare(*arguments)
    printed = run_prepare(*arguments)
    assert f"this will replace the text that was prepared in {tmp_path} earlier" in printed


# ---- plain text is cut into documents ------------------------------------------------------------
PARAGRAPHS = ["\n".join(prose(i % 20 + 1, seed=i)) + "\n" for i in range(300)]
SHAPES = {
    "paragraphs": "\n".join(PARAGRAPHS),
    "lines": "\n".join(prose(2000)),
    "long lines": "\n".join([" ".join(prose(i % 60 + 1)) for i in range(100)]),
    "one line": "".join(prose(2000)),
    "Japanese": "\n".join(["これは文です。" * (i % 30 + 1) for i in range(3000)]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_have_bounded_sizes_and_are_together_the_text(shape):
    text = SHAPES[shape]
    pieces = list(filter(None, prepare.cut_text(io.StringIO(text))))
    assert "".join(pieces) == text
    longest_line = min(max(map(len, text.splitlines())), 16 * prepare.PIECE)
    sizes = [len(piece) for piece in pieces[:-1]]
    assert min(sizes) >= prepare.PIECE
    assert max(sizes) <= 2 * prepare.PIECE + longest_line
    if shape != "one line":
        assert all(piece.endswith("\n") for piece in pieces[:-1])
    if shape == "paragraphs":
        assert sum(piece.endswith("\n\n") for piece in pieces) > 0.6 * len(pieces)


# ---- what is held out ----------------------------------------------------------------------------
def split_files(folder, texts, val_fraction=0.1):
    """Write texts as files; return what is trained on and what is held out from each."""
    paths = []
    for i, text in enumerate(texts):
        paths.append(str(folder / f"{i:03}.txt"))
        Path(paths[-1]).write_text(text)
    train, val = prepare.choose_split(paths, *prepare.hash_documents(paths), 0, val_fraction)
    sides = [["", ""] for _ in texts]
    for (i, text, _), is_train, is_val in zip(prepare.read_documents(paths), train, val):
        assert is_train != is_val
        sides[i][int(is_val)] += text
    return sides


def make_text(n_bytes, separator, seed=0):
    return separator.join(prose(n_bytes // 100, seed=n_bytes + seed))[:n_bytes]


@pytest.mark.parametrize("separator", ["\n\n", "\n"], ids=["paragraphs", "lines"])
@pytest.mark.parametrize("kilobytes", [10, 30, 200, 1000])
def test_a_plain_text_is_held_out_by_its_end(tmp_path, kilobytes, separator):
    """The last 10%, rounded up to whole pieces: nanoGPT's split."""
    text = make_text(kilobytes * 1000, separator)
    for share in (0.1, 0.25):
        [[train, val]] = split_files(tmp_path, [text], share)
        assert train + val == text and train.endswith("\n")
        assert 0 <= len(val) - share * len(text) <= 3 * prepare.PIECE


def test_every_file_gives_its_end(tmp_path):
    texts = [make_text(n, "\n", seed=n) for n in (90000, 20000, 500000, 40000)]
    for text, (train, val) in zip(texts, split_files(tmp_path, texts)):
        assert train + val == text
        assert abs(len(val) - 0.1 * len(text)) <= 3 * prepare.PIECE


def test_of_short_files_every_tenth_is_held_out(tmp_path):
    """A tenth of the bytes, spread evenly from the first file to the last."""
    texts = prose(300)
    sides = split_files(tmp_path, texts)
    held_out = [i for i, (_, val) in enumerate(sides) if val]
    assert 20 <= len(held_out) <= 40
    assert max(np.diff([0, *held_out, 300])) < 30
    share = sum(len(val) for _, val in sides) / sum(map(len, texts))
    assert abs(share - 0.1) < 0.01


def test_named_files_are_held_out(tmp_path):
    """Of any kind; a document or a file that is also in the input is not trained on."""
    texts = prose(60)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(jsonl(texts[:40]))
    (tmp_path / "in/b.dev").write_text(texts[40])
    (tmp_path / "in/c.md").write_text(texts[41])
    (tmp_path / "dev.jsonl").write_bytes(jsonl(texts[35:40] + texts[50:] + texts[50:]))
    flags = ["--val", tmp_path / "dev.jsonl", tmp_path / "in/*.dev", "--vocab_size", 300]
    run_prepare("--input", tmp_path / "in", "--out", tmp_path / "out", *flags)
    assert decode_split(tmp_path / "out", "train") == [*texts[:35], texts[41]]
    assert decode_split(tmp_path / "out", "val") == [*texts[35:40], *texts[50:], texts[40]]


@pytest.mark.parametrize("kind", [".jsonl", ".txt"])
@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_neither_side_is_ever_empty(share, kind):
    """Of two documents one is held out, whatever their hashes and sizes."""
    for hashes in ([3, 2**64 - 1], [2**64 - 1, 3], [3, 5], [2**64 - 1, 2**64 - 5000]):
        documents = np.array(hashes, np.uint64), np.array([10, 10**6]), np.array([2])
        train, val = prepare.choose_split([f"x{kind}"], *documents, 0, share)
        assert train.sum() == val.sum() == 1 and not (train & val).any()


def test_a_split_shorter_than_a_window_is_said(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(jsonl([*prose(100), "Short."]))
    flags = ["--vocab_size", 300, "--val_fraction", 0]  # the last document alone
    printed = run_prepare("--input", tmp_path / "x.jsonl", "--out", tmp_path / "out", *flags)
    assert re.findall("warning: (.*) is shorter than a window of 256 tokens", printed) == ["val"]


def test_memory_grows_by_64_bytes_a_document_at_most(monkeypatch):
    n = 300_000
    documents = ((0, str(i), "") for i in range(n))
    monkeypatch.setattr(prepare, "read_documents", lambda paths: documents)
    tracemalloc.start()
    found = prepare.hash_documents(["x.txt"])
    prepare.choose_split(["x.txt"], *found, 0, 0.1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found[0]) == n and peak < 64 * n + 10**6


# ---- which settings suit how much text -----------------------------------------------------------
def test_the_next_command_fits_the_corpus(tmp_path, plain, monkeypatch):
    """The path in it is quoted, and train.py accepts its settings."""
    monkeypatch.chdir(tmp_path)
    out = "data/my text"
    printed = run_prepare("--input", plain / "text.jsonl", "--out", out, "--vocab_size", 400)
    command = shlex.split(printed.splitlines()[-1].partition("Next: ")[2])
    assert command[:3] == ["python", "train.py", "config/demo.py"]
    assert command[3:6] == ["--repetitions=32", "--max_steps=0", f"--data_dir={out}"]
    monkeypatch.chdir(ROOT)
    demo = make_settings(read_settings(command[2:], ""))
    assert demo.out_dir == "out/my text" and demo.seq_len == prepare.WINDOW
    corpus = data.open_corpus(tmp_path / demo.data_dir)
    fill_in(demo, corpus.vocab_size, len(corpus.train.tokens))
    data.Stream(corpus, demo)


@pytest.mark.parametrize(
    "folder, arguments",
    [
        ("pydocs", "config/demo.py"),
        ("shakespeare", "config/shakespeare.py"),
        ("babylm", "config/babylm.py"),
        # Several configs are made for it: the text's size decides.
        ("bytes", "config/demo.py --data_dir=data/bytes --out_dir=out/bytes"),
    ],
)
def test_the_next_command_names_the_config_of_a_folder(folder, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = prepare.next_command(Path("data", folder), 2 * 10**6)
    assert command == f"python train.py {arguments}"


@pytest.mark.parametrize(
    "n_bytes, bytes_per_token, config, tokens_per_parameter",
    [
        (1e6, 2.5, "demo", 2),
        (1e7, 3.5, "mini", 95),
        (1e8, 4, "small", 95),
        (1e9, 4.75, "large", 95),
        (1e12, 4.75, "large", 95),
    ],
)
def test_a_text_has_a_config_that_suits_it(n_bytes, bytes_per_token, config, tokens_per_parameter):
    """The paper's tokens per parameter, all of the text, and 16 repetitions of it for AR."""
    _, vocab_size, suitable = prepare.choose_row(n_bytes)
    assert suitable == f"config/{config}.py"
    s = make_settings(read_settings([os.path.join(ROOT, suitable)], ""))
    with torch.device("meta"):
        n_parameters = sum(p.numel() for p in Block(s).parameters()) * s.n_layer
    n_read = s.max_steps * s.batch_size * s.seq_len
    assert n_read / n_parameters == pytest.approx(tokens_per_parameter, rel=0.1)
    assert s.seq_len >= prepare.WINDOW and s.repetitions == s.vocab_size == 0
    fill_in(s, vocab_size, int(n_bytes / bytes_per_token))
    assert 1 <= s.repetitions < 300
    assert Fraction(s.alpha) * Fraction(s.repetitions) < 18  # repetitions of AR
    if config != "demo":
        assert s.n_embd == 64 * s.n_head
        assert Fraction(s.alpha) == pytest.approx(min(63 / 64, 16 / s.repetitions), rel=0.05)


@pytest.mark.parametrize("config", ["mini", "small", "large"])
def test_each_config_trains(tmp_path, plain, config):
    """Here with a tiny model, for a few steps; both losses fall."""
    tiny = dict(n_layer=1, n_head=1, n_embd=64, n_ff=64, seq_len=64, alpha="1/2", max_steps=4)
    tiny |= dict(batch_size=4, micro_batch_size=2, eval_tokens=640, eval_interval=4, compile=False)
    flags = [f"--{name}={value}" for name, value in tiny.items()]
    flags += [f"--data_dir={plain / 'out'}", f"--out_dir={tmp_path}", "--device=cpu"]
    run("train.py", f"config/{config}.py", *flags, cwd=ROOT)
    first, last = [record for record in read_records(tmp_path) if "val_ar" in record]
    assert last["val_ar"] < first["val_ar"] and last["val_md"] < first["val_md"]


def test_the_next_command_is_that_of_the_row():
    command = prepare.next_command(Path("data/mine"), 1e8)
    assert shlex.split(command, comments=True) == [
        *("python", "train.py", "config/small.py"),
        *("--data_dir=data/mine", "--out_dir=out/mine"),
    ]


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
    """A regular sample of all code points, next to letters, digits, spaces, marks, apostrophes."""
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
    start = time.process_time()
    [tokens] = encode([text])
    assert time.process_time() - start < 30
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

    count = prepare.write_split(tmp_path, "val", draw(), encode_and_watch, 1)
    tokens = [np.append(np.uint16(1), part) for part in encode(documents)]
    starts = np.cumsum([0] + [len(part) for part in tokens])
    assert np.array_equal(np.fromfile(tmp_path / "val.bin", np.uint16), np.concatenate(tokens))
    assert np.array_equal(np.fromfile(tmp_path / "val.idx", np.uint64), starts)
    assert count["documents"] == 5000 and count["tokens"] == starts[-1]


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
    """Spells a space as ▁ and puts one before every text; rare characters become bytes."""
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
    for i, path in enumerate((plain / "out" / "tokenizer.json", tmp_path)):  # a folder will do
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
    "not JSON": (b"{", "is not a usable tokenizer.json"),
    "other JSON": (b"[]", "is not a usable tokenizer.json"),
    "no model": (b'{"added_tokens": []}', "is not a usable tokenizer.json"),
    "binary": (b"\xff\x00", "is not a usable tokenizer.json"),
    "no added_tokens": (
        json.dumps(
            {"model": json.loads(word_level({"<unk>": 0, "a": 1}).to_str())["model"]}
        ).encode(),
        "none of <s>, <|begin_of_text|>, <|endoftext|>",
    ),
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
    assert (
        f"14 of 1,400 documents are malformed, the first: {tmp_path}/x.jsonl, line 8, " in printed
    )
    assert "dropped as duplicate, empty or malformed: 14" in printed
    assert len(decode_all(tmp_path / "out")) == 1386


def truncated(content):
    return content[:-9]


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


GOOD = jsonl(prose(1000))
LATIN1 = "déjà vu".encode("latin-1")
JAPANESE = "日本語の文章\n".encode("shift_jis")
ARRAY = json.dumps([{"text": text} for text in prose(9)]).encode()
NOT_JSON = 'the first: .*x.jsonl, line 1, is not a JSON object with a string "text"'
NOT_UTF8 = (
    "1 of 1 documents are malformed, the first: .*x.*, line 1, is not UTF-8: convert the file"
)
NO_TEXT = "0 are left to train on and 0 to hold out"
UNREADABLE = "cannot read .*x.jsonl"
TRUNCATED = f"{UNREADABLE}.zst: .* ended before the end-of-stream"

# fmt: off
BAD_FILES = {
    "many malformed":  ("x.jsonl", b"\n".join(MALFORMED[:11]) + b"\n" + GOOD, "11 of 1,011 docume"),
    "no text field":   ("x.jsonl", b'{"content": "a"}\n' * 9, f"9 of 9 documents .*{NOT_JSON}"),
    "no string":       ("x.jsonl", b'{"text": 1}\n' * 9, NOT_JSON),
    "one JSON array":  ("x.jsonl", ARRAY, f"1 of 1 documents .*{NOT_JSON}"),
    "plain text":      ("x.jsonl", b"Hello, world.\n" * 9, NOT_JSON),
    "Latin-1":         ("x.txt", LATIN1, NOT_UTF8),
    "Latin-1 JSON":    ("x.jsonl", b'{"text": "%s"}' % LATIN1, NOT_UTF8),
    "Japanese":        ("x.md", JAPANESE, NOT_UTF8),
    "UTF-16":          ("x.txt", "hello world\n".encode("utf-16"), "has a NUL byte"),
    "a program":       ("x", b"ELF\0" * 2000, "the first: .*x, line 1, has a NUL byte: convert"),
    "random bytes":    ("x.jsonl", random.Random(0).randbytes(9999), "documents are malformed"),
    "empty":           ("x.jsonl", b"", NO_TEXT),
    "empty text":      ("x.txt", b"", NO_TEXT),
    "blank":           ("x.jsonl", b"\n \n\n", NO_TEXT),
    "empty texts":     ("x.jsonl", jsonl(["", " "]), NO_TEXT),
    "one document":    ("x.jsonl", jsonl(["a", "a"]), "0 are left to train on and 1 to hold out"),
    "one piece":       ("x.txt", b"a\nb\n", "cut at line ends into documents of about 2,048"),
    "truncated gzip":  ("x.jsonl.gz", truncated(gzip.compress(GOOD)), UNREADABLE),
    "corrupt gzip":    ("x.jsonl.gz", flipped(gzip.compress(GOOD)), UNREADABLE),
    "no deflate":      ("x.jsonl.gz", gzip.compress(GOOD)[:10] + GOOD, UNREADABLE),
    "no gzip":         ("x.jsonl.gz", GOOD, UNREADABLE),
    "truncated zstd":  ("x.jsonl.zst", truncated(zstd(GOOD)), TRUNCATED),
    "a frame missing": ("x.jsonl.zst", zstd(GOOD) + zstd(GOOD)[:3], TRUNCATED),
    "corrupt zstd":    ("x.jsonl.zst", flipped(zstd(GOOD)), UNREADABLE),
    "no zstd":         ("x.jsonl.zst", GOOD, UNREADABLE),
    "parquet":         ("x.parquet", b"PAR1", "x.parquet is not .* pandas.read_parquet.*to_json"),
    "csv":             ("x.csv.gz", b"", "x.csv.gz is not .* pandas.read_csv.*a column named text"),
    "pdf":             ("x.pdf", b"", "x.pdf is not plain text: leave it out.* pdftotext .*x.pdf"),
    "docx":            ("x.docx", b"", "pandoc .*x.docx -o .*x.docx.txt"),
    "zip":             ("x.zip", b"", "unzip .*x.zip -d FOLDER, then --input FOLDER"),
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


def test_a_damaged_place_in_a_plain_text_is_named_by_its_line(tmp_path):
    lines = [b"a line of 100 characters" + b"." * 75] * 1000
    lines[700] = b"\xff" * 99
    (tmp_path / "x.txt").write_bytes(b"\n".join(lines))
    documents = prepare.read_documents([str(tmp_path / "x.txt")])
    [problem] = [problem for _, _, problem in documents if problem]
    line = int(re.search(r"x.txt, line (\d+), is not UTF-8", problem)[1])  # where the piece begins
    assert 701 - 2 * prepare.PIECE / 100 < line <= 701


@pytest.mark.parametrize("missing", [1, 5, 100, 1000, 5000])
def test_a_truncated_zstd_file_is_found_wherever_it_ends(tmp_path, missing):
    """Among good files, in its first or its last frame, with and without a checksum."""
    compress = prepare.import_zstd().compress
    packed = compress(GOOD[:50000]) + compress(GOOD[50000:])
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    (tmp_path / "x.jsonl.zst").write_bytes(packed)
    assert len(list(prepare.read_documents([str(tmp_path / "x.jsonl.zst")]))) == 1000
    (tmp_path / "x.jsonl.zst").write_bytes(packed[:-missing])
    with pytest.raises(SystemExit, match=f"^error: {TRUNCATED}"):
        run_prepare("--input", tmp_path / "*.*", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--vocab_size", 271], "--vocab_size must be from 272 to 65535"),
        (["--vocab_size", 65536], "--vocab_size must be"),
        (["--vocab_size", 0], "--vocab_size must be"),
        (["--val_fraction", 1], "--val_fraction"),
        (["--val_fraction", "nan"], "--val_fraction"),
        (["--val", "no.txt"], "no such file: no.txt"),
        (["--val", SCRIPT, "--val_fraction", 0.1], "--val_fraction: not allowed with .* --val"),
        (["--input"], "--input: expected at least one argument"),
        (["--input", "no/*.jsonl"], "no such file: no/"),
        (["--input", "/dev/null"], "no such file"),
        (["--out", ""], "--out data/NAME"),
        (["--tasks"], "--tasks can only be combined with --out"),
        (["--tokenizer", "t.json", "--vocab_size", 300], "not allowed with"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_written(tmp_path, plain, flags, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        run_prepare("--input", plain / "text.jsonl", "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_files_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/.hidden").write_text("text")
    with pytest.raises(SystemExit, match=f"^error: no files .* in {tmp_path}/in$"):
        run_prepare("--input", tmp_path / "in", "--out", tmp_path / "out")
    with pytest.raises(SystemExit, match=f"^error: --out {tmp_path}/in/.hidden is a file"):
        run_prepare("--out", tmp_path / "in/.hidden")


def test_every_flag_has_a_help_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "-h"])
    with pytest.raises(SystemExit):
        prepare.main()
    options = capsys.readouterr().out.partition("options:")[2]
    flags = re.findall(
        r"^  (?:-h, )?(--\w+)(?: [A-Z].*?)?(?:  |\n {20}) *\w", options, re.MULTILINE
    )
    names = ["help", "input", "out", "val", "val_fraction", "vocab_size", "tokenizer", "tasks"]
    assert flags == [f"--{name}" for name in names]


def test_tasks_are_downloaded_by_tasks_py(tmp_path, monkeypatch):
    folders = []
    module = types.SimpleNamespace(download_tasks=folders.append)
    monkeypatch.setitem(sys.modules, "tasks", module)
    run_prepare("--tasks")
    run_prepare("--tasks", "--out", tmp_path)
    assert folders == [Path("data/tasks"), tmp_path]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python itself unpacks zstd")
def test_without_zstd_one_line_says_what_to_install(tmp_path):
    (tmp_path / "x.jsonl.zst").write_bytes(zstd(GOOD))
    (tmp_path / "backports").mkdir()
    (tmp_path / "backports/__init__.py").write_text("")
    result = subprocess.run(
        [sys.executable, SCRIPT, "--input", tmp_path / "x.jsonl.zst", "--out", tmp_path / "out"],
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 1
    assert re.fullmatch("error: .*zstd.*: pip install backports.zstd\n", result.stderr)
    assert not os.listdir(tmp_path / "out")


def test_a_line_without_end_does_not_fill_the_memory(tmp_path):
    """It comes in malformed pieces of bounded size."""
    with prepare.import_zstd().open(tmp_path / "x.jsonl.zst", "wb") as file:
        for _ in range(80):
            file.write(b"[" * 2**22)
    sizes = [len(piece) for piece in prepare.read_pieces(str(tmp_path / "x.jsonl.zst"))]
    assert sizes == [2**28, 80 * 2**22 - 2**28]


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
    while not list(tmp_path.glob("out/*")):  # until it waits for its input
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130  # with its input still open
    _, errors = process.communicate()
    assert not errors
    assert not os.listdir(tmp_path / "out")
