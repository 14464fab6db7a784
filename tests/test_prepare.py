"""prepare.py: any mix of text files becomes the same tokens, nothing is lost or leaked, and mistakes cost one line."""
import contextlib
import gzip
import http.server
import io
import json
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile

import numpy as np
import pytest
import zstandard
from conftest import ROOT, prose
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import eval as ev
import prepare

SCRIPT = os.path.join(ROOT, "prepare.py")
ZST = zstandard.ZstdCompressor(write_checksum=True).compress


def script(*argv):
    """The command, in this process; returns what it prints."""
    old, sys.argv = sys.argv, [SCRIPT, *map(str, argv)]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(SCRIPT, run_name="__main__")
    finally:
        sys.argv = old
    return printed.getvalue()


def jsonl(texts):
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()


def contents(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def documents(folder, split):
    """The texts of a prepared split, decoded."""
    bpe = prepare.tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens, starts = np.fromfile(folder / f"{split}.bin", np.uint16), np.fromfile(folder / f"{split}.idx", np.uint64)
    return [bpe.decode(tokens[a + 1:b].tolist(), skip_special_tokens=False) for a, b in zip(starts[:-1], starts[1:])]


@pytest.fixture(scope="module")
def texts():
    """What a corpus may hold, plain prose first."""
    return prose(200) + ["<mask> is <s>text</s>, like <pad> and <special_3>", "naïve 漢字 😀 e\u0301 \u200d\0",
                         "  \n\n\ta \r\n b  ", "x" * 3000, "don't we'll I'VE ’s", "1234567890 ½ ٣ Ⅷ", "a\u2028b\x85c\x1cd"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, texts):
    """A folder with text.jsonl, prepared into out."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "text.jsonl").write_bytes(jsonl(texts))
    script("--input", folder / "text.jsonl", "--out", folder / "out", "--vocab_size", 400)
    return folder


@pytest.fixture(scope="module")
def coders(plain):
    bpe = prepare.tokenizers.Tokenizer.from_file(str(plain / "out" / "tokenizer.json"))
    bpe.encode_special_tokens = True
    return prepare.encoder(bpe), lambda text: np.array(bpe.encode(text, add_special_tokens=False).ids), bpe


# ---- what is written -------------------------------------------------------------------------------------------------

def test_formats(tmp_path, plain, texts):
    """Plain, gzipped (several members), zstd (several frames) and text files, in any mix and by globs: the same files."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts[:50]).replace(b"\n", b"\r\n\n"))  # foreign line ends, blank lines
    lines = jsonl(texts[50:100])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]))
    lines, skippable = jsonl(texts[100:180])[:-1], bytes.fromhex("502a4d18 03000000 616263")  # no line end at the end
    (tmp_path / "c.jsonl.zst").write_bytes(ZST(lines[:777]) + skippable + ZST(lines[777:]))
    for i, text in enumerate(texts[180:]):
        (tmp_path / f"{i:02}.txt").write_bytes(b"\xef\xbb\xbf" * (i % 2) + text.encode())  # with and without a mark
    script("--input", tmp_path / "a.jsonl", tmp_path / "*.gz", tmp_path / "c.jsonl.zst", tmp_path / "[0-9]*.txt",
           "--out", tmp_path / "out", "--vocab_size", 400)
    new, old = contents(tmp_path / "out"), contents(plain / "out")
    assert new.keys() == old.keys() and all(new[name] == old[name] for name in data.FILES)


def test_standard_input_and_reproducibility(tmp_path, plain):
    """From a pipe, with other hash seeds and another number of threads: the same bytes, and no spool is left."""
    for seed, threads in (("1", "1"), ("2", "2")):
        out = tmp_path / seed
        subprocess.run([sys.executable, SCRIPT, "--input", "-", "--out", out, "--vocab_size", "400"], check=True,
                       input=(plain / "text.jsonl").read_bytes(), capture_output=True,
                       env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads})
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert contents(tmp_path / "1").keys() == contents(plain / "out").keys() == {*data.FILES, "meta.json"}
    assert all((tmp_path / "1" / name).read_bytes() == (plain / "out" / name).read_bytes() for name in data.FILES)


def test_documents_and_offsets(plain, texts):
    """Every document is there once, opens with <s> at its offset, holds no other special token, and meta.json counts it."""
    splits, meta = data.open_data(str(plain / "out"), 400)
    found = []
    for split, (tokens, starts) in splits.items():
        assert starts[0] == 0 and starts[-1] == len(tokens) == meta[split]["tokens"]
        assert np.array_equal(np.flatnonzero(tokens < data.N_SPECIAL), starts[:-1]) and set(tokens[starts[:-1]]) == {data.BOS}
        decoded = documents(plain / "out", split)
        assert len(decoded) == meta[split]["documents"]
        assert sum(len(text.encode()) for text in decoded) == meta[split]["bytes"]
        assert decoded == [text for text in texts if text in decoded]  # in order
        found += decoded
    assert sorted(found) == sorted(texts) and meta["vocab_size"] == 400


def test_smallest_vocabulary(tmp_path, plain, texts):
    """16 special tokens and 256 bytes: no merge at all, still exact."""
    script("--input", plain / "text.jsonl", "--out", tmp_path, "--vocab_size", 272)
    assert sorted(documents(tmp_path, "train") + documents(tmp_path, "val")) == sorted(texts)
    assert np.fromfile(tmp_path / "train.bin", np.uint16).max() < 272


def test_duplicates(tmp_path, texts):
    """Of equal documents the first stays, wherever the others are; blank ones go; both are counted."""
    once = texts[:30]
    (tmp_path / "a.jsonl").write_bytes(jsonl(once + once[::-1] + ["", " \n"]))
    (tmp_path / "b.txt").write_text(once[3])
    printed = script("--input", tmp_path / "*.*", "--out", tmp_path / "out", "--vocab_size", 300)
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert train == [t for t in once if t in train] and sorted(train + val) == sorted(once)
    assert "30 documents" in printed and "0 malformed, 33 duplicate or empty" in printed


def test_split(tmp_path):
    """Disjoint; about the share asked for; a document stays on its side when the corpus grows; never none held out."""
    documents_, sides = prose(600), []
    for n, share in ((300, 0.2), (600, 0.2), (600, 0)):
        (tmp_path / "text.jsonl").write_bytes(jsonl(random.Random(n).sample(documents_[:n], n)))
        script("--input", tmp_path / "text.jsonl", "--out", tmp_path / "out", "--vocab_size", 300, "--val_fraction", share)
        sides.append([set(documents(tmp_path / "out", split)) for split in ("train", "val")])
        assert not sides[-1][0] & sides[-1][1] and len(sides[-1][0] | sides[-1][1]) == n
    assert sides[0][0] < sides[1][0] and sides[0][1] < sides[1][1]
    assert abs(len(sides[1][1]) - 120) < 5 * (600 * 0.2 * 0.8) ** 0.5 and len(sides[2][1]) == 1


def test_tokenizer_learns_from_training_documents_only(tmp_path, plain):
    """Without the held-out documents (but for one) the tokenizer is the same."""
    train, val = documents(plain / "out", "train"), documents(plain / "out", "val")
    (tmp_path / "x.jsonl").write_bytes(jsonl(train + [min(val, key=prepare.digest)]))
    script("--input", tmp_path / "x.jsonl", "--out", tmp_path / "out", "--vocab_size", 400)
    assert len(val) > 5 and contents(tmp_path / "out")["tokenizer.json"] == contents(plain / "out")["tokenizer.json"]


def test_long_texts_are_cut(tmp_path):
    """A .txt of any shape is cut into bounded documents: at blank lines, else at lines, else anywhere. Nothing is lost."""
    rng = random.Random(0)
    paragraphs = ["\n".join(prose(rng.randint(1, 20), seed=i)) + "\n" for i in range(300)]
    for text in ("\n".join(paragraphs), "\n".join(prose(2000)), "".join(prose(2000)), "\n" * 300000, "é" * 300000):
        (tmp_path / "long.txt").write_text(text)
        pieces = list(prepare.read([str(tmp_path / "long.txt")]))
        assert len(pieces) > 2 and max(map(len, pieces)) < 2 ** 23
        assert "".join(pieces).replace("\n", "") == text.replace("\n", "")
    (tmp_path / "long.txt").write_text("\n".join(paragraphs))
    pieces = list(prepare.read([str(tmp_path / "long.txt")]))
    assert sum(piece.startswith(tuple(paragraphs)) for piece in pieces) > len(pieces) / 2


# ---- the encoder -----------------------------------------------------------------------------------------------------

@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.text(), st.sampled_from([*prepare.SPECIALS, " ", "\n", "  ", "\u3000", "'s", "'ll", "e\u0301"]))))
def test_round_trip(coders, parts):
    """decode(encode(x)) == x on any Unicode, and tiktoken gives the tokens that `tokenizers` gives, none of them special."""
    fast, slow, bpe = coders
    text = "".join(parts)
    tokens = fast(text)
    assert tokens.dtype == np.uint16 and (tokens >= data.N_SPECIAL).all()
    assert bpe.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert np.array_equal(tokens, slow(text))


def test_encoders_agree_on_every_kind_of_character(coders):
    """A regular sample of all code points, beside letters, digits, spaces, marks and apostrophes."""
    fast, slow, _ = coders
    characters = [chr(c) for c in [*range(0x3000), *range(0x3000, 0xD800, 17), *range(0xE000, 0x110000, 97)]]
    for beside in ("a", "1", " ", "!", "'", "\n "):
        text = beside.join(characters)
        assert np.array_equal(fast(text), slow(text)), beside


@pytest.mark.parametrize("unit, n", [(" ", 10 ** 6), ("\n \t\u00a0", 10 ** 6), ("a", 10 ** 5), ("ab", 10 ** 5), ("!", 10 ** 5),
                                     ("漢", 10 ** 5), ("\0", 10 ** 5), ("7", 10 ** 5), ("word ", 10 ** 5)])
def test_long_runs(coders, unit, n):
    """A page of white space, or a word without end, is encoded like all else, in seconds."""
    fast, slow, bpe = coders
    text, start = "Before" + (unit * n)[:n] + "after.", time.time()
    tokens = fast(text)
    assert time.time() - start < 30
    assert bpe.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert n > 10 ** 5 or np.array_equal(tokens, slow(text))


def test_disagreement_is_found(tmp_path, plain, monkeypatch):
    """Encoders that differ are noticed at every prepare."""
    monkeypatch.setattr(prepare, "PATTERN", r"\s+|\S+")
    with pytest.raises(SystemExit, match="error: tiktoken and tokenizers disagree"):
        prepare.prepare([str(plain / "text.jsonl")], "", tmp_path, 400, 0.1)


def test_parallel():
    """Results come in order, and reading never runs far ahead of them."""
    read = []
    results = prepare.parallel(lambda i: (time.sleep(random.random() / 1000), i)[1], (read.append(i) or i for i in range(2000)))
    for i, result in enumerate(results):
        assert i == result and len(read) - i <= 16 * (2 * os.cpu_count() + 2)
    assert i == 1999


# ---- the embedded corpus ---------------------------------------------------------------------------------------------

def test_embedded_corpus():
    """Megabytes of English, of hundreds of documents, help topics among them."""
    texts = [json.loads(line)["text"] for line in prepare.embedded_corpus()]
    assert 300 < len(texts) < 1000 and 1.2e6 < sum(map(len, texts)) < 4e6 and all(texts)
    assert any('The "with" statement' in text for text in texts) and any("deprecated" in text for text in texts)
    words = " ".join(texts).split()
    assert words.count("the") > len(words) / 50


def test_embedded_corpus_is_read_not_run(tmp_path, monkeypatch):
    """From source, in a fixed order: distinct docstrings of modules, classes and functions, and help topics; no tests."""
    long = "word " * 10 ** 5
    for path, source in {
            "b.py": f'"""{long}b"""\nraise SystemExit\nclass C:\n    """C."""\n    def f(self):\n        """f."""\n',
            "a.py": f'"""{long}a"""\nif x:\n    async def g():\n        "f."\n        def h(): "C."; "not me"\ny = "nor me"\n',
            "pydoc_data/topics.py": f"# topics\ntopics = {{'q': {long + 'q'!r}, 'p': 'topic p'}}\n",
            "none.py": "x = 1\n", "test/t.py": '"""Test."""', "json/tests/t.py": '"""Test."""',
            "site-packages/s.py": '"""S."""', "json/__init__.py": '"""J."""'}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    texts = [json.loads(line)["text"] for line in prepare.embedded_corpus()]
    assert texts == [f"{long}a\n\nf.\n\nC.", f"{long}b\n\nC.\n\nf.", "J.", long + "q", "topic p"]
    (tmp_path / "a.py").unlink()
    (tmp_path / "b.py").unlink()
    with pytest.raises(SystemExit, match="error: this Python has no documentation in .* --input"):
        prepare.embedded_corpus()


# ---- bad input -------------------------------------------------------------------------------------------------------

MALFORMED = [b"{", b'"text"', b"[1]", b"5", b"null", b"{}", b'{"text": 5}', b'{"text": null}', b'{"text": ["a"]}',
             b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"[" * 100000, b"\xff\xfe\x00", b'{"text": "a}']


def test_few_malformed_documents(tmp_path, texts):
    """Up to 1% of documents that cannot be read are skipped and counted."""
    good = jsonl(prose(1386)).splitlines()
    good[7:7] = MALFORMED
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(good))
    printed = script("--input", tmp_path / "x.jsonl", "--out", tmp_path / "out", "--vocab_size", 300)
    assert "14 malformed, 0 duplicate" in printed
    assert len(documents(tmp_path / "out", "train") + documents(tmp_path / "out", "val")) == 1386


def broken(data_):
    return data_[:-9]


def flipped(data_):
    return data_[:len(data_) // 2] + bytes([data_[len(data_) // 2] ^ 255]) + data_[len(data_) // 2 + 1:]


GOOD = jsonl(prose(1000))
BAD = {
    "many malformed": ("x.jsonl", b"\n".join(MALFORMED[:11]) + b"\n" + GOOD, "11 of 1,011 documents .* JSON with `text`"),
    "no text field": ("x.jsonl", b'{"content": "a"}\n' * 9, "9 of 9 documents"),
    "one JSON array": ("x.jsonl", json.dumps([{"text": t} for t in prose(9)]).encode(), "1 of 1 documents"),
    "Latin-1": ("x.txt", "déjà vu".encode("latin-1"), "1 of 1 documents .* not UTF-8"),
    "UTF-16": ("x.txt", "hello world\n".encode("utf-16") * 99, "not UTF-8"),
    "not JSON but random": ("x.jsonl", random.Random(0).randbytes(9999), "not UTF-8"),
    "empty": ("x.jsonl", b"", "0 distinct documents .* none is left"),
    "empty text": ("x.txt", b"", "0 distinct documents"),
    "blank": ("x.jsonl", b"\n \n\n", "0 distinct documents"),
    "empty texts": ("x.jsonl", jsonl(["", " "]), "0 distinct documents"),
    "a single document": ("x.jsonl", jsonl(["a", "a"]), "1 distinct documents with text, 1 of them held out"),
    "truncated gzip": ("x.jsonl.gz", broken(gzip.compress(GOOD)), "cannot read .*x.jsonl.gz"),
    "corrupt gzip": ("x.jsonl.gz", flipped(gzip.compress(GOOD)), "cannot read .*x.jsonl.gz"),
    "no gzip": ("x.jsonl.gz", GOOD, "cannot read .*x.jsonl.gz"),
    "corrupt zstd": ("x.jsonl.zst", flipped(ZST(GOOD)), "cannot read .*x.jsonl.zst"),
    "no zstd": ("x.jsonl.zst", GOOD, "cannot read .*x.jsonl.zst"),
    "other format": ("x.parquet", GOOD, "none of .txt .*x.parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path, name):
    """One line that says what is wrong, and nothing left behind."""
    file, content, message = BAD[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(SystemExit, match=f"^error: .*{message}[^\n]*$"):
        script("--input", tmp_path / file, "--out", tmp_path / "out", "--vocab_size", 300)
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


@pytest.mark.parametrize("flags, message", [
    (["--vocab_size", 271], "--vocab_size must be from 272 to 65535"), (["--vocab_size", 65536], "--vocab_size must be"),
    (["--val_fraction", 1], "--val_fraction"), (["--val_fraction", "nan"], "--val_fraction"),
    (["--input", "no/*.jsonl"], "no such file.*no/"), (["--input", "."], "no such file"), (["--out", ""], "--out data/NAME")])
def test_bad_flags(tmp_path, plain, flags, message):
    """Refused before anything is read or written."""
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        script("--input", plain / "text.jsonl", "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_missing_package(tmp_path, monkeypatch):
    """Without zstandard a .zst file says what to install."""
    (tmp_path / "x.jsonl.zst").write_bytes(ZST(GOOD))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(SystemExit, match="cannot read .*x.jsonl.zst: .*; pip install zstandard"):
        script("--input", tmp_path / "x.jsonl.zst", "--out", tmp_path / "out")


def test_truncated_zstd(tmp_path):
    """The line that is cut is malformed, and counted."""
    packed = ZST(GOOD[:5000]) + ZST(GOOD[5000:])
    (tmp_path / "x.jsonl.zst").write_bytes(packed[:-len(packed) // 3])
    with open(tmp_path / "all.jsonl", "wb") as f:
        f.writelines(json.dumps({"text": text}).encode() + b"\n" for text in prose(500, seed=1))
    assert " 1 malformed" in script("--input", tmp_path / "*.*", "--out", tmp_path / "out", "--vocab_size", 300)
    (tmp_path / "x.jsonl.zst").write_bytes(ZST(GOOD[:5000])[:-99])
    with pytest.raises(SystemExit, match="^error: 0 distinct documents"):  # not one block is whole
        script("--input", tmp_path / "x.jsonl.zst", "--out", tmp_path / "new", "--vocab_size", 300)


def test_endless_line(tmp_path):
    """A file without line ends comes in malformed pieces of bounded size: it is refused and does not fill the memory."""
    packer = zstandard.ZstdCompressor().compressobj()
    with open(tmp_path / "x.jsonl.zst", "wb") as f:
        f.writelines(packer.compress(b"[" * 2 ** 22) for _ in range(65))
        f.write(packer.flush())
    pieces = prepare.read([str(tmp_path / "x.jsonl.zst")])
    assert [(len(piece), prepare.digest(piece)) for piece in pieces] == [(2 ** 28, (0, 0)), (2 ** 22, (0, 0))]


def test_earlier_folder_survives(tmp_path, plain):
    """A run that fails (damaged input, full disk, no folder to write to) says so in one line; what was prepared stays."""
    out, damaged, good = tmp_path / "out", tmp_path / "x.jsonl.gz", plain / "text.jsonl"
    damaged.write_bytes(broken(gzip.compress(GOOD)))
    script("--input", good, "--out", out, "--vocab_size", 300)
    before = contents(out)
    for source, target, size in ((damaged, out, 10 ** 9), (good, out, 20000), (good, good, 10 ** 9), (good, good / "x", 10 ** 9)):
        result = subprocess.run([sys.executable, SCRIPT, "--input", source, "--out", target, "--vocab_size", "400"], text=True,
                                capture_output=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
        assert contents(out) == before


def test_interrupt(tmp_path):
    """Ctrl-C leaves nothing behind."""
    process = subprocess.Popen([sys.executable, SCRIPT, "--input", "-", "--out", tmp_path / "out"], stdin=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    while not list(tmp_path.glob("out/*/*")):  # until it waits for its input
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode and not os.listdir(tmp_path / "out")


# ---- the evaluation sets ---------------------------------------------------------------------------------------------

def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members):
    """(name, type, content) one by one, names as they are given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "/etc/passwd", len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


BLIMP = b'{"sentence_good": "It is.", "sentence_bad": "It are."}\n'
MMLU = b"What?,a,b,c,d,B\n"
PIQA = b'{"goal": "g", "sol1": "a", "sol2": "b"}\n'


@pytest.fixture
def site(monkeypatch):
    """A web server on this machine; three tasks, of one or two records, come from it. Returns {path: content}."""
    files = {
        "/BLiMP.zip": zipped(**{"x/a.jsonl": BLIMP, "__MACOSX/x/._a.jsonl": b"junk", "../../b.jsonl": BLIMP, "x/README": b"no"}),
        "/data.tar": tarred([("data/test/a_test.csv", tarfile.REGTYPE, MMLU), ("/data/test/b_test.csv", tarfile.REGTYPE, MMLU),
                             ("data/aux/mc_test.csv", tarfile.REGTYPE, b"no"), ("data/test/c_test.csv", tarfile.SYMTYPE, b""),
                             ("data/test/d_test.csv", tarfile.LNKTYPE, b""), ("data/test", tarfile.DIRTYPE, b"")]),
        "/valid.jsonl": PIQA, "/valid-labels.lst": b"1\n"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            self.send_response(200 if self.path in files else 404)
            self.end_headers()
            self.wfile.write(files.get(self.path, b""))

        def log_message(self, *args):
            pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = files["asked"] = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(prepare, "RELEASES", {
        task: (wanted, *(f"{url}/{official.rsplit('/', 1)[1]}" for official in urls))
        for task, (wanted, *urls) in prepare.RELEASES.items() if task in ("blimp", "mmlu", "piqa")})
    for task, n in (("blimp", 2), ("mmlu", 2), ("piqa", 1)):
        monkeypatch.setitem(ev.TASKS, task, ev.TASKS[task]._replace(n=n, n_files=n))
    yield files
    server.shutdown()
    server.server_close()


def test_tasks(site, tmp_path):
    """Only the wanted members, only into our folders, whatever their names are; a second run asks for nothing."""
    (tmp_path / "deep" / "out").mkdir(parents=True)
    prepare.fetch_tasks(tmp_path / "deep" / "out")
    found = {str(p.relative_to(tmp_path / "deep" / "out")): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {"blimp/a.jsonl": BLIMP, "blimp/b.jsonl": BLIMP, "mmlu/a_test.csv": MMLU, "mmlu/b_test.csv": MMLU,
                     "piqa/valid.jsonl": PIQA, "piqa/valid-labels.lst": b"1\n"}
    assert site["asked"] == ["/BLiMP.zip", "/data.tar", "/valid.jsonl", "/valid-labels.lst"]
    prepare.fetch_tasks(tmp_path / "deep" / "out")
    assert len(site["asked"]) == 4


@pytest.mark.parametrize("path, content, message", [
    ("/data.tar", None, "cannot get http://.*/data.tar: HTTP Error 404.*into .*mmlu by hand"),
    ("/data.tar", b"<html>", "cannot get http://.*data.tar: "),
    ("/data.tar", tarred([("test/a_test.csv", tarfile.REGTYPE, MMLU)]), "mmlu: 1 records in 1 files"),
    ("/data.tar", tarred([("test/a_test.csv", tarfile.REGTYPE, MMLU * 99)])[:1500], "cannot get http://.*data.tar: "),
    ("/BLiMP.zip", broken(zipped(**{"a.jsonl": BLIMP})), "cannot get http://.*BLiMP.zip: "),
    ("/BLiMP.zip", zipped(**{"a.jsonl": BLIMP, "b.jsonl": b"[" * 2 ** 25}), "b.jsonl, record 1 is wrong"),
    ("/BLiMP.zip", zipped(**{f"a{i}.jsonl": b"" for i in range(200)}), "blimp: 0 records in 99 files"),
    ("/valid-labels.lst", b"", "record 1 is wrong")])
def test_bad_tasks(site, tmp_path, path, content, message):
    """A missing, damaged or hostile release ends in one line; finished tasks stay, nothing else is left."""
    site[path] = content
    if content is None:
        del site[path]
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{message}[^\n]*$"):
        prepare.fetch_tasks(tmp_path)
    before = ("/BLiMP.zip", "/data.tar", "/valid-labels.lst").index(path)
    assert sorted(os.listdir(tmp_path)) == ["blimp", "mmlu"][:before]
    assert all(p.stat().st_size <= 2 ** 24 for p in tmp_path.rglob("*"))


def test_tasks_without_a_network(tmp_path):
    """The command, in a process whose web requests go nowhere."""
    result = subprocess.run([sys.executable, SCRIPT, "--tasks", "--out", tmp_path / "tasks"], text=True, capture_output=True,
                            env={**os.environ, "https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"})
    assert result.returncode == 1 and result.stderr.startswith("error: cannot get https://") and "by hand" in result.stderr
    assert result.stderr.count("\n") == 1 and not os.listdir(tmp_path / "tasks")


def test_official_names():
    """What is wanted of each release, by the names that its members have there; and nothing else of it."""
    def wanted(task):
        return [m for m in ("ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Test.jsonl", "ARC-V1-Feb2018-2/ARC-Challenge/ARC-Challenge-Test.jsonl",
                            "ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Dev.jsonl", "data/passive_1.jsonl", "OpenBookQA-V1-Sep2018/Data/Main/test.jsonl",
                            "OpenBookQA-V1-Sep2018/Data/Additional/test_complete.jsonl", "socialiqa-train-dev/dev.jsonl",
                            "socialiqa-train-dev/dev-labels.lst", "socialiqa-train-dev/train.jsonl", "data/test/anatomy_test.csv",
                            "data/val/anatomy_val.csv", "data/auxiliary_train/mc_test.csv", "valid.jsonl", "valid-labels.lst")
                if prepare.Path(m).match(prepare.RELEASES[task][0])]
    assert prepare.RELEASES.keys() == ev.TASKS.keys() - {"heldout"}
    assert [wanted(task)[0].split("/")[-1] for task in ("arc_easy", "arc_challenge", "mmlu", "openbookqa")] == [
        "ARC-Easy-Test.jsonl", "ARC-Challenge-Test.jsonl", "anatomy_test.csv", "test.jsonl"]
    assert [len(wanted(task)) for task in ("arc_easy", "arc_challenge", "mmlu", "openbookqa")] == [1, 1, 1, 1]
    assert wanted("socialiqa") == ["socialiqa-train-dev/dev.jsonl", "socialiqa-train-dev/dev-labels.lst"]
    assert {"valid.jsonl", "valid-labels.lst"} <= set(wanted("piqa")) and "data/passive_1.jsonl" in wanted("blimp")
