"""A user's mistake, a damaged file, a full disk: one line that says what is wrong, a failure, nothing half-written."""
import fcntl
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import zipfile

import numpy as np
import pytest
import torch

from conftest import ROOT, flags, run, tiny_settings, torchrun
from data import Stream, fingerprint, open_data
from model import load_checkpoint

# every case is a process of its own, but they are forks of one that has imported torch already
FORK = """
import gc, json, os, resource, runpy, signal, sys
root = sys.argv[1]
sys.path.insert(0, root)
import data, model, muon, torch._dynamo  # what train.py will ask for
gc.freeze()
results = {}
for name, (folder, script, argv, limit) in json.load(open(sys.argv[2])).items():
    output, end = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        os.chdir(folder)
        os.dup2(end, 1)
        os.dup2(end, 2)
        if limit is not None:  # as if the disk were full
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        sys.argv = [os.path.join(root, script), *argv]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    os.close(end)
    text = open(output).read()
    results[name] = [os.waitpid(child, 0)[1], text]
print(json.dumps(results))
"""


# ---- changes to a folder that holds data/tiny and the finished run out/run -------------------------------------------

def write(path, content):
    def change(folder):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return change


def remove(*paths):
    return lambda folder: [(folder / path).unlink() for path in paths]


def truncate(path):
    return lambda folder: os.truncate(folder / path, os.path.getsize(folder / path) // 2)


def flip(path, where=0.5):
    def change(folder):
        content = bytearray((folder / path).read_bytes())
        content[int(where * len(content))] ^= 1
        (folder / path).write_bytes(content)
    return change


def meta(**entries):
    def change(folder):
        path = folder / "data/tiny/meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return change


def other_data(path, token=None):
    """A corpus that is another but sound: its meta.json describes it."""
    def change(folder):
        file = folder / "data/tiny" / path
        if token is None:
            file.write_bytes(file.read_bytes() + b" ")
        else:
            np.full(os.path.getsize(file) // 2, token, np.uint16).tofile(file)
        files = json.loads((folder / "data/tiny/meta.json").read_text())["files"]
        meta(files={**files, path: fingerprint(file)})(folder)
    return change


def forge(path, edit):
    """Another file of data/tiny, with the hash that it has then."""
    def change(folder):
        file = folder / "data/tiny" / path
        file.write_bytes(edit(file.read_bytes()))
        files = json.loads((folder / "data/tiny/meta.json").read_text())["files"]
        meta(files={**files, path: fingerprint(file)})(folder)
    return change


def compress(folder):
    """A checkpoint that is small, but could unpack to anything."""
    unfinished(folder)
    content = torch.load(folder / "out/run/ckpt.pt", weights_only=True)
    torch.save(content | {"model": {"x": torch.zeros(10 ** 6)}}, folder / "plain.zip")
    with zipfile.ZipFile(folder / "plain.zip") as plain, zipfile.ZipFile(folder / "out/run/ckpt.pt", "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))


def checkpoint(edit):
    """The run's only checkpoint, edited; its checksums are right."""
    def change(folder):
        content = torch.load(folder / "out/run/ckpt.pt", weights_only=True)
        edit(content)
        torch.save(content, folder / "out/run/ckpt.pt")
        os.remove(folder / "out/run/ckpt_decay.pt")
    return change


def other_shape(content):
    content["model"]["embed.weight"] = content["model"]["embed.weight"][:, :-1].clone()


def weights_alone(content):
    for key in content.keys() - {"model", "settings", "step", "tokenizer"}:
        del content[key]


def unfinished(folder):
    os.replace(folder / "out/run/ckpt_decay.pt", folder / "out/run/ckpt.pt")


def locked(folder):
    """Held as by a process that trains there; until the tests end."""
    locked.file = open(folder / "out/run/.lock", "w")
    fcntl.flock(locked.file, fcntl.LOCK_EX)


def more_ids(content):
    tokenizer = json.loads(content["tokenizer"])
    tokenizer["model"]["vocab"]["and more"] = 300
    content["tokenizer"] = json.dumps(tokenizer)


# ---- the cases: changes to the folder; settings of train.py beside conftest's, or a command; what the line says ------

RESUME, NEW = dict(resume=True), dict(out_dir="out/new")
CASES = {
    # settings
    "unknown setting": ([], dict(learing_rate=1), "no setting named 'learing_rate', did you mean 'learning_rate'?"),
    "batch not divisible": ([], dict(batch_size=7), "'batch_size' must be a multiple of micro_batch_size: 6 or 8"),
    "alpha above 1": ([], dict(alpha="65/64"), "'alpha' must be a share from 0 to 1"),
    "alpha too long": ([], dict(alpha="1e999999999"), "'alpha' must be a share from 0 to 1"),
    "rate too long": ([], dict(learning_rate="1" + "0" * 400), "'learning_rate' is float"),
    "nested too deeply": ([], dict(seed="-" * 9999 + "1"), "'seed' is int"),
    "too many layers": ([], dict(n_layer=10 ** 12), "'n_layer' must be at most 1000"),
    "too little to validate": ([], dict(eval_tokens=31), "'seq_len' must be from 2 to eval_tokens 31"),
    # data
    "not prepared": ([], dict(data_dir="data/x"), "make it with: python prepare.py [--input FILES --out data/x]"),
    "demo not prepared": ([], dict(data_dir="data/pydocs"), "make it with: python prepare.py"),
    "train.bin truncated": ([truncate("data/tiny/train.bin")], NEW, "data/tiny/train.bin is not what"),
    "train.bin flipped": ([flip("data/tiny/train.bin")], NEW, "data/tiny/train.bin is not what"),
    "train.idx flipped": ([flip("data/tiny/train.idx")], NEW, "data/tiny/train.idx is not what"),
    "val.bin truncated": ([truncate("data/tiny/val.bin")], NEW, "data/tiny/val.bin is not what"),
    "another tokenizer.json": ([flip("data/tiny/tokenizer.json")], NEW, "data/tiny/tokenizer.json is not what"),
    "no tokenizer.json": ([remove("data/tiny/tokenizer.json")], NEW, "data/tiny/tokenizer.json"),
    "no train.bin": ([remove("data/tiny/train.bin")], NEW, "data/tiny/train.bin"),
    "meta.json truncated": ([truncate("data/tiny/meta.json")], NEW, "data/tiny is not prepared, or damaged"),
    "meta.json not text": ([write("data/tiny/meta.json", b"\xff\xfe\x00")], NEW, "data/tiny is not prepared, or damaged"),
    "meta.json a list": ([write("data/tiny/meta.json", "[]")], NEW, "data/tiny is not prepared, or damaged"),
    "meta.json without files": ([meta(files={})], NEW, "data/tiny is not prepared, or damaged"),
    "meta.json of the future": ([meta(version=99)], NEW, "or not of format 1: run prepare.py again"),
    "meta.json nested": ([write("data/tiny/meta.json", "[" * 99999)], NEW, "data/tiny is not prepared, or damaged"),
    "documents overlap": ([forge("train.idx", lambda b: b[:8] + b[16:24] + b[8:16] + b[24:])], NEW, "documents overlap"),
    "documents beyond the end": ([forge("val.bin", lambda b: b[:-2])], NEW, "go beyond the end"),
    "half a token": ([forge("train.bin", lambda b: b[:-1])], NEW, "data/tiny is not prepared, or damaged"),
    "no tokens": ([forge("train.bin", lambda b: b"")], NEW, "data/tiny is not prepared, or damaged"),
    "no tokenizer": ([forge("tokenizer.json", lambda b: b"{}")], NEW, "data/tiny is not prepared, or damaged"),
    "vocab too small": ([], NEW | dict(vocab_size=299), "vocab_size 299 is too small"),
    "token id too big": ([other_data("train.bin", token=300)], NEW, "token id 300"),
    "held-out token id too big": ([other_data("val.bin", token=300)], NEW, "token id 300"),
    "corpus too small": ([], NEW | dict(max_steps=10000), "raise repetitions to at least "),
    "corpus below a window": ([], NEW | dict(seq_len=10 ** 6, eval_tokens=10 ** 6), "less than one window of seq_len"),
    "no held-out window": ([], NEW | dict(seq_len=40000, eval_tokens=40000, repetitions=48), "data/tiny/val.bin has"),
    # the run directory
    "another run there": ([], {}, "out/run holds a run already: continue it with --resume=True"),
    "a file in the way": ([write("out/new", "mine")], NEW, "out/new"),
    "in use": ([locked], RESUME, "another process is training in out/run"),
    "nothing to resume": ([], RESUME | NEW, "no readable checkpoint in out/new"),
    "resumed with another setting": ([unfinished], RESUME | dict(learning_rate=0.5), "learning_rate was 0.007, is 0.5"),
    "resumed with another shape": ([unfinished], RESUME | dict(n_layer=3), "n_layer was 2, is 3"),
    "resumed with other data": ([unfinished, other_data("train.bin", token=200)], RESUME, "the data in data/tiny"),
    "resumed with another tokenizer": ([unfinished, other_data("tokenizer.json")], RESUME, "the data in data/tiny"),
    "checkpoint truncated": ([unfinished, truncate("out/run/ckpt.pt")], RESUME, "no readable checkpoint in out/run"),
    "checkpoint flipped": ([unfinished, flip("out/run/ckpt.pt")], RESUME, "no readable checkpoint in out/run"),
    "checkpoint directory flipped": ([unfinished, flip("out/run/ckpt.pt", 0.999)], RESUME, "no readable checkpoint"),
    "not a checkpoint": ([checkpoint(dict.clear)], RESUME, "no readable checkpoint in out/run"),
    "checkpoint compressed": ([compress], RESUME, "no readable checkpoint in out/run"),
    "checkpoint with too little momentum": ([checkpoint(lambda c: c["momentum"].pop())], RESUME, "is of another model"),
    "checkpoint of another shape": ([checkpoint(other_shape)], RESUME, "is of another model"),
    "checkpoint without momentum": ([checkpoint(lambda c: c.pop("momentum"))], RESUME, "momentum"),
    "checkpoint of weights alone": ([checkpoint(weights_alone)], RESUME, "checkpoint in out/run"),
    "checkpoint of other code": ([checkpoint(lambda c: c["settings"].update(dropout=0.1))], RESUME, "dropout was 0.1"),
    # full
    "prepare: disk full": ([], dict(command="prepare.py --out data/x", limit=10_000), "File too large"),
    "disk full": ([unfinished], RESUME | dict(limit=100_000), "could not write out/run/ckpt.pt at step 6"),
    "disk full from the start": ([unfinished], RESUME | dict(limit=0), "File too large"),
    # of other scripts
    "prepare: no such file": ([], "prepare.py --input none.jsonl --out data/x", "no such file, or none of .txt"),
    "prepare: no folder named": ([write("a.txt", "a")], "prepare.py --input a.txt", "--out"),
    "prepare: unknown format": ([write("a.pdf", "a")], "prepare.py --input a.pdf --out data/x", ": a.pdf"),
    "prepare: vocabulary too small": ([], "prepare.py --vocab_size 100", "--vocab_size must be from 272 to 65535"),
    "prepare: all held out": ([], "prepare.py --val_fraction 1", "--val_fraction"),
    "prepare: empty": ([write("a.jsonl", "")], "prepare.py --input a.jsonl --out data/x", "none is left to train on"),
    "prepare: one document": ([write("a.txt", "a")], "prepare.py --input a.txt --out data/x", "none is left to train on"),
    "prepare: malformed": ([write("a.jsonl", '{"text": 1}\n' * 9)], "prepare.py --input a.jsonl --out x", "9 of 9 documents"),
    "prepare: not gzip": ([write("a.jsonl.gz", "a")], "prepare.py --input a.jsonl.gz --out data/x", "cannot read a.jsonl.gz"),
    "prepare: a file in the way": ([write("a.txt", "a")], "prepare.py --input a.txt --out a.txt", "a.txt"),
    "eval: no checkpoint named": ([], "eval.py", "--ckpt"),
    "eval: no such checkpoint": ([], "eval.py --ckpt out/none --tasks heldout", "no such checkpoint: out/none"),
    "eval: no checkpoint there": ([], "eval.py --ckpt data --tasks heldout", "no readable checkpoint in data"),
    "eval: unknown task": ([], "eval.py --ckpt out/run --tasks arc_eazy", "did you mean 'arc_easy'?"),
    "eval: unknown mode": ([], "eval.py --ckpt out/run --modes prefixes", "did you mean 'prefix'?"),
    "eval: no masks": ([], "eval.py --ckpt out/run --pll 0", "--pll"),
    "eval: no task files": ([], "eval.py --ckpt out/run --tasks piqa", "prepare.py --tasks"),
    "eval: task damaged": (
        [write("t/openbookqa/test.jsonl", "{")], "eval.py --ckpt out/run --tasks openbookqa --data t", "record 1"),
    "eval: other data": ([other_data("val.bin", 99)], "eval.py --ckpt out/run --tasks heldout", "not what this checkpoint"),
    "sample: no checkpoint": ([], "sample.py --prompt a", "no such checkpoint"),
    "sample: too long": ([], "sample.py --ckpt out/run --prompt a --length 99", "window of 32"),
    "sample: nothing to fill": ([], "sample.py --ckpt out/run --mode infill --prompt a", "nothing to fill in"),
    "sample: not a share": ([], "sample.py --ckpt out/run --prompt a --top_p 2", "--top_p"),
    "sample: no prompt file": ([], "sample.py --ckpt out/run --prompt_file none.txt", "none.txt"),
    "sample: not UTF-8": ([write("a.txt", b"\xff")], "sample.py --ckpt out/run --prompt_file a.txt", "UTF-8"),
    "sample: no tokenizer": ([checkpoint(lambda c: c.pop("tokenizer"))], "sample.py --ckpt out/run --prompt a", "tokenizer"),
    "sample: unknown ids": ([checkpoint(more_ids)], "sample.py --ckpt out/run --prompt a", "does not fit this code"),
    "sample: no such layers": (
        [checkpoint(lambda c: c["settings"].update(n_layer=10 ** 12))], "sample.py --ckpt out/run", "n_layer"),
    "export: nothing to export": ([], "export.py --out hf", "give --ckpt or --from_official"),
    "export: already there": ([], "export.py --ckpt out/run --out data", "an --out that does not exist yet"),
    "export: not a model": ([write("a.bin", "a")], "export.py --from_official a.bin --out hf", "cannot export a.bin"),
    # on the way
    "not finite": ([], NEW | dict(learning_rate=1e15, save_interval=1), "not finite at step 1"),
}
missing = [device for device in ("cuda", "mps") if not getattr(torch, device).is_available()]
if missing:
    CASES["no such device"] = ([], NEW | dict(device=missing[0]), f"this machine has no '{missing[0]}', only: ")
CASES["unknown device"] = ([], NEW | dict(device="gpu"), "this machine has no 'gpu', only: ")
if not importlib.util.find_spec("wandb"):
    CASES["no wandb"] = ([], NEW | dict(wandb=True), "pip install wandb")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A folder with data/tiny and out/run, where a run of 6 steps has left ckpt.pt and, of step 4, ckpt_decay.pt."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(corpus / "data", folder / "data")
    run("train.py", *flags(data_dir="data/tiny", out_dir="out/run"), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def results(finished, tmp_path_factory):
    """{name: (folder, contents before, exit status, output)} of every case."""
    root, results, jobs = tmp_path_factory.mktemp("cases"), {}, {}
    for name, (changes, settings, _) in CASES.items():
        folder = root / re.sub(r"\W+", "_", name)
        settings = {"command": settings} if isinstance(settings, str) else dict(settings)
        shutil.copytree(finished, folder)
        for change in changes:
            change(folder)
        limit = settings.pop("limit", None)
        if "command" in settings:
            script, *argv = shlex.split(settings["command"])
        else:
            script, argv = "train.py", flags(**{"data_dir": "data/tiny", "out_dir": "out/run", **settings})
        jobs[name] = str(folder), script, argv, limit
        results[name] = folder, contents(folder)
    (root / "jobs.json").write_text(json.dumps(jobs))
    output = run(sys.executable, "-c", FORK, ROOT, str(root / "jobs.json"), cwd=root)
    for name, result in json.loads(output.splitlines()[-1]).items():
        results[name] += tuple(result)
    return results


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_harms_nothing(name, results):
    folder, before, status, output = results[name]
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert status != 0, output
    assert len(errors) == 1 and CASES[name][2] in errors[0], output
    assert "Traceback" not in output, output
    after = contents(folder)
    assert not [path for path in after if ".tmp" in path.name or "unfinished" in str(path.relative_to(folder))]
    for path, content in before.items():
        assert after[path] == content or (path.name == "log.jsonl" and "resuming" in output), f"{path} has changed"
    for path in after.keys() - before.keys():
        assert path.suffix != ".pt" or load_checkpoint(str(path))["step"] > 0


def test_a_number_of_processes_that_does_not_fit_is_one_line(finished):
    """From one of them; torchrun adds a report of its own."""
    output = torchrun(2, "train.py", *flags(data_dir="data/tiny", out_dir="out/new", batch_size=2), cwd=finished, code=1)
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "2 processes cannot share 1 slots" in errors[0], output
    assert "train.py\", line" not in output and not (finished / "out/new").exists()


def test_the_repetitions_asked_for_are_the_least_that_work(finished):
    """For runs of several lengths: with X the corpus is enough, with X - 1 it is not."""
    data, _ = open_data(str(finished / "data/tiny"), 300)
    for max_steps in (997, 1500, 4321, 10 ** 5):
        with pytest.raises(SystemExit) as error:
            Stream(*data["train"], tiny_settings(max_steps=max_steps, repetitions=1))
        least = int(re.search(r"raise repetitions to at least (\d+)$", str(error.value)).group(1))
        Stream(*data["train"], tiny_settings(max_steps=max_steps, repetitions=least))
        with pytest.raises(SystemExit):
            Stream(*data["train"], tiny_settings(max_steps=max_steps, repetitions=least - 1))


def test_a_checkpoint_with_any_byte_changed_is_refused_or_the_same(finished, tmp_path):
    """Headers, checksums, tensors: whichever byte is hit, there is no traceback and no other weight."""
    sound = load_checkpoint(str(finished / "out/run"))
    content, path = bytearray((finished / "out/run/ckpt.pt").read_bytes()), tmp_path / "ckpt.pt"
    for position in [*range(0, len(content), len(content) // 100), *range(len(content) - 150, len(content))]:
        content[position] ^= 255
        path.write_bytes(content)
        content[position] ^= 255
        try:
            found = load_checkpoint(str(path))
        except SystemExit as error:
            assert str(error.code).startswith("error: ")
            continue
        assert all(torch.equal(found["model"][k], v) for k, v in sound["model"].items()), position
