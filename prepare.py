"""
Turn text into a prepared folder: hold out a part, train a tokenizer, encode.

    python prepare.py                                   # Python's own documentation -> data/pydocs
    python prepare.py --input mine.txt notes/ --out data/mine
    python prepare.py --input 'train/*' --val 'dev/*' --out data/mine
    python prepare.py --input mine.txt --out data/mine --tokenizer SmolLM2/tokenizer.json
    python prepare.py --input 'hplt/*.jsonl.zst' --out data/hplt --vocab_size 51200
    python prepare.py --tasks                           # the evaluation sets -> data/tasks

Inputs are files, folders (every file in them that is not hidden), globs, or - for standard input.
A file may be compressed (.gz, .zst). In JSON lines (.jsonl, .json, .ndjson) the field `text` of
each line is a document. Any other file is plain UTF-8 text, cut at blank lines or line ends
into documents of about 2,000 to 4,000 characters. Standard input is JSON lines if it begins with {.

--val names the files to hold out. Without it, a share of the text is held out: JSON documents by
their hash, so that each stays on its side when the corpus grows, and the end of every plain text.

The text is never in memory as a whole: it is read in passes (hash, learn, encode), and memory
grows by at most 64 bytes per document.
"""

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
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from errors import die, report

if __name__ == "__main__":
    sys.excepthook = report  # before the large imports, to report a missing package in one line too

import numpy as np
import tiktoken
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm

from configurator import make_parser
from data import FILES, FORMAT_VERSION, fingerprint, token_dtype
from tokenizer import (
    SPECIAL_TOKENS,
    find_special_ids,
    is_ours,
    parse_tokenizer,
    read_tokenizer,
    train_tokenizer,
)

JSON_LINES = (".jsonl", ".json", ".ndjson")

# How to turn a file of another kind into text.
PANDAS = (
    "in Python, pandas.read_{0}('{1}').to_json('{1}.jsonl', orient='records', lines=True), "
    "with the text in a column named text"
)
CONVERSIONS = {
    ".csv": PANDAS,
    ".parquet": PANDAS,
    ".docx": "pandoc {1} -o {1}.txt",
    ".pdf": "pdftotext {1}",
    ".zip": "unzip {1} -d FOLDER, then --input FOLDER",
}

# A plain-text document has at least this many characters, and seldom more than twice as many.
PIECE = 2**11

# GPT-2's splitting pattern, as in ByteLevel. The group is for speed: nothing in it looks ahead.
PATTERN = r"(?:'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"

# The README's table: up to this many bytes of training text, how many ids, and what to train with.
ROWS = [
    (1.5e5, 1024, "config/demo.py --repetitions=32 --max_steps=0"),  # more would overfit
    (8e6, 1024, "config/demo.py"),
    (4e7, 4096, "config/mini.py"),
    (5e8, 8192, "config/small.py"),
    (float("inf"), 51200, "config/large.py"),
]
EMBEDDED = Path("data/pydocs")
WINDOW = 256  # tokens in a window of config/demo.py


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
        subfolders[:] = sorted(set(subfolders) - skipped)  # os.walk descends into these
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


def import_zstd():
    """Return the module that reads .zst files: Python's own from 3.14 on, a package before that."""
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd
    return zstd


def open_text(path):
    """Open a file to read its text: decompressed, CR LF as LF, without a byte order mark.

    A byte that is not UTF-8 becomes a lone surrogate, which no valid text has.
    """
    open_file = open
    if path.endswith(".gz"):
        open_file = gzip.open
    elif path.endswith(".zst"):
        zstd = import_zstd()
        options = {zstd.DecompressionParameter.window_log_max: 31}
        open_file = partial(zstd.open, options=options)
    return open_file(path, "rt", encoding="utf-8-sig", errors="surrogateescape")


def get_ending(path):
    """Return the extension of a file name; for x.jsonl.gz, it is .jsonl."""
    unpacked = path.removesuffix(".gz").removesuffix(".zst")
    return os.path.splitext(unpacked)[1].lower()


def cut_text(file):
    """Yield the pieces of a plain text, each of them a document; together they make up all of it.

    A piece ends at the first blank line after PIECE characters, or else at the first line end
    after twice as many. Only a line of more than 16 * PIECE characters is itself cut.
    """
    piece = ""
    while line := file.readline(16 * PIECE):
        piece += line
        wanted = PIECE if line.isspace() else 2 * PIECE
        if len(piece) >= wanted:
            yield piece
            piece = ""
    yield piece


def read_pieces(path):
    """Yield the lines of a JSON lines file, or the pieces of a plain text."""
    with open_text(path) as file:
        pieces = cut_text(file)
        if get_ending(path) in JSON_LINES:
            # A line that never ends is read in parts, so that it does not fill up memory.
            pieces = iter(partial(file.readline, 2**28), "")
        try:
            yield from pieces
        except Exception as error:  # the disk, gzip, zlib and zstd have errors of their own
            die(f"cannot read {path}: {error}")


def parse(piece, is_json):
    """Return the text of a document, and what is wrong with it: "" if nothing is."""
    if "\0" in piece:
        return "", "has a NUL byte: convert the file from UTF-16, or leave it out if it is not text"
    try:
        text = json.loads(piece)["text"] if is_json else piece
        text.encode()  # refuses what is not a string, and lone surrogates
    except UnicodeError:
        return "", "is not UTF-8: convert the file from the encoding that it was saved in"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", 'is not a JSON object with a string "text" (each line must be one)'
    return text, ""


def read_documents(paths):
    """For every document, yield the number of its file, its text, and what is wrong with it."""
    for i, path in enumerate(paths):
        is_json = get_ending(path) in JSON_LINES
        line = 1
        for piece in read_pieces(path):
            if piece.strip():
                text, problem = parse(piece, is_json)
                yield i, text, problem and f"{path}, line {line}, {problem}"
            line += piece.count("\n")


def read_texts(paths, wanted, title):
    """Yield the texts of the documents that the boolean array `wanted` marks."""
    documents = tqdm(read_documents(paths), title, len(wanted), disable=None)
    for is_wanted, (_, text, _) in zip(wanted, documents):
        if is_wanted:
            yield text


# ---- choosing ------------------------------------------------------------------------------------
def hash_documents(paths):
    """Return the hash (0 if empty) and the size of every document, and how many each file has.

    Print how many are malformed; refuse more than 1%.
    """
    hashes, sizes, files = array("Q"), array("q"), array("I")
    problems = 0
    first_problem = ""
    for file, text, problem in tqdm(read_documents(paths), "hash", disable=None):
        content = text.encode()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little") if text.strip() else 0)
        sizes.append(len(content))
        files.append(file)
        if problem:
            problems += 1
            first_problem = first_problem or problem

    message = f"{problems:,} of {len(hashes):,} documents are malformed, the first: {first_problem}"
    if problems > len(hashes) / 100:
        die(message)
    if problems:
        print(message)
    counts = np.bincount(files, minlength=len(paths))
    return np.asarray(hashes), np.asarray(sizes), counts


def hold_out(paths, hashes, sizes, counts, val_fraction):
    """Return which documents to hold out if the user names none, by one rule for each kind of file.

    Of the JSON documents, those with small hashes are held out; of each plain text, the last
    pieces, until that share of all plain text so far is held out. So a book loses its end, and
    about one in ten of many short notes is held out.
    """
    val = np.zeros(len(hashes), bool)
    total = held_out = 0  # bytes of plain text
    end = 0
    for path, count in zip(paths, counts):
        start, end = end, end + count
        if get_ending(path) in JSON_LINES:
            val[start:end] = hashes[start:end] <= val_fraction * 2.0**64
            continue
        total += sizes[start:end].sum()
        for i in reversed(range(start, end)):
            if held_out >= val_fraction * total:
                break
            val[i] = True
            held_out += sizes[i]
    return val


def choose_split(paths, hashes, sizes, counts, n_val_files, val_fraction):
    """Return two boolean arrays: which documents to train on, and which to hold out.

    Only the first of equal documents is kept, so that none is on both sides; --val files come
    first. This applies to plain text too: pieces of that size are equal only if they are copies.
    """
    keep = np.zeros(len(hashes), bool)
    _, first = np.unique(hashes, return_index=True)
    keep[first] = True
    keep &= hashes > 0

    if n_val_files:
        val = keep.copy()
        val[counts[:n_val_files].sum() :] = False
    else:
        val = keep & hold_out(paths, hashes, sizes, counts, val_fraction)
        if val.sum() in (0, keep.sum()):  # there is little text: hold out the last document
            val = keep & (np.cumsum(keep) == keep.sum())
    train = keep & ~val
    if not train.any() or not val.any():
        die(
            f"of {len(hashes)} documents, {train.sum()} are left to train on and {val.sum()} to "
            "hold out (the rest are empty, or copies of these): give more text (plain text is "
            f"cut at line ends into documents of about {PIECE:,} characters)"
        )
    return train, val


# ---- encoding ------------------------------------------------------------------------------------
def make_coder(tokenizer):
    """Return the tiktoken encoder that is equivalent to one of our tokenizers."""
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
    return tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=unused)


def has_long_run(text, limit=2**13):
    """Return whether a block of `limit` characters is all white space, or all one word.

    Every run of twice that length contains such a block.
    """
    blocks = (text[i : i + limit] for i in range(0, len(text) - limit + 1, limit))
    return any(len(block.split(None, 1)) < 2 for block in blocks)


def make_encoder(tokenizer, dtype):
    """Return a function from a list of texts to a list of their tokens; it uses all cores."""
    coder = make_coder(tokenizer) if is_ours(tokenizer) else None
    pool = ThreadPoolExecutor(os.cpu_count())  # threads will do: both encoders release the GIL

    def encode_text(text):
        # tiktoken gives up on a million spaces; old versions are slow on very long words.
        if coder and not has_long_run(text):
            return coder.encode_to_numpy(text, disallowed_special=()).astype(dtype)
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype)

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


def write_split(folder, split, texts, encode, bos):
    """Encode texts and write the .bin and the .idx file of a split; return what they hold.

    `texts` is an iterator, and is read batch by batch.
    """
    count = {"documents": 0, "bytes": 0, "words": 0, "tokens": 0}
    with (
        open(folder / f"{split}.bin", "wb") as bin_file,
        open(folder / f"{split}.idx", "wb") as idx_file,
    ):
        # At most 1,024 documents and about 4 MB at a time: memory does not grow with the text.
        while batch := list(islice(take(texts, 2**22), 2**10)):
            for text, tokens in zip(batch, encode(batch)):
                bin_file.write(np.append(tokens.dtype.type(bos), tokens))
                idx_file.write(np.uint64(count["tokens"]))
                count["documents"] += 1
                count["tokens"] += 1 + len(tokens)
                count["bytes"] += len(text.encode())
                count["words"] += len(text.split())
        idx_file.write(np.uint64(count["tokens"]))
    return count


# ---- the script ----------------------------------------------------------------------------------
def prepare(paths, n_val_files, folder, args):
    """Write the files of a prepared folder, and print what is in them; return meta.json."""
    if args.tokenizer:  # before the long passes, since it may be unusable
        tokenizer_json = read_tokenizer(args.tokenizer)

    # First pass: which documents to train on, and which to hold out?
    hashes, sizes, counts = hash_documents(paths)
    train, val = choose_split(paths, hashes, sizes, counts, n_val_files, args.val_fraction)
    n_dropped = len(hashes) - train.sum() - val.sum()
    print(f"documents: {len(hashes):,}; dropped as duplicate, empty or malformed: {n_dropped:,}")

    # Second pass: learn the tokenizer from the first 256 MiB of the training documents.
    if not args.tokenizer:
        texts = read_texts(paths, train, "learn")
        _, suitable, _ = choose_row(sizes[train].sum())
        tokenizer_json = train_tokenizer(take(texts, 2**28), args.vocab_size or suitable)
    (folder / "tokenizer.json").write_bytes(tokenizer_json.encode())

    # Compare the two encoders on the first 512 KiB.
    tokenizer = parse_tokenizer(tokenizer_json)
    vocab_size = 1 + max(tokenizer.get_vocab().values())
    encode = make_encoder(tokenizer, token_dtype(vocab_size))
    for text in take(read_texts(paths, train, "compare"), 2**19):
        if encode([text])[0].tolist() != tokenizer.encode(text, add_special_tokens=False).ids:
            die(f"tiktoken and tokenizers disagree on {text[:80]!r}: upgrade both, or report this")

    # Third pass: encode.
    bos = find_special_ids(tokenizer_json).bos
    print(f"tokenizer: {vocab_size:,} ids")
    source = {"input": args.input or f"Python {sys.version}", "val": args.val}
    meta = {"version": FORMAT_VERSION, "source": source, "vocab_size": vocab_size}
    for split, part in (("train", train), ("val", val)):
        texts = read_texts(paths, part, f"encode {split}")
        meta[split] = write_split(folder, split, texts, encode, bos)
        print(f"{split}:", ", ".join(f"{n:,} {unit}" for unit, n in meta[split].items()))
        if meta[split]["tokens"] <= WINDOW:
            print(
                f"warning: {split} is shorter than a window of {WINDOW} tokens: give more text, "
                "or change what is held out (--val, --val_fraction)"
            )
    meta["files"] = {name: fingerprint(folder / name) for name in FILES}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    return meta


def choose_row(n_bytes):
    """Return the row of ROWS for this much training text."""
    return next(row for row in ROWS if n_bytes <= row[0])


def next_command(out, n_bytes):
    """Return the command that trains on a prepared folder with this much training text."""
    made_for_it = []
    for path in glob.glob("config/*.py"):
        if f'data_dir = "{out}"' in Path(path).read_text("utf-8"):
            made_for_it.append(path)
    if len(made_for_it) == 1:
        return f"python train.py {made_for_it[0]}"

    _, _, config = choose_row(n_bytes)
    flags = [f"--data_dir={out}", f"--out_dir={Path('out', out.name)}"]
    command = f"python train.py {config} {shlex.join(flags)}"
    if "demo" not in config:
        command += "  # for a GPU; on a CPU: config/demo.py"
    return command


def parse_arguments():
    """Return the flags; refuse what is wrong before any file is read."""
    parser = make_parser(__doc__)
    parser.add_argument("--input", nargs="+", default=[], metavar="FILE", help="text to train on")
    parser.add_argument("--out", metavar="FOLDER", help="where to write (data/pydocs)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--val", nargs="+", default=[], metavar="FILE", help="text to hold out")
    group.add_argument(
        "--val_fraction", type=float, default=0.1, help="or hold out this share (0.1)"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--vocab_size", type=int, help="ids of a new tokenizer (by text size)")
    group.add_argument("--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json to use")
    parser.add_argument("--tasks", action="store_true", help="download the evaluation sets")
    args = parser.parse_args()

    if args.tasks and (args.input or args.val or args.tokenizer):
        die("--tasks can only be combined with --out")
    if args.input and not args.out:
        die("--input needs --out data/NAME")
    if args.val and not args.input:
        die("--val needs --input: the text to train on")
    smallest = len(SPECIAL_TOKENS) + 256
    if args.vocab_size is not None and not smallest <= args.vocab_size <= 65535:
        die(f"--vocab_size must be from {smallest} to 65535")
    if not 0 <= args.val_fraction < 1:
        die("--val_fraction must be at least 0 (holds out one document) and less than 1")
    return args


def find_files(patterns):
    """Return the files that paths, folders and globs name, each once: {real path: path}."""
    files = {}
    for pattern in patterns:
        inside = os.path.join(glob.escape(pattern), "**") if os.path.isdir(pattern) else pattern
        found = [pattern]
        if pattern != "-" and not os.path.isfile(pattern):
            found = list(filter(os.path.isfile, sorted(glob.glob(inside, recursive=True))))
        if not found and os.path.isdir(pattern):
            die(f"no files (hidden ones do not count) in {pattern}")
        if not found:
            die(f"no such file: {pattern}")
        for path in found:
            ending = get_ending(path)
            if ending in CONVERSIONS:
                how = CONVERSIONS[ending].format(ending[1:], path)
                die(f"{path} is not plain text: leave it out, or convert it: {how}")
            files[os.path.realpath(path)] = path
    return files


def save_standard_input(folder):
    """Copy standard input to a file, which can be read in passes; return its path."""
    stdin = sys.stdin.buffer
    begins_json = stdin.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    path = folder / ("stdin.jsonl" if begins_json else "stdin.txt")
    with open(path, "wb") as file:
        shutil.copyfileobj(stdin, file)
    return str(path)


def main():
    args = parse_arguments()
    if args.tasks:
        from tasks import download_tasks

        download_tasks(Path(args.out or "data/tasks"))
        return

    val_files, input_files = find_files(args.val), find_files(args.input)
    paths = list({**val_files, **input_files}.values())  # a file in both is held out
    out = Path(args.out or EMBEDDED)
    if out.is_file():
        die(f"--out {out} is a file: name a folder")
    if (out / "meta.json").exists():
        print(f"this will replace the text that was prepared in {out} earlier")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=out) as folder:
        folder = Path(folder)
        if not args.input:
            lines = [json.dumps({"text": text}) + "\n" for text in embedded_corpus()]
            paths = [str(folder / "python.jsonl")]
            Path(paths[0]).write_text("".join(lines))
        if "-" in paths:
            paths[paths.index("-")] = save_standard_input(folder)

        meta = prepare(paths, len(val_files), folder, args)
        for name in (*FILES, "meta.json"):  # meta.json last: it has the hashes of the others
            os.replace(folder / name, out / name)
    print(f"{out} is ready. Next: {next_command(out, meta['train']['bytes'])}")
    if args.tokenizer:
        print("To start from the model that has this tokenizer, add --init_from=ITS_CHECKPOINT")


if __name__ == "__main__":
    main()
