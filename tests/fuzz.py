"""
Damaged and hostile inputs for everything that reads files; soak.py and test_faults.py use it.

A reader's function makes one bad input from a random generator, and reads it. A result is fine,
and so is SystemExit with one line. Anything else is a bug: another exception, a wrong result where
right and wrong can be told apart, a hang, a file written elsewhere, code from a file executed.
"""

import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import tarfile
import warnings
import zipfile
from fractions import Fraction
from functools import partial
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save

import checkpoint
import configurator
import data
import export
import prepare
import tasks
from conftest import flags, prose, random_model, tiny_settings
from tokenizer import read_tokenizer

ODD_VALUES = [None, True, -1, 0, 10**30, -(2**63), 0.5, 1e308, float("nan"), float("inf")]
ODD_VALUES += ["", "\0", "\ud800", "a" * 5000, "../../x", "/etc/passwd", "1", "-1", "[]"]
ODD_VALUES += [[], {}, [[]], [None] * 40, {"a": None}]

ODD_BYTES = [b"", b"\0", b"\xff", b"\n", b"\r", b'"', b"{", b"}", b"[" * 3000, b"]", b",", b":"]
ODD_BYTES += [b"null", b"NaN", b"1e999", b"-", b"9" * 5000, b"../", b"\\u", b"\\ud800"]
ODD_BYTES += [b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"PK\x03\x04", b"\x1f\x8b\x08"]


# ---- damage --------------------------------------------------------------------------------------
def damage(content, rng):
    """Return the bytes after one to four random accidents."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([1, 1, 2, 8, 100, 10000]))
        accident = rng.choice(["flip", "cut", "repeat", "noise", "insert", "replace", "truncate"])
        if accident == "flip" and start < len(content):
            content[start] ^= 1 << rng.randrange(8)
        elif accident == "cut":
            del content[start:end]
        elif accident == "repeat":
            content[start:start] = content[start:end]
        elif accident == "noise":
            content[start:end] = rng.randbytes(end - start)
        elif accident == "insert":
            content[start:start] = rng.choice(ODD_BYTES)
        elif accident == "replace":
            content[start:end] = rng.choice(ODD_BYTES)
        elif accident == "truncate":
            del content[start:]
    return bytes(content)


def alter(value, rng):
    """Return nested lists and dicts with one element replaced, missing or duplicated."""
    if isinstance(value, (list, dict)) and value and rng.random() < 0.9:
        copy = type(value)(value)
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        change = rng.randrange(6)
        if change == 0:
            del copy[key]
        elif change == 1 and isinstance(copy, list):
            copy.insert(key, rng.choice(copy))
        else:
            copy[key] = alter(copy[key], rng)
        return copy
    if isinstance(value, (int, float)) and rng.random() < 0.4:
        return value + rng.choice([-1, 1, 0.5, 2**16, 2**31, -(2**31)])
    return rng.choice(ODD_VALUES)


def to_json(value):
    return json.dumps(value).encode("utf-8", "surrogatepass")


def spoil_json(content, rng):
    """Damage the bytes of a JSON file, or the values that they encode."""
    if rng.random() < 0.5:
        return damage(content, rng)
    return to_json(alter(json.loads(content), rng))


class Bomb:
    """An object whose unpickling makes a folder, to show that it was executed."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / "executed"),)


# ---- the readers: each gets a folder that has data/tiny, and returns a function of a generator ---
def prepared_folders(folder):
    """Read a prepared folder. Often meta.json has matching hashes, as if damaged on purpose."""
    target = folder / "bad"
    files = shrink_corpus(folder / "data/tiny", target)
    s = tiny_settings(max_steps=2)
    sound = read_batches(target, s)
    changed = set()

    def read(rng):
        for name in changed:
            (target / name).write_bytes(files[name])
        name = rng.choice(list(files))
        changed.update((name, "meta.json"))
        spoil = spoil_json if name.endswith(".json") else damage
        (target / name).write_bytes(spoil(files[name], rng))
        forged = name != "meta.json" and rng.random() < 0.7
        if forged:
            meta = json.loads(files["meta.json"])
            meta["files"][name] = data.fingerprint(target / name)
            (target / "meta.json").write_text(json.dumps(meta))

        found = read_batches(target, s)
        for tensor, other in zip(sound, found):
            assert forged or torch.equal(tensor, other), f"{name} is wrong, and nobody noticed"

    return read


def shrink_corpus(source, target):
    """Make a prepared folder from 20 documents of another; return the contents of its files."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for split in ("train", "val"):
        starts = np.fromfile(source / f"{split}.idx", np.uint64)[:21]
        tokens = np.fromfile(source / f"{split}.bin", np.uint16)[: int(starts[-1])]
        starts.tofile(target / f"{split}.idx")
        tokens.tofile(target / f"{split}.bin")
    meta = json.loads((source / "meta.json").read_text())
    meta["files"] = {name: data.fingerprint(target / name) for name in data.FILES}
    (target / "meta.json").write_text(json.dumps(meta))
    return {name: (target / name).read_bytes() for name in (*data.FILES, "meta.json")}


def read_batches(folder, s):
    """Return the tensors of a run's first slot, after reading all held-out batches too."""
    corpus = data.open_corpus(str(folder))
    list(data.val_batches(corpus, s))
    data.bytes_per_token(corpus, s)
    return data.train_batch(data.Stream(corpus, s), s, 0, 0)[:-1]


def corpora(folder):
    """Read text: plain, or JSON lines, compressed or not."""
    zstd = prepare.import_zstd()
    checksum = {zstd.CompressionParameter.checksum_flag: True}
    pack = {".txt": bytes, ".md.gz": gzip.compress, ".jsonl": bytes, ".jsonl.gz": gzip.compress}
    pack[".jsonl.zst"] = partial(zstd.compress, options=checksum)
    texts = prose(30)
    lines = [{"text": text, "id": i, "meta": [1, 2.5, None]} for i, text in enumerate(texts)]

    def read(rng):
        kind = rng.choice(list(pack))
        records = lines
        if rng.random() < 0.5:
            records = alter(lines, rng)
        if not isinstance(records, list):
            records = [records]
        content = pack[kind](b"\n".join(to_json(record) for record in records))
        path = folder / f"bad{kind}"
        path.write_bytes(damage(content, rng))
        found = [text for _, text, _ in prepare.read_documents([str(path)])]
        prepare.hash_documents([str(path)])
        # A compressed file has checksums, but they do not cover its name, or data outside members.
        if kind in (".jsonl.gz", ".jsonl.zst") and records is lines:
            copies = len(found) // len(texts)
            assert found == texts * copies, "the text has changed, and nobody noticed"

    return read


def small_checkpoint(folder):
    """Return the content of a checkpoint, for a model of width 8."""
    s = tiny_settings(n_layer=1, n_embd=8, n_ff=8, n_head=1)
    tokenizer = (folder / "data/tiny/tokenizer.json").read_text("utf-8")
    return {
        "format": checkpoint.CHECKPOINT_FORMAT,
        "model": random_model(s).state_dict(),
        "settings": vars(s),
        "step": 6,
        "tokenizer": tokenizer,
        "running": {"ar": [0.0, 0.0], "md": [0.0, 0.0]},
        "records": [{"step": 1, "val_ar": 2.5, "val_md": 3.5}],
        "data": {},
    }


def save_spoiled(content, path, bomb, rng):
    """Write a pickle: damaged, or intact but with altered content, or one that tries to run code.

    Return whether it is only damaged: then whatever can be read from it must be right.
    """
    kind = rng.choice(["damaged", "damaged", "damaged", "altered", "altered", "hostile"])
    if kind == "damaged":
        whole = io.BytesIO()
        torch.save(content, whole)
        path.write_bytes(damage(whole.getvalue(), rng))
        return True
    if kind == "altered":
        spoiled = alter(content, rng)
    else:
        spoiled = rng.choice([bomb, {**content, rng.choice(list(content)): bomb}])
    with contextlib.suppress(UnicodeEncodeError):  # pickle refuses a lone surrogate
        torch.save(spoiled, path)
    return False


def checkpoints(folder):
    """Read a checkpoint."""
    content = small_checkpoint(folder)
    path = folder / "bad.pt"

    def read(rng):
        only_damaged = save_spoiled(content, path, Bomb(folder), rng)
        trained = checkpoint.load_model(str(path), "cpu")
        trained.tokenizer.encode("a <mask> b")
        checkpoint.adopt_model(trained.checkpoint, tiny_settings())
        if only_damaged:
            for name, tensor in trained.model.state_dict().items():
                assert torch.equal(tensor, content["model"][name]), "other weights"

    return read


def tokenizer_files(folder):
    """Read the tokenizer inside a checkpoint, or one that is given to prepare.py."""
    content = small_checkpoint(folder)
    path = folder / "tokenizer.pt"

    def read(rng):
        spoiled = spoil_json(content["tokenizer"].encode(), rng)
        if rng.random() < 0.5:
            (folder / "tokenizer.json").write_bytes(spoiled)
            read_tokenizer(folder / "tokenizer.json")
            return
        tokenizer = spoiled.decode("utf-8", "replace")
        torch.save({**content, "tokenizer": tokenizer}, path)
        trained = checkpoint.load_model(str(path), "cpu")
        text = "some text, <mask> and more\u00e9\U0001f600"
        ids = trained.tokenizer.encode(text, add_special_tokens=False).ids
        assert max(ids, default=0) < 300, "an id without an embedding"

    return read


CHOICES = [{"text": text, "label": label} for label, text in zip("ABCD", "wxyz")]
ARC = {"id": "x", "question": {"stem": "What?", "choices": CHOICES}, "answerKey": "B"}
RECORDS = {
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "commonsenseqa": ARC,
    "openbookqa": ARC,
    "blimp": {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps.", "UID": "agreement"},
    "hellaswag": {
        "activity_label": "Swim",
        "ctx_a": "A man swims.",
        "ctx_b": "he",
        "endings": ["a.", "b [title] c.", "d", "e"],
        "label": 2,
    },
    "mmlu": ["What, then?", "a", "b", "c", "d", "C"],
    "piqa": {"goal": "Open a jar", "sol1": "Turn it", "sol2": "Eat it"},
    "socialiqa": {
        "context": "A met B.",
        "question": "Why?",
        "answerA": "x",
        "answerB": "y",
        "answerC": "z",
    },
}


def task_files(folder):
    """Read the release files of a task, three records in each."""

    def read(rng):
        name = rng.choice(list(RECORDS))
        task = tasks.TASKS[name]
        place = folder / "tasks" / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for i in range(task.n_files):
            records = [RECORDS[name]] * 3
            if name == "mmlu":
                lines = ['"What, then?",a,b,c,d,C'] * 3
                content = "\n".join(lines).encode()
            else:
                if i == 0 and rng.random() < 0.7:
                    records = [alter(RECORDS[name], rng), *records[1:]]
                content = b"\n".join(to_json(record) for record in records)
            if i == 0 and rng.random() < 0.6:
                content = damage(content, rng)
            file_name = os.path.basename(task.files).replace("*", f"part{i:02}")
            (place / file_name.replace("[a-z]", "a")).write_bytes(content)
        if task.labels:
            labels = b"1\n1\n1\n"
            if rng.random() < 0.3:
                labels = damage(labels, rng)
            (place / task.labels).write_bytes(labels)

        for document in tasks.read_task(name, str(folder / "tasks"), 3):
            assert isinstance(document.context, str), document
            assert all(text.strip() for text in document.completions), document
            assert 0 <= document.gold < len(document.completions), document

    return read


# Names in an archive that try to lead elsewhere.
WILD_NAMES = ["../../Main/test.jsonl", "Main/../test.jsonl", "../new", "Main/test.jsonl/", ".."]
WILD_NAMES += ["Main//test.jsonl", "Main/\0test.jsonl", "Main\\test.jsonl", "{place}/new"]
WILD_NAMES += ["{place}/Main/test.jsonl"]
MEMBER_TYPES = [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE]
MEMBER_TYPES += [tarfile.FIFOTYPE]


def archives(folder):
    """Read what `prepare.py --tasks` downloads, a zip or a tar file."""
    record = to_json(ARC) + b"\n"
    place = folder / "archives"
    wanted = {"tasks", "tasks/openbookqa", "tasks/openbookqa/test.jsonl"}
    original = tasks.TASKS

    def read(rng):
        shutil.rmtree(place, ignore_errors=True)
        (place / "tasks").mkdir(parents=True)
        kind = rng.choice([".zip", ".tar"])
        content = pack_members(kind, record, place, rng)
        if rng.random() < 0.5:
            content = damage(content, rng)
        path = folder / f"archive{kind}"
        path.write_bytes(content)
        task = original["openbookqa"]._replace(n_documents=3, urls=(f"file://{path}",))
        tasks.TASKS = {"openbookqa": task}
        try:
            tasks.download_tasks(place / "tasks")
            found = (place / "tasks/openbookqa/test.jsonl").read_bytes()
            # A tar file has no checksum of its members' content.
            assert found == record * 3 or kind == ".tar", "not what is in the archive"
        finally:
            tasks.TASKS = original
            left = {str(path.relative_to(place)) for path in place.rglob("*")}
            assert left <= wanted, f"written or left: {left - wanted}"
            assert not (folder / "new").exists()
            assert not os.path.islink(place / "tasks/openbookqa/test.jsonl")

    return read


def pack_members(kind, record, place, rng):
    """Return an archive of up to three members, one of which may be the wanted file."""
    members = []
    if rng.random() < 0.8:
        members.append(("x/Main/test.jsonl", tarfile.REGTYPE))
    for _ in range(rng.randrange(3)):
        name = rng.choice(WILD_NAMES).format(place=place)
        members.append((name, rng.choice(MEMBER_TYPES)))
    rng.shuffle(members)

    packed = io.BytesIO()
    if kind == ".zip":
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, _ in members:
                with warnings.catch_warnings(action="ignore"):  # about a duplicate name
                    archive.writestr(name, record * rng.choice([3, 3, 3, 2, 99]))
    else:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, member_type in members:
                content = record * rng.choice([3, 3, 3, 2, 99])
                member = tarfile.TarInfo(name)
                member.type = member_type
                member.linkname = "/etc/passwd"
                member.size = len(content) if member_type == tarfile.REGTYPE else 0
                archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def released_models(folder):
    """Import the paper's released models: .safetensors, or a pickled state dict."""
    s = tiny_settings(n_layer=1, n_embd=8, n_ff=8, n_head=1, extra_head=True)
    state = {}
    for name, weight in random_model(s).state_dict().items():
        state[export.rename(name, "released")] = weight
    place = folder / "released"
    place.mkdir(exist_ok=True)
    shutil.copy(folder / "data/tiny/tokenizer.json", place)

    def read(rng):
        if rng.random() < 0.3:
            path = place / "bad.safetensors"
            path.write_bytes(damage(save(state), rng))
        else:
            path = place / "bad.bin"
            save_spoiled(state, path, Bomb(folder), rng)
        with mock.patch.object(export, "Settings", return_value=s):  # not the paper's size
            import_model("--from_official", path, folder / "imported")

    return read


def llama_folders(folder):
    """Import a Llama folder in the format of transformers."""
    place = folder / "llama"
    place.mkdir(exist_ok=True)
    checkpoint_path = folder / "small.pt"
    torch.save(small_checkpoint(folder), checkpoint_path)
    trained = checkpoint.load_model(str(checkpoint_path), "cpu")
    export.write_llama(trained, "float32", place)
    names = ["config.json", "tokenizer.json", "model.safetensors"]
    files = {name: (place / name).read_bytes() for name in names}

    def read(rng):
        name = rng.choice(names)
        spoil = spoil_json if name.endswith(".json") else damage
        (place / name).write_bytes(spoil(files[name], rng))
        try:
            import_model("--from_llama", place, folder / "imported")
        finally:
            (place / name).write_bytes(files[name])

    return read


def import_model(flag, source, target):
    """Run export.py in this process: what it writes can be loaded, and nothing else is left."""
    shutil.rmtree(target, ignore_errors=True)
    arguments = ["export.py", flag, str(source), "--out", str(target)]
    try:
        with mock.patch("sys.argv", arguments):
            export.main()
        checkpoint.load_model(str(target), "cpu")
    finally:
        assert not list(target.parent.glob("unfinished-*"))


ODD_SETTINGS = ["1", "0", "-1", "1e5", "1e-5", "1e999", "-1e999", "nan", "inf", "True", "None"]
ODD_SETTINGS += ["1/2", "63/64", "1/0", "-1/2", "1e999999999", "1e-999999999", "10**9", "1_000"]
ODD_SETTINGS += ["", "''", "[]", "{}", "0x10", "1j", "9" * 400, "9" * 5000, "-" * 3000 + "1"]
ODD_SETTINGS += ["auto", "cpu", "cuda", "float32", "\0", "\ud800", "\u0661", "a=b", "--x", "1,2"]
ODD_SETTINGS += ["(" * 300, "__import__('os').getpid()"]


def settings(folder):
    """Read command lines: what is accepted is in range, and its stream of data can be laid out."""
    corpus = data.open_corpus(str(folder / "data/tiny"))
    defaults = vars(configurator.Settings())

    def read(rng):
        argv = []
        for _ in range(rng.randint(1, 4)):
            name = rng.choice(list(defaults))
            number = rng.randint(-5, 2 ** rng.randint(1, 60))
            value = rng.choice([rng.choice(ODD_SETTINGS), str(number), repr(rng.random())])
            if rng.random() < 0.2:
                name = damage(name.encode(), rng).decode("latin-1")
            if rng.random() < 0.2:
                value = damage(value.encode("utf-8", "surrogatepass"), rng).decode("latin-1")
            argv += rng.choice([[f"--{name}={value}"], [f"--{name}", value], [f"--{name}"]])

        s = configurator.make_settings(configurator.read_settings([*flags(), *argv], ""))
        configurator.fill_in(s, corpus.vocab_size, len(corpus.train.tokens))
        for name, default in defaults.items():
            value = getattr(s, name)
            assert type(value) is type(default), (argv, name)
            if isinstance(value, (int, float)):
                assert 0 <= value <= 1e15, (argv, name)
        assert re.fullmatch(r"\d+(/\d+)?", s.alpha) and 0 <= Fraction(s.alpha) <= 1, argv
        assert s.batch_size % s.micro_batch_size == 0, argv
        assert s.n_embd % (2 * s.n_head) == 0, argv
        again = configurator.make_settings(vars(s))
        configurator.fill_in(again, corpus.vocab_size, len(corpus.train.tokens))
        assert vars(again) == vars(s), argv
        stream = data.Stream(corpus, s)
        assert len(stream.window(s.max_steps * s.batch_size - 1)) == s.seq_len + 1, argv

    return read


READERS = {
    "prepared": prepared_folders,
    "corpora": corpora,
    "checkpoints": checkpoints,
    "tokenizers": tokenizer_files,
    "tasks": task_files,
    "archives": archives,
    "released": released_models,
    "llamas": llama_folders,
    "settings": settings,
}


# ---- feeding them --------------------------------------------------------------------------------
def fuzz(folder, names, n_inputs, seed, say=None):
    """Give this many inputs to each reader; return {name: (results, refusals)}.

    The first input that ends in any other way raises an AssertionError that names it.
    """
    counts = {}
    for name in names:
        read = READERS[name](folder)
        refused = 0
        for i in range(n_inputs):
            what = f"{name}, seed {seed}, input {i}"
            if not try_input(read, random.Random(f"{name} {seed} {i}"), what):
                refused += 1
            assert not (folder / "executed").exists(), f"{what}: code in a file was executed"
            if say and (i + 1) % 100 == 0:
                read_well = i + 1 - refused
                say(f"\r{name}: {i + 1:,} inputs, {read_well:,} read, {refused:,} refused", end="")
        if say:
            say()
        counts[name] = n_inputs - refused, refused
    return counts


def try_input(read, rng, what):
    """Let a reader read one input; return True if it did, False if it refused in one line."""
    with silence(), time_limit(20):
        try:
            read(rng)
            return True
        except SystemExit as end:
            assert re.fullmatch("error: [^\n]+", str(end.code)), f"{what}: {end.code!r}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # tokenizers, written in Rust, has its own type of panic
            is_bug = not isinstance(error, OSError) or isinstance(error, TimeoutError)
            message = f"{what}: {type(error).__name__}: {error}"
            assert not is_bug, message[:2000]  # errors.report makes one line of any other OSError
    return False


@contextlib.contextmanager
def silence():
    """Suppress all output; tokenizers reports its panics by writing to descriptor 2."""
    output = io.StringIO()
    errors = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield
    finally:
        os.dup2(errors, 2)
        os.close(errors)


@contextlib.contextmanager
def time_limit(seconds):
    """Raise TimeoutError in the body after this many seconds of CPU time."""

    def stop(*_):
        raise TimeoutError(f"no answer within {seconds} seconds")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
