"""
Turn text into a prepared folder: drop duplicates, split, train a byte-level BPE, encode.

    python prepare.py                                                # Python's own documentation -> data/pydocs
    python prepare.py --input 'hplt/*.jsonl.zst' --out data/hplt --vocab_size 51200
    zstdcat x.jsonl.zst | python prepare.py --input - --out data/x   # JSON lines on standard input

Inputs are .jsonl, .jsonl.gz, .jsonl.zst (the field `text`) and .txt (a document; a long one is cut at blank lines).
They are streamed three times (hash, BPE, encode): memory grows by some 40 bytes per document, not with the text.
"""
import argparse
import array
import ast
import collections
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import tiktoken
import tokenizers
from tqdm import tqdm

from configurator import die
from data import FILES, VERSION, fingerprint
from model import BOS, N_SPECIAL

SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<mask>"] + [f"<special_{i}>" for i in range(11)]
# GPT-2's splitting pattern, which is what tokenizers' ByteLevel uses too
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BPE_BYTES = 2 ** 30           # the BPE is trained on the first GiB of text
LINE, CUT = 2 ** 28, 2 ** 16  # longest JSON line; size from which a .txt is cut at the next blank line
MALFORMED, EMPTY = 0, 1       # stand in for a document's hash


# ----------------------------------------------------------------------------------------------------------------------
# reading

def embedded_corpus():
    """English that every Python has: its help topics, and one document per standard module made of the module's distinct
    docstrings; read from source with ast, never imported. Tests and site-packages are left out."""
    root, documents = sysconfig.get_paths()["stdlib"], []
    for path in sorted(glob.glob(os.path.join(glob.escape(root), "**", "*.py"), recursive=True)):
        if re.search(r"/(site-packages|dist-packages|tests?|idle_test|lib2to3)/|/test_", path[len(root):]):
            continue
        try:
            with open(path, encoding="utf-8") as f:
                tree = ast.parse(f.read())
        except (SyntaxError, ValueError):
            continue
        if path.endswith("pydoc_data/topics.py"):
            documents += ast.literal_eval(tree.body[-1].value).values()
            continue
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
        documents.append("\n\n".join(dict.fromkeys(filter(None, map(ast.get_docstring, nodes)))))
    if sum(map(len, documents)) < 10 ** 6:
        die(f"this Python has no documentation in {root} (a minimal installation?): give your own text with --input")
    return documents


def read(paths, what):
    """Documents as they stand in the files, a line of JSON as bytes or a text as str; with a progress bar."""
    bar = tqdm(total=sum(map(os.path.getsize, paths)), desc=what, unit="B", unit_scale=True, disable=None)
    for path in paths:
        before = bar.n
        with open(path, "rb") as file:
            try:
                if path.endswith(".txt"):
                    text, piece, size = io.TextIOWrapper(file, encoding="utf-8", newline=""), [], 0
                    for line in iter(lambda: text.readline(CUT), ""):
                        piece, size = piece + [line], size + len(line)
                        if size >= CUT and (not line.strip() or size >= 8 * CUT):
                            yield "".join(piece)
                            piece, size = [], 0
                    yield "".join(piece)
                else:
                    lines = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
                    if path.endswith(".zst"):
                        import zstandard
                        frames = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
                        lines = io.BufferedReader(frames, 2 ** 20)
                    for line in iter(lambda: lines.readline(LINE), b""):
                        yield line
                        bar.update(before + file.tell() - bar.n)
            except UnicodeDecodeError:
                yield b"not UTF-8"
            except ImportError:
                die(f"{path} needs a package: pip install zstandard")
            except Exception as error:  # every format has its own kind
                die(f"{path} is damaged: {error}")
        bar.update(before + os.path.getsize(path) - bar.n)
    bar.close()


def parse(raw):
    """The text of a document; None if there is none, or none that can be encoded (a lone surrogate)."""
    try:
        text = raw if isinstance(raw, str) or not raw.strip() else json.loads(raw)["text"]
        return str(text.encode() if isinstance(text, str) else text, "utf-8")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


# ----------------------------------------------------------------------------------------------------------------------
# hashing and encoding, on all cores

@functools.cache
def encoder(tokenizer_json):
    """text -> tokens, by `tokenizers` and, several times as fast with equal results, by tiktoken built from its merges."""
    slow = tokenizers.Tokenizer.from_str(tokenizer_json)
    slow.encode_special_tokens = True  # a literal <mask> in a text is text
    plain = [b for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or b >= 174]  # bytes that BPE spells as themselves
    byte = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)}
    ranks = {bytes(byte[c] for c in token): i for token, i in slow.get_vocab().items() if i >= N_SPECIAL}
    fast = tiktoken.Encoding("nanodual", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode_slowly(text):
        return np.array(slow.encode(text, add_special_tokens=False).ids, dtype=np.uint16)

    def encode(text):
        if len(text) > 2 ** 16 and re.search(r"\s{65536}", text):  # tiktoken gives up on huge runs of white space
            return encode_slowly(text)
        return fast.encode_to_numpy(text).astype(np.uint16)
    return encode, encode_slowly


def hash_batch(batch):
    return [MALFORMED if text is None else EMPTY if not text else
            int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") for text in map(parse, batch)]


def encode_batch(batch, tokenizer_json):
    """<s> and the tokens of each document, and its bytes."""
    encode, _ = encoder(tokenizer_json)
    return [(np.append(np.uint16(BOS), encode(text)), len(text.encode())) for text in map(parse, batch)]


def parallel(pool, function, documents, *args):
    """function over batches of documents, in order, on all cores, with a few batches in memory at a time."""
    waiting = collections.deque()
    for batch in iter(lambda: list(itertools.islice(documents, 64)), []):
        waiting.append(pool.submit(function, batch, *args))
        if len(waiting) > 4 * os.cpu_count():
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()


# ----------------------------------------------------------------------------------------------------------------------
# the three passes

def prepare(paths, source, out, vocab_size, val_fraction):
    pool = ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork"))
    # 1. hash: which documents are the first of their kind, and which of these are held out
    hashes = np.array(array.array("Q", parallel(pool, hash_batch, read(paths, "reading"))), dtype=np.uint64)
    malformed, empty = np.count_nonzero(hashes == MALFORMED), np.count_nonzero(hashes == EMPTY)
    if malformed > len(hashes) / 100:
        die(f"{malformed:,} of {len(hashes):,} documents in {source} are no JSON with a `text`, or not UTF-8")
    keep = np.zeros(len(hashes), dtype=bool)
    keep[np.unique(hashes, return_index=True)[1]] = True
    keep &= hashes > EMPTY
    held_out = keep & ((hashes < val_fraction * 2.0 ** 64) | (hashes == hashes[keep].min(initial=2 ** 64 - 1)))
    if keep.sum() == held_out.sum():
        die(f"{source} has {keep.sum()} distinct documents with text, {held_out.sum()} held out: none is left to train on")

    # 2. the BPE, from the training documents
    def training_text():
        size = 0
        for raw in itertools.compress(read(paths, "BPE"), keep & ~held_out):
            yield (text := parse(raw))
            sample.append(text) if size < 10 ** 6 else None
            if (size := size + len(text)) > BPE_BYTES:
                return
    sample, bpe, byte_level = [], tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
    bpe.pre_tokenizer, bpe.decoder = byte_level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(training_text(), tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False))
    encode, encode_slowly = encoder(tokenizer_json := bpe.to_str(pretty=True))
    for text in sample:
        if not np.array_equal(encode(text), encode_slowly(text)):
            die(f"tiktoken and tokenizers disagree on {text[:80]!r}: please report this")

    # 3. encode; every file under a temporary name until all are complete, meta.json last
    tmp = {name: os.path.join(out, name + ".tmp") for name in (*FILES, "meta.json")}
    counts, start = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in ("train", "val")}, time.time()
    with open(tmp["tokenizer.json"], "w", encoding="utf-8") as f:
        f.write(tokenizer_json)
    files = {name: open(tmp[name], "wb") for name in FILES if name != "tokenizer.json"}
    documents = parallel(pool, encode_batch, itertools.compress(read(paths, "encoding"), keep), tokenizer_json)
    for (tokens, size), val in zip(documents, held_out[keep]):
        split = "val" if val else "train"
        files[split + ".idx"].write(np.uint64(counts[split]["tokens"]))
        files[split + ".bin"].write(tokens)
        for key, n in (("documents", 1), ("tokens", len(tokens)), ("bytes", size)):
            counts[split][key] += n
    for name, f in files.items():
        if name.endswith(".idx"):
            f.write(np.uint64(counts[name[:-4]]["tokens"]))
        f.close()
    seconds = time.time() - start
    meta = {"version": VERSION, "source": source, "vocab_size": bpe.get_vocab_size(), **counts,
            "files": {name: fingerprint(tmp[name]) for name in FILES}}
    with open(tmp["meta.json"], "w") as f:
        json.dump(meta, f, indent=1)
    for name in tmp:
        os.replace(tmp[name], os.path.join(out, name))
    total = {key: counts["train"][key] + counts["val"][key] for key in counts["val"]}
    print(f"{out}: {total['documents']:,} documents ({counts['val']['documents']:,} held out), "
          f"{len(hashes) - malformed - empty - total['documents']:,} duplicates, {malformed:,} malformed and {empty:,} empty dropped\n"
          f"{total['tokens']:,} tokens of a {meta['vocab_size']:,} BPE, {total['bytes'] / total['tokens']:.2f} bytes/token, "
          f"encoded at {total['bytes'] / seconds / 1e6:.1f} MB/s; train.bin has hash {meta['files']['train.bin'][1]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=[], help="files or globs, or - for JSON lines on standard input")
    parser.add_argument("--out", default="", help="folder to write; data/pydocs without --input")
    parser.add_argument("--vocab_size", type=int, default=1024, help="entries of the BPE, at most 65,535 (paper: 51200)")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="share of documents held out, by their hash")
    args = parser.parse_args()
    if not N_SPECIAL + 256 <= args.vocab_size <= 65535:
        die(f"--vocab_size must be from {N_SPECIAL + 256} (special tokens and bytes) to 65535, got {args.vocab_size}")
    if not 0 <= args.val_fraction < 1:
        die(f"--val_fraction is a share of the documents, from 0 to less than 1, got {args.val_fraction}")
    if args.input and not args.out:
        die("say where to put the prepared data: --out data/NAME")
    out, spool = args.out or "data/pydocs", None
    os.makedirs(out, exist_ok=True)
    if args.input in ([], ["-"]):  # what is no file becomes one for a while
        spool = os.path.join(out, "spool.jsonl")
        with open(spool, "wb") as f:
            if args.input:
                shutil.copyfileobj(sys.stdin.buffer, f)
            else:
                f.writelines(json.dumps({"text": text}).encode() + b"\n" for text in embedded_corpus())
        paths, source = [spool], "standard input" if args.input else f"documentation of Python {sys.version.split()[0]}"
    else:
        paths, source = [p for pattern in args.input for p in sorted(glob.glob(pattern, recursive=True)) or [pattern]], args.input
    for path in paths:
        if not os.path.isfile(path):
            die(f"no such file: {path}")
        if not path.endswith((".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")):
            die(f"{path}: expected a .txt, .jsonl, .jsonl.gz or .jsonl.zst file")
    try:
        prepare(paths, source, out, args.vocab_size, args.val_fraction)
    finally:
        for name in ["spool.jsonl"] + [name + ".tmp" for name in (*FILES, "meta.json")]:
            if os.path.exists(path := os.path.join(out, name)):
                os.remove(path)
