"""
Turn text into a prepared folder: drop duplicates, hold out a share, train a byte-level BPE, encode.

    python prepare.py                                                # Python's own documentation -> data/pydocs
    python prepare.py --input 'hplt/*.jsonl.zst' --out data/hplt --vocab_size 51200
    python prepare.py --tasks                                        # the nine sets that eval.py reads -> data/tasks
Inputs: .jsonl, .jsonl.gz, .jsonl.zst (field `text`), .txt (a document; a long one is cut at blank lines), - (JSON lines
on standard input). They are streamed, in three passes: memory grows by 50 bytes per document, not with the text.
"""

import ast, glob, gzip, hashlib, io, json, os, sys, tarfile, tempfile, time, urllib.request, zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, islice, takewhile
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm
from configurator import die, flags
from data import BOS, FILES, N_SPECIAL, VERSION, fingerprint

FORMATS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")
SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<mask>"] + [f"<special_{i}>" for i in range(11)]
# GPT-2's splitting pattern, as tokenizers' ByteLevel has it; grouped: only white space needs the slow look-ahead
PATTERN = r"(?:'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"
MALFORMED, EMPTY = 0, 1  # stand in for a document's hash
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


# ---- reading ---------------------------------------------------------------------------------------------------------
def embedded_corpus():
    """Python's help topics, and the distinct docstrings of each standard module; read from source, never imported."""
    root, texts = os.path.dirname(os.__file__), []
    for folder, folders, _ in os.walk(root):
        folders[:] = sorted(
            {*folders}
            - {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
        )
        for path in sorted(Path(folder).glob("*.py")):
            tree = ast.parse(path.read_bytes())
            if path.match("pydoc_data/topics.py"):
                texts += ast.literal_eval(tree.body[-1].value).values()
            docstrings = (
                ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)
            )
            texts.append("\n\n".join(dict.fromkeys(filter(None, docstrings))))
    if sum(map(len, texts)) < 10**6:
        die(
            f"this Python has no documentation in {root} (a minimal installation?): give your own text with --input"
        )
    return [json.dumps({"text": text}).encode() + b"\n" for text in texts if text]


def read(paths):
    """The documents as they stand in the files: a line of JSON as bytes, a piece of a .txt as str."""
    for path in paths:
        try:
            with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
                if path.endswith(".zst"):
                    import zstandard

                    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
                    file = io.BufferedReader(unpacker.stream_reader(file, read_across_frames=True))
                if path.endswith(".txt"):
                    file = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")
                    while piece := file.read(
                        2**16
                    ):  # and on to the next blank line, if there is one soon
                        lines = islice(iter(lambda: file.readline(2**10), ""), 64)
                        yield piece + "".join(takewhile(str.strip, lines))
                else:  # a line without end comes in pieces too, and all of them are malformed
                    yield from filter(bytes.strip, iter(lambda: file.readline(2**28), b""))
        except Exception as error:  # every format has its own kind
            die(
                f"cannot read {path}: {error}"
                + isinstance(error, ImportError) * "; pip install zstandard"
            )


def parse(raw):
    return raw if isinstance(raw, str) else json.loads(raw)["text"]


# ---- hashing, learning, encoding -------------------------------------------------------------------------------------
def parallel(function, documents):
    """function of each document, in order, on all cores: threads will do, as tiktoken lets go of Python's lock."""
    documents, n = iter(documents), os.cpu_count()
    with ThreadPoolExecutor(n) as pool:
        for batch in iter(
            lambda: list(islice(documents, 32 * n)), []
        ):  # memory does not grow with the text
            yield from pool.map(function, batch)


def digest(raw):
    """The hash and the size in bytes of a document's text; malformed is what is not UTF-8 or no JSON with `text`."""
    try:
        text = parse(raw).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return MALFORMED, 0
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return (number, len(text)) if text.decode().strip() else (EMPTY, 0)


def encoder(bpe, run=2**13):
    """text -> tokens: those of `tokenizers`, by tiktoken, which is several times as fast."""
    # byte-level BPE spells a byte as a character: itself where that is visible, else the next one from 256 on
    raw = dict(
        zip(
            sorted(ByteLevel.alphabet()),
            sorted(range(256), key=lambda b: b == 32 or not chr(b).isprintable()),
        )
    )
    ranks = {
        bytes(raw[c] for c in token): i for token, i in bpe.get_vocab().items() if i >= N_SPECIAL
    }
    # tiktoken without any special token would look for the empty string, at every character: half as fast
    coder = tiktoken.Encoding(
        "nanodual", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<unk>": 0}
    )

    def encode(text):
        # tiktoken gives up on huge white space and is, in old versions, quadratic in a word: such a run fills a block
        blocks = (text[i : i + run] for i in range(0, len(text) - run + 1, run))
        if any(len(block.split(None, 1)) < 2 for block in blocks):
            return np.array(bpe.encode(text).ids, np.uint16)
        return coder.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    return encode


def prepare(paths, source, out, vocab_size, val_fraction):
    """Write the files of a prepared folder to `out`, in three passes over the text; returns a report."""
    # 1. hash: keep the first of equal documents; hold out those with the smallest hashes, at least one
    hashes, sizes = np.fromiter(
        map(digest, tqdm(read(paths), "hash", disable=None)), np.dtype((np.uint64, 2))
    ).T
    malformed, order, keep = (
        np.count_nonzero(hashes == MALFORMED),
        np.argsort(hashes, kind="stable"),
        hashes > EMPTY,
    )
    if malformed > len(hashes) / 100:
        die(
            f"{malformed:,} of {len(hashes):,} documents (first: {order[0] + 1}) are not UTF-8 or no JSON with `text`"
        )
    keep[order[1:][hashes[order[1:]] == hashes[order[:-1]]]] = False
    val = keep & (hashes <= max(val_fraction * 2.0**64, hashes[keep].min(initial=2**64 - 1)))
    train = keep & ~val
    if not train.any():
        die(
            f"{keep.sum()} distinct documents with text, {val.sum()} of them held out: none is left to train on"
        )

    # 2. learn the BPE from the first training documents
    def texts(size):  # in bytes
        n = 1 + np.searchsorted(np.cumsum(np.where(train, sizes, 0)), size)
        return map(parse, compress(tqdm(read(paths), "BPE", n, disable=None), train[:n]))

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        ByteLevel(add_prefix_space=False),
        tokenizers.decoders.ByteLevel(),
    )
    bpe.encode_special_tokens = True  # a literal <mask> in a text is text
    bpe.train_from_iterator(
        texts(2**28),
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIALS,
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    (out / "tokenizer.json").write_text(bpe.to_str(pretty=True), encoding="utf-8")
    encode = encoder(bpe)
    for text in texts(2**19):
        if encode(text).tolist() != bpe.encode(text).ids:
            die(f"tiktoken and tokenizers disagree on {text[:80]!r}: upgrade both, or report this")

    # 3. encode
    documents, start = (
        compress(tqdm(read(paths), "encode", len(keep), disable=None), keep),
        time.time(),
    )
    val, sizes, lengths = val[keep], sizes[keep], np.zeros(keep.sum(), np.uint64)
    with open(out / "train.bin", "wb") as train_bin, open(out / "val.bin", "wb") as val_bin:
        for i, tokens in enumerate(
            parallel(lambda raw: np.append(np.uint16(BOS), encode(parse(raw))), documents)
        ):
            (val_bin if val[i] else train_bin).write(tokens)
            lengths[i] = len(tokens)
    meta = {"version": VERSION, "source": source, "vocab_size": bpe.get_vocab_size()}
    for split, part in (("train", ~val), ("val", val)):
        np.cumsum(np.append(np.uint64(0), lengths[part])).tofile(out / f"{split}.idx")
        meta[split] = {
            "documents": part.sum(),
            "tokens": lengths[part].sum(),
            "bytes": sizes[part].sum(),
        }
    meta["files"] = {name: fingerprint(out / name) for name in FILES}
    (out / "meta.json").write_text(json.dumps(meta, indent=1, default=int))
    return (
        f"{len(val):,} documents, {val.sum():,} of them held out; dropped {malformed:,} malformed, "
        f"{len(keep) - len(val) - malformed:,} duplicate or empty\n{lengths.sum():,} tokens, "
        f"{sizes.sum() / lengths.sum():.2f} bytes/token, {sizes.sum() / (time.time() - start) / 1e6:.1f} MB/s; "
        f"train.bin has hash {meta['files']['train.bin'][1]}"
    )


# ---- the evaluation sets ---------------------------------------------------------------------------------------------
AI2 = "https://ai2-public-datasets.s3.amazonaws.com"
RELEASES = {  # task: the files that are wanted, and the official files or archives that have them
    "arc_easy": ("ARC-Easy-Test.jsonl", f"{AI2}/arc/ARC-V1-Feb2018.zip"),
    "arc_challenge": ("ARC-Challenge-Test.jsonl", f"{AI2}/arc/ARC-V1-Feb2018.zip"),
    "blimp": (
        "[a-z]*.jsonl",
        "https://raw.githubusercontent.com/alexwarstadt/blimp/master/BLiMP.zip",
    ),
    "commonsenseqa": ("*.jsonl", "https://s3.amazonaws.com/commensenseqa/dev_rand_split.jsonl"),
    "hellaswag": (
        "*.jsonl",
        "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
    ),
    "mmlu": ("test/*_test.csv", "https://people.eecs.berkeley.edu/~hendrycks/data.tar"),
    "openbookqa": ("Main/test.jsonl", f"{AI2}/open-book-qa/OpenBookQA-V1-Sep2018.zip"),
    "piqa": (
        "valid*",
        *(f"https://yonatanbisk.com/piqa/data/valid{end}" for end in (".jsonl", "-labels.lst")),
    ),
    "socialiqa": (
        "dev[.-]*",
        "https://storage.googleapis.com/ai2-mosaic/public/socialiqa/socialiqa-train-dev.zip",
    ),
}


def members(path):
    """(name, open file) of all that is in an archive, or of the file itself."""
    if path.suffix == ".zip":
        archive = zipfile.ZipFile(path)
        return ((name, archive.open(name)) for name in archive.namelist())
    if path.suffix == ".tar":
        archive = tarfile.open(path, "r:")
        return ((member.name, archive.extractfile(member)) for member in archive if member.isfile())
    return [(path.name, open(path, "rb"))]


def fetch_tasks(out):
    """Each task whose folder is not there yet. Of a member's name only the last part is used, of its content 16 MiB."""
    from eval import (
        read_task,
    )  # checks the counts and every record: nothing that was cut short passes

    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=out) as folder:
        for task in (task for task in RELEASES if not (out / task).exists()):
            wanted, *urls = RELEASES[task]
            os.mkdir(new := Path(folder, task))
            for url, path in ((url, Path(folder, os.path.basename(url))) for url in urls):
                try:
                    if not path.exists():  # ARC is one archive for two tasks
                        with (
                            urllib.request.urlopen(url, timeout=60) as answer,
                            open(path, "wb") as file,
                        ):
                            chunks = islice(
                                iter(lambda: answer.read(2**20), b""), 2**10
                            )  # at most 1 GiB
                            file.writelines(tqdm(chunks, path.name, unit="MiB", disable=None))
                    for name, file in islice(
                        (x for x in members(path) if Path(x[0]).match(wanted)), 99
                    ):
                        (new / Path(name).name).write_bytes(file.read(2**24))
                except Exception as error:  # the network's, or either format's
                    die(
                        f"cannot get {url}: {error}; you can put its {wanted} into {out / task} by hand"
                    )
            read_task(task, folder, 0)
            new.rename(out / task)


if __name__ == "__main__":
    args = flags(__doc__, input=[], out="", tasks=False, vocab_size=1024, val_fraction=0.1)
    paths = [
        path
        for pattern in args.input
        for path in sorted(glob.glob(pattern, recursive=True)) or [pattern]
    ]
    bad = [
        path
        for path in paths
        if path != "-" and not (os.path.isfile(path) and path.endswith(FORMATS))
    ]
    if not (N_SPECIAL + 256 <= args.vocab_size <= 65535 and 0 <= args.val_fraction < 1):
        die(
            f"--vocab_size must be from {N_SPECIAL + 256} to 65535, and --val_fraction a share from 0 to less than 1"
        )
    if args.input and (args.tasks or not args.out):
        die("--input needs --out data/NAME, and no --tasks")
    if bad:
        die(f"no such file, or none of {' '.join(FORMATS)}: {', '.join(bad)}")
    out = Path(args.out or ("data/tasks" if args.tasks else "data/pydocs"))
    out.mkdir(parents=True, exist_ok=True)
    if args.tasks:
        sys.exit(fetch_tasks(out))
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=out) as folder:
        with open(f"{folder}/spool.jsonl", "wb") as spool:  # what is no file becomes one
            spool.writelines(
                embedded_corpus() if not paths else sys.stdin.buffer if "-" in paths else []
            )
        paths = [spool.name if path == "-" else path for path in paths or ["-"]]
        report = prepare(
            paths,
            args.input or f"Python {sys.version}",
            Path(folder),
            args.vocab_size,
            args.val_fraction,
        )
        for name in (*FILES, "meta.json"):  # the last one vouches for the others
            os.replace(os.path.join(folder, name), out / name)
    print(f"{out}: {report}")
