"""
Turn text into a prepared folder: drop duplicates, hold out a share, train a tokenizer, encode.

    python prepare.py                                   # Python's own documentation -> data/pydocs
    python prepare.py --input mine.txt --out data/mine
    python prepare.py --input mine.txt --out data/mine --tokenizer SmolLM2/tokenizer.json
    python prepare.py --input 'hplt/*.jsonl.zst' --out data/hplt --vocab_size 51200
    python prepare.py --tasks                           # the evaluation sets -> data/tasks

Inputs are .jsonl, .jsonl.gz or .jsonl.zst (the field `text` of each line is a document), .txt (cut
at blank lines into documents of about 64 KiB, or 1/100 of a small input), or - (JSON lines on
standard input). The text is never held as a whole: it is read in passes (hash, learn, encode), and
memory grows by 64 bytes a document at most.
"""

import argparse
import ast
import glob
import gzip
import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from errors import die, report

if __name__ == "__main__":
    sys.excepthook = report  # before the large imports: a missing package is one line too

import numpy as np
import tiktoken
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm

from data import FILES, FORMAT_VERSION, fingerprint, token_dtype
from tokenizer import (
    SPECIAL_TOKENS,
    find_special_ids,
    is_ours,
    parse_tokenizer,
    read_tokenizer,
    train_tokenizer,
)

FORMATS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")

# GPT-2's splitting pattern, as ByteLevel has it. The group is for speed: nothing in it looks ahead.
PATTERN = r"(?:'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"


# ---- reading -------------------------------------------------------------------------------------
def embedded_corpus():
    """Return Python's help topics and, for each standard module, its distinct docstrings.

    The modules are parsed, never imported.
    """
    root = os.path.dirname(os.__file__)
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = []
    for folder, subfolders, _ in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - skipped)  # os.walk goes on with these
        for path in sorted(Path(folder).glob("*.py")):
            tree = ast.parse(path.read_bytes())
            if path.match("pydoc_data/topics.py"):
                topics = ast.literal_eval(tree.body[-1].value)
                texts.extend(topics.values())
            nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
            docstrings = filter(None, map(ast.get_docstring, nodes))
            texts.append("\n\n".join(dict.fromkeys(docstrings)))

    if sum(map(len, texts)) < 10**6:
        die(f"this Python has no documentation in {root}: give your own text with --input")
    return [text for text in texts if text]


def unpack_zstd(chunks):
    """Unpack the chunks of a .zst file, and raise EOFError if the file was cut short.

    The reader that comes with zstandard would take a truncated file for a complete one.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    for packed in chunks:
        while packed:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise OSError(error) from error
            packed = frame.unused_data
            if frame.eof:
                frame = None
    if frame:
        raise EOFError("it ends in the middle of a frame")


def read_lines(path):
    """Yield the lines of a file; a line of more than 256 MiB comes in pieces."""
    open_file = gzip.open if path.endswith(".gz") else open
    with open_file(path, "rb") as file:
        # 1 KiB at a time: a .zst may unpack to 30,000 times its size.
        chunks = iter(partial(file.read, 2**10), b"")
        if path.endswith(".zst"):
            chunks = unpack_zstd(chunks)

        line = bytearray()
        for chunk in chunks:
            for part in chunk.splitlines(keepends=True):
                line += part
                if line.endswith(b"\n") or len(line) >= 2**28:
                    yield bytes(line)
                    line.clear()
        yield bytes(line)


def cut_text(path, size):
    """Yield pieces of `size` characters, each continued to the next blank line.

    If there is none within 64 lines, or another `size` characters, the piece ends there.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        while piece := file.read(size):
            for _ in range(64):
                line = file.readline(2**10)
                if not line.strip():
                    break
                piece += line
                if len(piece) >= 2 * size:
                    break
            yield piece


def parse(raw, is_json):
    """Return the text of a line of JSON (its field `text`) or a piece of .txt; and its problem."""
    try:
        text = json.loads(raw)["text"] if is_json else raw
        text.encode()  # refuses what is no string, and bytes that are not UTF-8
    except UnicodeError:
        return "", "is not UTF-8; convert it, for example: iconv -f latin1 -t utf-8"
    except (LookupError, TypeError, AttributeError):
        return "", 'has no text in a field named "text"'
    except (ValueError, RecursionError):
        return "", "is not a line of JSON"
    return text, ""


def read_documents(paths):
    """Yield the text of every document, in order, and what is wrong with it, "" if nothing is.

    A .txt file is cut into pieces of 65,536 characters or, if all input is small, into about 100.
    """
    input_size = sum(os.path.getsize(path) for path in paths)
    piece_size = min(max(input_size // 100, 2**10), 2**16)
    for path in paths:
        is_json = not path.endswith(".txt")
        pieces = filter(bytes.strip, read_lines(path)) if is_json else cut_text(path, piece_size)
        try:
            for number, piece in enumerate(pieces, start=1):
                text, problem = parse(piece, is_json)
                if problem:
                    problem = f"document {number} of {path} {problem}"
                yield text, problem
        except (OSError, EOFError, zlib.error) as error:
            die(f"cannot read {path}: {error}")


def read_texts(paths, wanted, title):
    """Yield the texts of the documents that the boolean array `wanted` marks."""
    documents = tqdm(read_documents(paths), title, len(wanted), disable=None)
    for is_wanted, (text, _) in zip(wanted, documents):
        if is_wanted:
            yield text


# ---- choosing ------------------------------------------------------------------------------------
def hash_documents(paths):
    """Return each document's hash (0: blank or malformed) and size, and how many are malformed."""
    hashes = array("Q")
    sizes = array("q")
    problems = 0
    first_problem = ""
    for text, problem in tqdm(read_documents(paths), "hash", disable=None):
        content = text.encode()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little") if text.strip() else 0)
        sizes.append(len(content))
        if problem:
            problems += 1
            first_problem = first_problem or problem

    if problems > len(hashes) / 100:
        die(f"{problems:,} of {len(hashes):,} documents cannot be used: {first_problem}")
    return np.asarray(hashes), np.asarray(sizes), problems


def choose_split(hashes, sizes, val_fraction):
    """Return two boolean arrays: which documents to keep, and which of those to hold out.

    The first of equal documents is kept. Those with small hashes are held out, so a document stays
    on its side when the corpus grows. In a small corpus chance may be far off the share of text
    that was asked for: there, documents are held out one by one until the share is reached.
    """
    unique, order = np.unique(hashes, return_index=True)
    order = order[unique > 0]  # the first of equal documents, in the order of their hashes
    if len(order) < 2:
        die(
            f"distinct documents with text: {len(order)}; with one held out, none is left to train "
            'on; give more text, or one document a line, {"text": "..."}, in a .jsonl file'
        )
    keep = np.zeros(len(hashes), bool)
    keep[order] = True
    val = keep & (hashes <= val_fraction * 2.0**64)

    wanted = val_fraction * sizes[keep].sum()  # bytes
    is_near = wanted / 2 <= sizes[val].sum() <= 2 * wanted
    if not is_near or val.sum() in (0, len(order)):
        val[:] = False
        held_out = 0
        for document in order[:-1]:  # the last one is left to train on
            if held_out < wanted and held_out + sizes[document] <= 2 * wanted:
                val[document] = True
                held_out += sizes[document]
        if not val.any():
            val[order[0]] = True
    return keep, val


# ---- encoding ------------------------------------------------------------------------------------
def has_long_run(text, limit=2**13):
    """Say whether a block of `limit` characters is all white space, or all one word.

    Every run of twice that length contains such a block.
    """
    blocks = (text[i : i + limit] for i in range(0, len(text) - limit + 1, limit))
    return any(len(block.split(None, 1)) < 2 for block in blocks)


def make_encoder(tokenizer, dtype):
    """Return a function from a list of texts to a list of their tokens; it uses all cores."""

    def encode_slowly(texts):
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    if not is_ours(tokenizer):
        return encode_slowly

    # BPE spells a byte as a character: itself if that is visible, else the next one from 256 on.
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = dict(zip(sorted(ByteLevel.alphabet()), visible + hidden))
    ranks = {}
    for token, rank in tokenizer.get_vocab().items():
        if token not in SPECIAL_TOKENS:
            ranks[bytes(byte_of[character] for character in token)] = rank

    # Without a special token, tiktoken would look for the empty string at every character.
    unused = {"<unk>": 0}
    coder = tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=unused)
    pool = ThreadPoolExecutor(os.cpu_count())  # threads will do: tiktoken releases Python's lock

    def encode_text(text):
        # tiktoken gives up on a million spaces; old versions are slow on endless words.
        if has_long_run(text):
            return encode_slowly([text])[0]
        return coder.encode_to_numpy(text, disallowed_special=()).astype(dtype)

    def encode(texts):
        return list(pool.map(encode_text, texts))

    return encode


def take(texts, size):
    """Yield texts until they add up to `size` bytes."""
    taken = 0
    for text in texts:
        yield text
        taken += len(text.encode())
        if taken >= size:
            break


def encode_corpus(texts, val, encode, bos, folder):
    """Write train.bin and val.bin; return how many tokens each document has, with its `bos`.

    `texts` is an iterator, and is read batch by batch.
    """
    lengths = np.zeros(len(val), np.uint64)
    document = 0
    with open(folder / "train.bin", "wb") as train_file, open(folder / "val.bin", "wb") as val_file:
        # At most 1,024 documents and about 4 MB at a time: memory does not grow with the text.
        while batch := list(islice(take(texts, 2**22), 2**10)):
            for tokens in encode(batch):
                tokens = np.append(tokens.dtype.type(bos), tokens)
                file = val_file if val[document] else train_file
                file.write(tokens)
                lengths[document] = len(tokens)
                document += 1
    return lengths


def write_meta(folder, source, vocab_size, val, sizes, lengths):
    """Write where the documents start, and meta.json: the counts, and a hash of every file."""
    meta = {"version": FORMAT_VERSION, "source": source, "vocab_size": vocab_size}
    for split, part in (("train", ~val), ("val", val)):
        starts = np.cumsum(np.append(np.uint64(0), lengths[part]))
        starts.tofile(folder / f"{split}.idx")
        counts = {
            "documents": part.sum(),
            "tokens": lengths[part].sum(),
            "bytes": sizes[part].sum(),
        }
        meta[split] = {name: int(count) for name, count in counts.items()}
    meta["files"] = {name: fingerprint(folder / name) for name in FILES}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    return meta


# ---- the script ----------------------------------------------------------------------------------
def prepare(paths, source, folder, args):
    """Write the files of a prepared folder, and say what is in them; return meta.json."""
    if args.tokenizer:  # before the long passes, since it may be unusable
        tokenizer_json = read_tokenizer(args.tokenizer)

    # First pass: which documents to keep, and which to hold out?
    hashes, sizes, malformed = hash_documents(paths)
    keep, val = choose_split(hashes, sizes, args.val_fraction)
    train = keep & ~val
    dropped = len(keep) - keep.sum() - malformed
    print(
        f"{keep.sum():,} documents, {val.sum():,} of them held out "
        f"({sizes[val].sum() / sizes[keep].sum():.1%} of the text); "
        f"dropped {malformed:,} malformed, {dropped:,} duplicate or empty"
    )

    # Second pass: learn the tokenizer from the first 256 MiB of the training documents.
    if not args.tokenizer:
        texts = read_texts(paths, train, "learn")
        tokenizer_json = train_tokenizer(take(texts, 2**28), args.vocab_size)
    (folder / "tokenizer.json").write_bytes(tokenizer_json.encode())

    # Compare the two encoders on the first 512 KiB.
    tokenizer = parse_tokenizer(tokenizer_json)
    vocab_size = 1 + max(tokenizer.get_vocab().values())
    encode = make_encoder(tokenizer, token_dtype(vocab_size))
    for text in take(read_texts(paths, train, "compare"), 2**19):
        if encode([text])[0].tolist() != tokenizer.encode(text, add_special_tokens=False).ids:
            die(f"tiktoken and tokenizers disagree on {text[:80]!r}: upgrade both, or report this")

    # Third pass: encode.
    start = time.perf_counter()
    texts = read_texts(paths, keep, "encode")
    bos = find_special_ids(tokenizer_json).bos
    lengths = encode_corpus(texts, val[keep], encode, bos, folder)
    speed = sizes[keep].sum() / (time.perf_counter() - start)
    meta = write_meta(folder, source, vocab_size, val[keep], sizes[keep], lengths)
    print(
        f"{lengths.sum():,} tokens, {sizes[keep].sum() / lengths.sum():.2f} bytes/token, "
        f"{speed / 1e6:.1f} MB/s; train.bin has hash {meta['files']['train.bin'][1]}"
    )
    return meta


def next_command(out):
    """Return the command that trains the demo on a prepared folder."""
    command = ["python", "train.py", "config/demo.py"]
    if Path(out) != Path("data/pydocs"):
        command += [f"--data_dir={out}", f"--out_dir={Path('out', Path(out).name)}"]
    return shlex.join(command)


def parse_arguments():
    """Return the flags; refuse what is wrong before any file is read."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", default=[], metavar="FILE", help="files or globs of text, or -")
    add("--out", metavar="FOLDER", help="where to write (data/pydocs; with --tasks, data/tasks)")
    add("--vocab_size", type=int, help="tokens of the tokenizer to be trained (1024)")
    add("--tokenizer", metavar="FILE", help="use this Hugging Face tokenizer.json, train none")
    add("--val_fraction", type=float, default=0.1, help="share of the text to hold out (0.1)")
    add("--tasks", action="store_true", help="download the evaluation sets; needs no text")
    args = parser.parse_args()

    if args.tasks and (args.input or args.tokenizer):
        die("--tasks goes with --out alone")
    if args.input and not args.out:
        die("--input needs --out data/NAME")
    if args.tokenizer and args.vocab_size is not None:
        die("--vocab_size is for a new tokenizer: with --tokenizer, leave it out")
    if args.vocab_size is None:
        args.vocab_size = 1024
    smallest = len(SPECIAL_TOKENS) + 256
    if not smallest <= args.vocab_size <= 65535:
        die(f"--vocab_size must be from {smallest} to 65535")
    if not 0 <= args.val_fraction < 1:
        die("--val_fraction must be a share from 0 (one document) to less than 1")
    return args


def find_files(patterns):
    """Return the files that match the globs, sorted within each."""
    paths = []
    for pattern in patterns:
        paths += sorted(glob.glob(pattern, recursive=True)) or [pattern]
    for path in paths:
        if path != "-" and not (os.path.isfile(path) and path.endswith(FORMATS)):
            die(f"no such file, or none of {' '.join(FORMATS)}: {path}")
    return paths


def main():
    args = parse_arguments()
    if args.tasks:
        from tasks import download_tasks

        download_tasks(Path(args.out or "data/tasks"))
        return

    paths = find_files(args.input)
    out = Path(args.out or "data/pydocs")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=out) as folder:
        folder = Path(folder)
        spool = folder / "stdin.jsonl"  # what is not a file becomes one, to be read in passes
        if not paths:
            lines = [json.dumps({"text": text}) + "\n" for text in embedded_corpus()]
            spool.write_text("".join(lines))
            paths = [str(spool)]
        if "-" in paths:
            with open(spool, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            paths = [str(spool) if path == "-" else path for path in paths]

        prepare(paths, args.input or f"Python {sys.version}", folder, args)
        for name in (*FILES, "meta.json"):  # meta.json last: it has the hashes of the others
            os.replace(folder / name, out / name)
    print(f"{out} is ready. Next: {next_command(out)}")


if __name__ == "__main__":
    main()
