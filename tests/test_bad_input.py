"""A user's mistake, a damaged file, a full disk: one line, a failure, and nothing half-written."""

import fcntl
import importlib.util
import json
import os
import re
import shlex
import shutil
import zipfile
from typing import NamedTuple

import numpy as np
import pytest
import torch

from checkpoint import load_checkpoint
from conftest import flags, prose, run, torchrun
from data import fingerprint
from faults import Launcher


# ---- changes to a folder, before a script is run in it -------------------------------------------
# The folder holds data/tiny and a finished run in out/run, with ckpt_4.pt and ckpt_6.pt.
def write(path, content):
    def change(folder):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)

    return change


def remove(path):
    def change(folder):
        (folder / path).unlink()

    return change


def edit(path, function):
    """Replace the bytes of a file with a function of them."""

    def change(folder):
        (folder / path).write_bytes(function((folder / path).read_bytes()))

    return change


def truncate(path):
    return edit(path, lambda content: content[: len(content) // 2])


def flip(path, where=0.5):
    """Flip a bit of a file, at a fraction of its length."""

    def flip_bit(content):
        content = bytearray(content)
        content[int(where * len(content))] ^= 1
        return content

    return edit(path, flip_bit)


def edit_meta(**entries):
    def update(content):
        return json.dumps(json.loads(content) | entries).encode()

    return edit("data/tiny/meta.json", update)


def forge(name, function):
    """Replace a file of data/tiny, and its hash in meta.json too."""

    def change(folder):
        edit(f"data/tiny/{name}", function)(folder)
        files = json.loads((folder / "data/tiny/meta.json").read_text())["files"]
        files[name] = fingerprint(folder / "data/tiny" / name)
        edit_meta(files=files)(folder)

    return change


def fill_tokens(content):
    return np.full(len(content) // 2, 99, np.uint16).tobytes()


def swap_documents(content):
    return content[:8] + content[16:24] + content[8:16] + content[24:]


def edit_checkpoint(function):
    """Change what out/run/ckpt_6.pt holds, and keep its checksums right."""

    def change(folder):
        path = folder / "out/run/ckpt_6.pt"
        content = torch.load(path, weights_only=True)
        function(content)
        torch.save(content, path)

    return change


def other_shape(content):
    content["model"]["embed.weight"] = content["model"]["embed.weight"][:, :-1].clone()


def more_ids(content):
    tokenizer = json.loads(content["tokenizer"])
    tokenizer["model"]["vocab"]["and more"] = 300
    content["tokenizer"] = json.dumps(tokenizer)


def weights_alone(content):
    for name in content.keys() - {"model", "settings", "step", "tokenizer"}:
        del content[name]


def prepare_other(folder):
    """Prepare a folder with different data, which has more ids."""
    (folder / "other.txt").write_text("\n".join(prose(200, seed=1)))
    flags = ["--input", "other.txt", "--out", "data/other", "--vocab_size", "400"]
    run("prepare.py", *flags, cwd=folder)


def unfinished(folder):
    """Take the run back to step 4, so that there is something to do."""
    (folder / "out/run/ckpt_6.pt").unlink()


def compress(folder):
    """Make a checkpoint that is small, but could unpack to any size."""
    path = folder / "out/run/ckpt_6.pt"
    content = torch.load(path, weights_only=True)
    torch.save(content | {"model": {"x": torch.zeros(10**6)}}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in members.items():
            archive.writestr(name, member)


LOCKS = []  # held until the tests end


def lock(folder):
    """Hold the lock, as a process does while it trains there."""
    LOCKS.append(open(folder / "out/run/.lock", "w"))
    fcntl.flock(LOCKS[-1], fcntl.LOCK_EX)


# ---- the cases -----------------------------------------------------------------------------------
class Case(NamedTuple):
    command: str  # what is run in the folder
    says: str  # a part of the one line
    changes: tuple  # to the folder
    fault: list | None = None


def train(says, *changes, fault=None, **settings):
    settings = dict(data_dir="data/tiny", out_dir="out/new") | settings
    return Case(shlex.join(["train.py", *flags(**settings)]), says, changes, fault)


def resume(says, *changes, **settings):
    return train(says, *changes, **dict(out_dir="out/run", resume=True) | settings)


def script(command, says, *changes, fault=None):
    return Case(command, says, changes, fault)


SETTINGS = {
    "unknown": train(
        "no setting named 'learing_rate', did you mean 'learning_rate'?", learing_rate=1
    ),
    "indivisible": train(
        "'batch_size' must be a multiple of micro_batch_size: 6 or 8", batch_size=7
    ),
    "alpha above 1": train("'alpha' must be a share from 0 to 1", alpha="65/64"),
    "alpha too long": train("'alpha' must be a share from 0 to 1", alpha="1e999999999"),
    "alpha too fine": train("the nearest possible alpha is 1", alpha="8191/8192"),
    "rate too long": train("'learning_rate' must be from 0 to 1e15", learning_rate="1" + "0" * 400),
    "nested too deeply": train("--seed: expected int", seed="-" * 9999 + "1"),
    "too many layers": train("'n_layer' must be at most 1000", n_layer=10**12),
    "too little to validate": train("'seq_len' must be from 2 to eval_tokens, 31", eval_tokens=31),
    "unknown device": train("this machine has no 'gpu', only: ", device="gpu"),
    "nothing asked for": script("train.py", "which run?"),
    "no such config": script("train.py config/demmo.py", "no config file 'config/demmo.py'"),
    "a run as a config": script("train.py --resume out/run", "--resume --out_dir=out/run"),
    "one dash": script("train.py -alpha=1", "write --alpha, with two dashes"),
    "--config": script("train.py --config a.py", "a config file needs no flag"),
    "too wide a model": train("not enough memory", n_embd=10**8, fault=["little_memory", 2**36]),
    "beyond 64 bits": train("not enough memory", n_embd=10**15, vocab_size=10**5),
    "too large a batch": train(
        "not enough memory",
        batch_size=10**12,
        repetitions=0,
        eval_interval=0,
        fault=["little_memory", 2**36],
    ),
    "diverged": train("not finite at step 1", learning_rate=1e15, save_interval=1),
}
for name in ("cuda", "mps"):
    if not getattr(torch, name).is_available():
        SETTINGS[f"no {name}"] = train(f"this machine has no '{name}', only: ", device=name)
if not importlib.util.find_spec("wandb"):
    SETTINGS["no wandb"] = train("pip install wandb", wandb=True)

TINY = "data/tiny"
DATA = {
    "none": train("data/x is not a prepared folder (meta.json is missing)", data_dir="data/x"),
    "a text": train("make it with: python prepare.py", write("a.txt", b"a"), data_dir="a.txt"),
    "train.bin truncated": train(f"{TINY}/train.bin does not match", truncate(f"{TINY}/train.bin")),
    "train.bin flipped": train(f"{TINY}/train.bin does not match", flip(f"{TINY}/train.bin")),
    "train.idx flipped": train(f"{TINY}/train.idx does not match", flip(f"{TINY}/train.idx")),
    "val.bin truncated": train(f"{TINY}/val.bin does not match", truncate(f"{TINY}/val.bin")),
    "tokenizer changed": train("tokenizer.json does not match", flip(f"{TINY}/tokenizer.json")),
    "no tokenizer": train("tokenizer.json is missing", remove(f"{TINY}/tokenizer.json")),
    "no train.bin": train("train.bin is missing", remove(f"{TINY}/train.bin")),
    "meta truncated": train("data/tiny is damaged", truncate(f"{TINY}/meta.json")),
    "meta not text": train("data/tiny is damaged", write(f"{TINY}/meta.json", b"\xff\xfe\x00")),
    "meta a list": train("data/tiny is damaged", write(f"{TINY}/meta.json", b"[]")),
    "meta nested": train("data/tiny is damaged", write(f"{TINY}/meta.json", b"[" * 99999)),
    "meta without files": train("data/tiny is damaged", edit_meta(files={})),
    "meta of the future": train("has format 99, not 1: prepare it again", edit_meta(version=99)),
    "documents overlap": train("overlap", forge("train.idx", swap_documents)),
    "beyond the end": train("go beyond the end", forge("val.bin", lambda content: content[:-2])),
    "half a token": train("is damaged", forge("train.bin", lambda content: content[:-1])),
    "no tokens": train("is damaged", forge("train.bin", lambda content: b"")),
    "not a tokenizer": train("is damaged", forge("tokenizer.json", lambda content: b"{}")),
    "vocabulary too small": train("vocab_size 299 is too small", vocab_size=299),
    "too few tokens": train("lower max_steps, or raise repetitions", max_steps=10000),
    "below a window": train("less than one window of", seq_len=10**6, eval_tokens=10**6),
    "nothing held out": train(
        "held-out tokens, less than one window",
        seq_len=40000,
        eval_tokens=40000,
        repetitions=48,
    ),
}

OLDER = "remove it to continue from out/run/ckpt_4.pt"
EARLIER = "cannot be continued: another version wrote it, or it is an imported model"
RUN_DIRECTORY = {
    "taken": train("out/run already holds a run: continue it with --resume", out_dir="out/run"),
    "a file in the way": train("--out_dir takes a directory", write("out/new", b"mine")),
    "within a file": train("--out_dir takes a directory", out_dir="data/tiny/train.bin/run"),
    "in use": resume("another process is training in out/run", lock),
    "nothing to continue": script("train.py --resume --out_dir=out/new", "no run in out/new"),
    "another rate": resume("learning_rate was 0.007, is 0.5", unfinished, learning_rate=0.5),
    "another shape": resume("n_layer was 2, is 3", unfinished, n_layer=3),
    "a config of other data": resume(
        "data/other is not what it was trained on (in data/tiny)",
        unfinished,
        prepare_other,
        data_dir="data/other",
    ),
    "other data": resume("the data in data/tiny", unfinished, forge("train.bin", fill_tokens)),
    "another tokenizer": resume(
        "the data in data/tiny", unfinished, forge("tokenizer.json", lambda content: content + b" ")
    ),
    "truncated": resume(OLDER, truncate("out/run/ckpt_6.pt")),
    "flipped": resume(OLDER, flip("out/run/ckpt_6.pt")),
    "directory flipped": resume(OLDER, flip("out/run/ckpt_6.pt", where=0.999)),
    "something else": resume(OLDER, edit_checkpoint(dict.clear)),
    "compressed": resume("it is compressed", compress),
    "too little momentum": resume(
        "belongs to another model", edit_checkpoint(lambda content: content["momentum"].pop())
    ),
    "other weights": resume("belongs to another model", edit_checkpoint(other_shape)),
    "no momentum": resume("momentum", edit_checkpoint(lambda content: content.pop("momentum"))),
    "weights alone": resume(EARLIER, edit_checkpoint(weights_alone)),
    "of other code": resume(
        "dropout was 0.1",
        edit_checkpoint(lambda content: content["settings"].update(dropout=0.1)),
    ),
    "of an earlier version": resume(
        EARLIER, edit_checkpoint(lambda content: content.update(format=2))
    ),
    "nothing to start from": train("no such file or directory: out/none", init_from="out/none"),
    "a text to start from": train("is damaged", write("a.txt", b"a"), init_from="a.txt"),
}

FULL_DISKS = {
    "at a checkpoint": resume(
        "could not write ckpt_6.pt in out/run; no other checkpoint is affected",
        unfinished,
        fault=["full_disk", 100_000],
    ),
    "from the start": resume("File too large", unfinished, fault=["full_disk", 1000]),
    "in prepare.py": script(
        "prepare.py --input a.jsonl --out data/x",
        "File too large",
        write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in prose(99)).encode()),
        fault=["full_disk", 10_000],
    ),
    "in eval.py": script(
        "eval.py --ckpt out/run --tasks heldout --modes ar --limit 40 --json scores.json",
        "File too large",
        fault=["full_disk", 600],
    ),
}

PREPARE = {
    "no such file": script("prepare.py --input no.jsonl --out data/x", "no such file: no.jsonl"),
    "no such held-out file": script(
        "prepare.py --input a.txt --val no.txt --out x",
        "no such file: no.txt",
        write("a.txt", b"a"),
    ),
    "two shares": script(
        "prepare.py --input a.txt --val a.txt --val_fraction 0.1 --out x", "not allowed with"
    ),
    "no folder named": script("prepare.py --input a.txt", "--out", write("a.txt", b"a")),
    "unknown format": script(
        "prepare.py --input a.pdf --out data/x", "pdftotext a.pdf", write("a.pdf", b"a")
    ),
    "vocabulary": script("prepare.py --vocab_size 100", "--vocab_size must be from 272 to 65535"),
    "all held out": script("prepare.py --val_fraction 1", "--val_fraction"),
    "empty": script("prepare.py --input a.jsonl --out x", "give more text", write("a.jsonl", b"")),
    "one document": script(
        "prepare.py --input a.txt --out x", "give more text", write("a.txt", b"a")
    ),
    "malformed": script(
        "prepare.py --input a.jsonl --out x",
        "9 of 9 documents",
        write("a.jsonl", b'{"text": 1}\n' * 9),
    ),
    "not gzip": script(
        "prepare.py --input a.jsonl.gz --out x",
        "cannot read a.jsonl.gz",
        write("a.jsonl.gz", b"a"),
    ),
    "a file in the way": script(
        "prepare.py --input a.txt --out a.txt", "a.txt is a file", write("a.txt", b"a")
    ),
}

EVAL = {
    "no checkpoint named": script("eval.py", "--ckpt"),
    "no such checkpoint": script(
        "eval.py --ckpt out/none --tasks heldout", "no such file or directory: out/none"
    ),
    "no checkpoint there": script("eval.py --ckpt data --tasks heldout", "no checkpoint in data"),
    "no room for results": script("eval.py --ckpt out/run --json out/run", "cannot write out/run"),
    "unknown task": script("eval.py --ckpt out/run --tasks arc_eazy", "did you mean 'arc_easy'?"),
    "unknown mode": script("eval.py --ckpt out/run --modes prefixes", "did you mean 'prefix'?"),
    "no masks": script("eval.py --ckpt out/run --pll 0", "--pll"),
    "no task files": script("eval.py --ckpt out/run --tasks piqa", "prepare.py --tasks"),
    "task damaged": script(
        "eval.py --ckpt out/run --tasks openbookqa --data t",
        "record 1",
        write("t/openbookqa/test.jsonl", b"{"),
    ),
    "other data": script(
        "eval.py --ckpt out/run --tasks heldout",
        "not what this checkpoint was trained on",
        forge("val.bin", fill_tokens),
    ),
}

SAMPLE = {
    "no checkpoint": script("sample.py --prompt a", "no such file or directory: out/demo"),
    "too long": script("sample.py --ckpt out/run --mode diffusion --length 99", "window of 32"),
    "no gap": script("sample.py --ckpt out/run --mode infill --prompt a", "nothing to fill in"),
    "not a share": script("sample.py --ckpt out/run --prompt a --top_p 2", "--top_p"),
    "no tokenizer": script(
        "sample.py --ckpt out/run --prompt a",
        "has no tokenizer",
        edit_checkpoint(lambda content: content.pop("tokenizer")),
    ),
    "unknown ids": script(
        "sample.py --ckpt out/run --prompt a", "has no embedding", edit_checkpoint(more_ids)
    ),
    "impossible layers": script(
        "sample.py --ckpt out/run",
        "n_layer",
        edit_checkpoint(lambda content: content["settings"].update(n_layer=10**12)),
    ),
}

EXPORT = {
    "nothing named": script("export.py --out hf", "one of the arguments --ckpt --from_llama"),
    "already there": script("export.py --ckpt out/run --out data", "data already exists"),
    "not a model": script(
        "export.py --from_official a.bin --out hf",
        "a.bin has no weights",
        write("a.bin", b"a"),
    ),
    "not a Llama": script("export.py --from_llama data --out hf", "no config.json in data"),
}

RUN_LINE = b'{"repetitions": 4, "alpha": "1/2", "val_ar": 2.5}\n'
SWEEP = {
    "no results": script("sweep.py fit --results none.jsonl", "none.jsonl"),
    "not JSON": script(
        "sweep.py table --results a.jsonl", "a.jsonl, line 2", write("a.jsonl", RUN_LINE + b"{")
    ),
    "too few runs": script(
        "sweep.py fit --results a.jsonl", "needs 5 runs", write("a.jsonl", RUN_LINE)
    ),
    "no such column": script(
        "sweep.py table --results a.jsonl --target val_arr",
        "did you mean 'val_ar'?",
        write("a.jsonl", RUN_LINE),
    ),
    "no grid": script("sweep.py run --config config/parity.py", "which runs?"),
}

TABLES = {
    "settings": SETTINGS,
    "data": DATA,
    "run directory": RUN_DIRECTORY,
    "full disk": FULL_DISKS,
    "prepare": PREPARE,
    "eval": EVAL,
    "sample": SAMPLE,
    "export": EXPORT,
    "sweep": SWEEP,
}
CASES = {}
for table, cases in TABLES.items():
    for name, case in cases.items():
        CASES[f"{table}: {name}"] = case


# ---- running them --------------------------------------------------------------------------------
class Result(NamedTuple):
    status: int
    output: str
    before: dict  # {path: content}
    after: dict


def read_files(folder):
    """Return {path: content} of all files but the lock."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != ".lock":
            files[path.relative_to(folder)] = path.read_bytes()
    return files


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(corpus / "data", folder / "data")
    run("train.py", *flags(data_dir="data/tiny", out_dir="out/run"), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def launcher():
    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def result(name, launcher, finished, tmp_path):
    """The result of a case, run in a copy of the folder."""
    case = CASES[name]
    folder = tmp_path / "folder"
    output = tmp_path / "output.txt"
    shutil.copytree(finished, folder)
    for change in case.changes:
        change(folder)
    before = read_files(folder)
    command, *arguments = shlex.split(case.command)
    pid = launcher.start(command, arguments, folder, output, case.fault)
    status = launcher.wait(pid)
    return Result(status, output.read_text(), before, read_files(folder))


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_and_harms_nothing(name, result):
    output = result.output
    errors = re.findall(r"^(?:\w+\.py: )?error: .*", output, re.MULTILINE)
    assert result.status in (1, 2), output
    assert len(errors) == 1 and CASES[name].says in errors[0], output
    assert "Traceback" not in output

    for path, content in result.before.items():
        rewritten = path.name == "log.jsonl" and "continuing" in output
        assert rewritten or result.after[path] == content, f"{path} has changed"
    for path in result.after.keys() - result.before.keys():
        assert ".tmp" not in path.name and "unfinished" not in str(path), f"{path} is left"


EVALUATE = ["--ckpt", "out/run", "--tasks", "heldout", "--modes", "ar", "--limit", "40"]


def test_an_evaluation_that_cannot_be_resumed_is_finished(launcher, finished, tmp_path):
    """The folder of the checkpoint is full, or belongs to someone else."""
    output = tmp_path / "output.txt"
    pid = launcher.start("eval.py", EVALUATE, finished, output, ["full_disk", 600])
    assert launcher.wait(pid) == 0, output.read_text()
    assert "this evaluation cannot be resumed" in output.read_text()
    assert "heldout" in output.read_text()


def test_damaged_scores_of_an_earlier_evaluation_are_computed_again(launcher, finished, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(finished, folder)
    tables = []
    for name in ("first", "again"):
        pid = launcher.start("eval.py", EVALUATE, folder, tmp_path / name)
        assert launcher.wait(pid) == 0
        tables.append((tmp_path / name).read_text())
        for file in (folder / "out/run").glob("eval-*.json"):
            os.truncate(file, 50)
    assert "damaged" in tables[1]
    assert tables[1].endswith(tables[0])


def test_output_that_cannot_be_encoded_is_not_an_error(finished):
    """±, or whatever an untrained model says."""
    run("eval.py", *EVALUATE, cwd=finished, PYTHONIOENCODING="ascii")


def test_ranks_that_fail_together_print_one_line(finished):
    """torchrun adds a report of its own."""
    arguments = flags(data_dir="data/tiny", out_dir="out/new", batch_size=2)
    output = torchrun(2, "train.py", *arguments, cwd=finished, code=1)
    (error,) = re.findall("^error: .*", output, re.MULTILINE)
    assert "2 processes cannot share 1 slots" in error
    assert 'train.py", line' not in output


# ---- checkpoints ---------------------------------------------------------------------------------
def test_a_checkpoint_with_any_byte_changed_is_refused_or_the_same(finished, tmp_path):
    """Headers, checksums, tensors: whichever byte is hit, no wrong weight is read."""
    sound = load_checkpoint(str(finished / "out/run"))["model"]
    content = bytearray((finished / "out/run/ckpt_6.pt").read_bytes())
    path = tmp_path / "ckpt.pt"
    size = len(content)
    for position in [*range(0, size, size // 100), *range(size - 150, size)]:
        content[position] ^= 255
        path.write_bytes(content)
        content[position] ^= 255
        try:
            found = load_checkpoint(str(path))["model"]
        except SystemExit as error:
            assert str(error.code).startswith("error: ")
        else:
            for name, weight in sound.items():
                assert torch.equal(found[name], weight), position


def test_a_checkpoint_that_a_running_job_replaces_is_not_called_damaged(
    finished, tmp_path, monkeypatch
):
    """It is gone by the time it is read, but there is a newer one."""
    shutil.copytree(finished / "out/run", tmp_path / "run")
    load = torch.load

    def replace_and_load(file, **options):
        monkeypatch.undo()
        os.replace(file, tmp_path / "run/ckpt_8.pt")
        return load(file, **options)

    monkeypatch.setattr("torch.load", replace_and_load)
    assert load_checkpoint(str(tmp_path / "run"))["step"] == 6


def test_a_link_to_a_checkpoint_that_is_gone_is_named(tmp_path):
    (tmp_path / "ckpt_9.pt").symlink_to(tmp_path / "gone.pt")
    with pytest.raises(FileNotFoundError, match="ckpt_9.pt"):
        load_checkpoint(str(tmp_path))


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(finished, monkeypatch):
    def refuse(file):
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr("zipfile.ZipFile", refuse)
    with pytest.raises(PermissionError):
        load_checkpoint(str(finished / "out/run"))
