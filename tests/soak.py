"""
The long form of the fault tests; pytest does not collect it, test_faults.py runs a quick form of its parts.

    python tests/soak.py                              # 50 kills, 20,000 inputs for each reader
    python tests/soak.py --kills 500 --inputs 0 --seed 2

Kills: small runs are ended at random moments in every way there is, restarted, and compared with a run in peace.
Inputs: each reader gets damaged or hostile files. A result, or SystemExit with one line, is fine; all else is a bug.
"""
import argparse
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile

import numpy as np
import torch

from conftest import ROOT, flags, prose, random_model, run, tiny_settings

# ---- processes: forks of one that has imported torch already, so that a start takes a fraction of a second -----------


def serve():
    """Start what standard input asks for, one JSON line each; answer with the process id, or with an exit status."""
    import data, model, muon, torch._dynamo  # noqa: F401, E401  (what train.py will ask for)
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            end, done = time.time() + job["seconds"], (0, 0)
            while not done[0] and time.time() < end:
                done = os.waitpid(job["wait"], os.WNOHANG)
                time.sleep(0 if done[0] else 0.005)
            print(json.dumps(os.waitstatus_to_exitcode(done[1]) if done[0] else None), flush=True)
        elif child := os.fork():
            print(child, flush=True)
        else:
            os.setsid()
            os.chdir(job["cwd"])
            with open(job["output"], "ab") as output, open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.environ.update(job["environment"])
            if job["hook"]:
                globals()[job["hook"][0]](*job["hook"][1:])
            sys.argv = [os.path.join(ROOT, job["script"]), *job["argv"]]
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.exit()


class Launcher:
    def __enter__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
        self.server = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=environment)
        self.running = set()
        return self

    def __exit__(self, *_):
        for pid in set(self.running):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        self.server.stdin.close()
        self.server.wait()

    def ask(self, **job):
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, script, argv, cwd, output, hook=None, **environment):
        pid = self.ask(script=script, argv=argv, cwd=str(cwd), output=str(output), hook=hook, environment=environment)
        self.running.add(pid)
        return pid

    def wait(self, pid, seconds=120):
        """The exit status; None while it runs."""
        status = self.ask(wait=pid, seconds=seconds)
        self.running -= {pid} if status is not None else set()
        return status

    def ranks(self, n, *job, hooks=None, **environment):
        """n processes of one group, as torchrun starts them; hooks: {rank: hook}."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        group = dict(WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)) if n > 1 else {}
        return [self.start(*job, hook=(hooks or {}).get(r), **environment, **group,
                           **(dict(RANK=str(r), LOCAL_RANK=str(r)) if n > 1 else {})) for r in range(n)]


# ---- hooks: faults that happen inside train.py at a chosen point -----------------------------------------------------


def die_in_save(number, point):
    """SIGKILL in the number-th checkpoint: after a share of its bytes, or at the next fsync, link, replace, or after it."""
    save, count = torch.save, [0]

    def saving(content, file):
        count[0] += 1
        if count[0] < number:
            return save(content, file)
        whole = io.BytesIO()
        save(content, whole)
        if isinstance(point, float):
            file.write(whole.getvalue()[:int(point * whole.tell())])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        name, before = point.split()
        act = getattr(os, name)

        def acting(*arguments):
            if before == "after":
                act(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(os, name, acting)
        file.write(whole.getvalue())
    torch.save = saving


def bad_gradient(step, value):
    """Put a value into a gradient of this rank, at a step."""
    import torch.nn.utils as utils
    norm, count = utils.get_total_norm, [0]

    def get_total_norm(gradients):
        gradients = list(gradients)
        if count[0] == step:
            gradients[3].view(-1)[5] = value
        count[0] += 1
        return norm(gradients)
    utils.get_total_norm = get_total_norm


# ---- kills -----------------------------------------------------------------------------------------------------------

STEPS = 24
RUN = dict(data_dir="data/tiny", max_steps=STEPS, decay_steps=8, eval_interval=6, save_interval=3, keep=3)


def make_corpus(folder):
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in prose(400)))
    run("prepare.py", "--input", "text.jsonl", "--out", "data/tiny", "--vocab_size", "300", cwd=folder)


def read(path):
    return torch.load(path, weights_only=True)


def log_of(folder):
    """The log without the speed."""
    with open(folder / "log.jsonl") as f:
        return [{k: v for k, v in json.loads(line).items() if k != "tok_per_s"} for line in f]


def difference(a, b):
    """The largest relative L2 distance of a tensor; 0 only if all bits are equal."""
    return max(float((a[k] - b[k]).norm() / a[k].norm()) if not torch.equal(a[k], b[k]) else 0.0 for k in a)


def kill_runs(launcher, folder, kills, seed, worlds=(1,), say=lambda *_, **__: None):
    """Runs that are killed at random moments, until there were so many kills. Returns counts and the largest difference of
    final weights from those of a run in peace; every checkpoint found after a kill must be whole, and none older."""
    rng, kinds = random.Random(seed), ("SIGKILL", "SIGTERM", "in a checkpoint", "one of several ranks")
    count = dict.fromkeys(("kills", "restarts", "runs", "bytes lost", "slowest end", "difference", *kinds), 0)
    peace = folder / "out/peace"
    launcher.wait(launcher.start("train.py", ["-h"], folder, os.devnull))  # until it has imported everything
    shutil.rmtree(peace, ignore_errors=True)
    start = time.time()
    status = launcher.wait(launcher.start("train.py", flags(**RUN, out_dir="out/peace"), folder, folder / "peace.txt"))
    assert status == 0, (folder / "peace.txt").read_text()
    duration, whole = time.time() - start, read(peace / "ckpt.pt")["model"]
    while count["kills"] < kills:
        out, output = f"out/killed{seed}_{count['runs']}", folder / f"killed{seed}_{count['runs']}.txt"
        used, best, done, count["runs"] = [], 0, False, count["runs"] + 1
        while not done:
            n = worlds[len(used) % len(worlds)]
            used.append(n)
            kind = rng.choice(kinds if n > 1 else kinds[:3])
            if len(used) > 12 or count["kills"] >= kills and count["runs"] > 1:
                kind = None  # enough
            resume = [] if not list((folder / out).glob("ckpt*.pt")) else ["--resume=True"]
            hook = None
            if kind == "in a checkpoint":
                hook = {0: ["die_in_save", rng.randint(1, 3), rng.choice(
                    (rng.random(), "fsync before", "link before", "link after", "replace before", "replace after"))]}
            pids = launcher.ranks(n, "train.py", flags(**RUN, out_dir=out) + resume, folder, output, hooks=hook)
            killed = []
            if kind and not hook:
                time.sleep(rng.random() * duration * (1 - best / STEPS / 2) * 0.8)
                killed = [rng.choice(pids)] if kind == "one of several ranks" else pids
                for pid in killed:
                    os.kill(pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
            begin = time.time()
            statuses = [launcher.wait(pid) for pid in pids]  # no rank hangs: the others notice by themselves
            assert None not in statuses, f"a process hangs: {statuses}, {output}"
            done = statuses == [0] * n
            if not done:
                text = output.read_text()
                expected = {"SIGTERM": {143, -15, 1}, None: set()}.get(kind, {-9, 1})
                assert set(statuses) <= expected | {0} and "error: " not in text, f"{kind}: {statuses}\n{text[-3000:]}"
                for name in ("kills", "restarts", kind):
                    count[name] += 1
                count["slowest end"] = max(count["slowest end"], time.time() - begin if killed else 0)
                for file in (folder / out).glob("ckpt*.pt"):
                    try:
                        read(file)
                    except Exception as error:
                        count["bytes lost"] += os.path.getsize(file)
                        say(f"{file} after {kind}: {error}")
                newest = read(folder / out / "ckpt.pt")["step"] if (folder / out / "ckpt.pt").exists() else 0
                assert newest >= best, f"step {best} was saved, now the newest is {newest}"
                best = newest
            say(f"\rkills {count['kills']}, runs {count['runs']} ", end="")
        assert log_of(folder / out)[-1]["done"] and not list((folder / out).glob("*.tmp*"))
        distance = difference(whole, read(folder / out / "ckpt.pt")["model"])
        count["difference"] = max(count["difference"], distance)
        if worlds == (1,):
            assert distance == 0 and log_of(folder / out) == log_of(peace), f"{out} is another run"
        assert distance <= 1e-4, f"{out}: {distance}"
        shutil.rmtree(folder / out)
    return count


# ---- inputs ----------------------------------------------------------------------------------------------------------

ODD = [None, True, -1, 0, 10 ** 30, -2 ** 63, 0.5, 1e308, float("nan"), float("inf"), "", "\0", "\ud800", "a" * 5000, [],
       {}, [[]], [None] * 40, {"a": None}, "../../x", "/etc/passwd", "1", "-1", "[]"]
SNIPPETS = [b"", b"\0", b"\xff", b"\n", b"\r", b'"', b"{", b"}", b"[" * 3000, b"]", b"\\u", b"\\ud800", b"null", b"NaN",
            b"1e999", b"-", b",", b":", b"9" * 5000, b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"PK\x03\x04",
            b"\x1f\x8b\x08", b"../"]


def damaged(content, rng):
    """Bytes after one to four accidents: bits flipped, parts cut out, repeated, overwritten, put in, the end missing."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        a = rng.randrange(len(content) + 1)
        b = min(len(content), a + rng.choice((1, 1, 2, 8, 100, 10000)))
        accident = rng.randrange(7)
        if accident == 0 and a < len(content):
            content[a] ^= 1 << rng.randrange(8)
        elif accident == 1:
            del content[a:b]
        elif accident == 2:
            content[a:a] = content[a:b]
        elif accident == 3:
            content[a:b] = rng.randbytes(b - a)
        elif accident == 4:
            content[a:a] = rng.choice(SNIPPETS)
        elif accident == 5:
            content[a:b] = rng.choice(SNIPPETS)
        else:
            del content[a:]
    return bytes(content)


def altered(value, rng):
    """A copy of nested lists and dicts in which one thing is another, is missing, or is there twice."""
    if isinstance(value, (list, dict)) and value and rng.random() < 0.9:
        copy, key = type(value)(value), rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        act = rng.randrange(6)
        if act == 0:
            del copy[key]
        elif act == 1 and isinstance(copy, list):
            copy.insert(key, copy[rng.randrange(len(copy))])
        else:
            copy[key] = altered(copy[key], rng)
        return copy
    if isinstance(value, (int, float)) and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 0.5, 2 ** 16, 2 ** 31, -2 ** 31))
    return rng.choice(ODD)


def make_readers(folder):
    """{name: function of a random generator}: each makes one bad input and reads it. What it returns is not used: a wrong
    result, where right and wrong can be told apart, is an AssertionError."""
    import configurator
    import data
    import eval as evaluation
    import export
    import model
    import prepare
    from safetensors.torch import load_file, save, save_file

    # the first 20 documents of data/tiny, prepared
    tiny, target, files = folder / "data/tiny", folder / "bad", {}
    shutil.copytree(tiny, target, dirs_exist_ok=True)
    meta = json.loads((tiny / "meta.json").read_text())
    for split in ("train", "val"):
        starts = np.fromfile(tiny / f"{split}.idx", np.uint64)[:21]
        starts.tofile(target / f"{split}.idx")
        np.fromfile(tiny / f"{split}.bin", np.uint16)[:int(starts[-1])].tofile(target / f"{split}.bin")
    meta["files"] = {name: data.fingerprint(target / name) for name in data.FILES}
    (target / "meta.json").write_text(json.dumps(meta))
    for name in (*data.FILES, "meta.json"):
        files[name] = (target / name).read_bytes()
    small = tiny_settings(n_layer=1, n_embd=8, n_ff=8, n_head=1, max_steps=2, data_dir=str(tiny))
    tokenizer, previous = files["tokenizer.json"].decode(), set(files)
    sound, _ = data.open_data(str(target), 300)
    first = data.train_slot(data.Stream(*sound["train"], small), small, 0, 0)

    def prepared(rng):
        """A prepared folder; every other time the hashes in meta.json are right, as whoever made the file wanted."""
        name, meta = rng.choice(list(files)), json.loads(files["meta.json"])
        contents = {**files, name: damaged(files[name], rng)}
        if name == "meta.json" and rng.random() < 0.7:
            contents[name] = json.dumps(altered(meta, rng)).encode("utf-8", "surrogatepass")
        if name == "tokenizer.json" and rng.random() < 0.7:
            contents[name] = json.dumps(altered(json.loads(tokenizer), rng)).encode("utf-8", "surrogatepass")
        for file in previous | {name}:  # what the input before has left, and this one changes
            (target / file).write_bytes(contents[file])
        previous.clear()
        previous.update((name, "meta.json"))
        forged = name != "meta.json" and rng.random() < 0.7
        if forged:
            meta["files"][name] = data.fingerprint(target / name)
            (target / "meta.json").write_text(json.dumps(meta))
        found, _ = data.open_data(str(target), 300)
        slot = data.train_slot(data.Stream(*found["train"], small), small, 0, 0)
        list(data.val_batches(found["val"][0], small))
        assert forged or all(np.array_equal(a, b) for a, b in zip(slot, first)), f"{name} is wrong, nobody noticed"

    texts = prose(30)
    lines = [{"text": text, "id": i, "meta": {"a": [1, 2.5, None]}} for i, text in enumerate(texts)]

    def corpora(rng):
        """.jsonl, .jsonl.gz, .txt: the documents that are left, or one line."""
        import gzip
        kind = rng.choice((".jsonl", ".jsonl.gz", ".txt") + (".jsonl.zst",) * bool(importlib.util.find_spec("zstandard")))
        records = altered(lines, rng) if rng.random() < 0.5 else lines
        records = records if isinstance(records, list) else [records]
        content = "\n".join(json.dumps(record) for record in records).encode("utf-8", "surrogatepass")
        if kind == ".jsonl.gz":
            content = gzip.compress(content, mtime=0)
        if kind == ".jsonl.zst":
            content = __import__("zstandard").compress(content)
        path = folder / ("bad" + kind)
        path.write_bytes(damaged(content, rng))
        found = list(prepare.read([str(path)]))
        for raw in found:
            prepare.digest(raw)
        if kind == ".jsonl.gz" and records is lines and path.read_bytes() != content:
            parsed = [prepare.parse(raw) for raw in found]  # gzip has a checksum, but not over names and what is no member
            assert parsed == texts or not parsed or parsed == texts * (len(parsed) // len(texts)), "another text"

    torch.manual_seed(0)
    weights = random_model(small).state_dict()
    content = {"model": weights, "settings": vars(small), "step": 6, "tokenizer": tokenizer, "running": [0.0] * 4,
               "records": [{"step": 1, "val_ar": 2.5}], "data": json.loads(files["meta.json"])["files"]}
    whole = io.BytesIO()
    torch.save(content, whole)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(folder / "executed"),)

    def checkpoints(rng):
        """A checkpoint file: damaged; with other contents and right checksums; a pickle that wants to be executed."""
        path, kind = folder / "bad.pt", rng.choice("damaged damaged damaged altered altered evil".split())
        if kind == "damaged":
            path.write_bytes(damaged(whole.getvalue(), rng))
        elif kind == "evil":
            with contextlib.suppress(UnicodeEncodeError):
                torch.save({**content, rng.choice(list(content)): Evil()} if rng.random() < 0.5 else Evil(), path)
        else:
            with contextlib.suppress(UnicodeEncodeError):
                torch.save(altered(content, rng), path)
        found, coder, checkpoint = model.load_model(str(path), "cpu")
        if kind == "damaged":
            assert all(torch.equal(v, weights[k]) for k, v in found.state_dict().items()), "other weights"
        coder.encode("a <mask> b")

    def tokenizer_files(rng):
        """The tokenizer inside a checkpoint."""
        text = (json.dumps(altered(json.loads(tokenizer), rng)).encode("utf-8", "surrogatepass") if rng.random() < 0.5 else
                damaged(tokenizer.encode(), rng)).decode("utf-8", "replace")
        load = model.load_checkpoint
        model.load_checkpoint = lambda path: {**content, "tokenizer": text}
        try:
            found, coder, _ = model.load_model("bad", "cpu")
        finally:
            model.load_checkpoint = load
        ids = coder.encode("some text, <mask> and more\u00e9\U0001f600", add_special_tokens=False).ids
        assert all(i < 300 for i in ids), "an id without an embedding"

    choices = [{"text": text, "label": label} for label, text in zip("ABCD", "wxyz")]
    examples = {
        "arc_easy": {"id": "x", "question": {"stem": "What is it?", "choices": choices}, "answerKey": "B"},
        "blimp": {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps.", "UID": "agreement"},
        "hellaswag": {"activity_label": "Swim", "ctx_a": "A man swims.", "ctx_b": "he", "label": 2,
                      "endings": ["a.", "b [title] c.", "d", "e"]},
        "piqa": {"goal": "Open a jar", "sol1": "Turn it", "sol2": "Eat it"},
        "socialiqa": {"context": "A met B.", "question": "Why?", "answerA": "x", "answerB": "y", "answerC": "z"}}
    for name in ("arc_challenge", "commonsenseqa", "openbookqa"):
        examples[name] = examples["arc_easy"]

    def tasks(rng):
        """A task's release file, its labels included."""
        name = rng.choice([*examples, "mmlu"])
        task, target = evaluation.TASKS[name], folder / "tasks" / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for i in range(task.n_files):
            if name == "mmlu":
                content = "\n".join(['"What, then?",a,b,c,d,C'] * 3).encode()
                content = damaged(content, rng) if i == 5 else content
            else:
                records = [altered(examples[name], rng) if rng.random() < 0.3 else examples[name] for _ in range(3)]
                content = "\n".join(map(json.dumps, records)).encode("utf-8", "surrogatepass")
                content = damaged(content, rng) if rng.random() < 0.5 and i == 0 else content
            (target / task.file.replace("*", f"part{i:02}")).write_bytes(content)
        if task.labels:
            content = b"1\n1\n1\n"
            (target / task.labels).write_bytes(damaged(content, rng) if rng.random() < 0.3 else content)
        for d in evaluation.read_task(name, str(folder / "tasks"), 3):
            assert isinstance(d.context, str) and all(isinstance(c, str) and c.strip() for c in d.completions), d
            assert 0 <= d.gold < len(d.completions), d

    record = json.dumps(examples["openbookqa"]).encode() + b"\n"

    def archives(rng):
        """What prepare.py --tasks downloads, zip or tar: names that lead elsewhere, links, damage."""
        place, kind = folder / "archives", rng.choice((".zip", ".tar"))
        shutil.rmtree(place, ignore_errors=True)
        (place / "tasks").mkdir(parents=True)
        packed, members = io.BytesIO(), [("x/Main/test.jsonl", tarfile.REGTYPE)] * (rng.random() < 0.8)
        names = ("../../Main/test.jsonl", "Main/../test.jsonl", f"{place}/Main/test.jsonl", f"{place}/new", "../new",
                 "Main/test.jsonl/", "Main//test.jsonl", "..", "Main/\0test.jsonl", "Main\\test.jsonl")
        types = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE
        members += [(rng.choice(names), rng.choice(types)) for _ in range(rng.randrange(3))]
        rng.shuffle(members)
        with zipfile.ZipFile(packed, "w", 8) if kind == ".zip" else tarfile.open(fileobj=packed, mode="w") as archive:
            for name, what in members:
                content = record * rng.choice((3, 3, 3, 2, 99))
                if kind == ".zip":
                    with warnings.catch_warnings(action="ignore"):  # of a name that is there twice
                        archive.writestr(name, content)
                else:
                    member = tarfile.TarInfo(name)
                    member.type, member.linkname = what, "/etc/passwd"
                    member.size = len(content) if what == tarfile.REGTYPE else 0
                    archive.addfile(member, io.BytesIO(content))
        content = packed.getvalue()
        (folder / f"archive{kind}").write_bytes(damaged(content, rng) if rng.random() < 0.5 else content)
        releases, tasks = prepare.RELEASES, evaluation.TASKS
        prepare.RELEASES = {"openbookqa": ("Main/test.jsonl", f"file://{folder}/archive{kind}")}
        evaluation.TASKS = {**tasks, "openbookqa": tasks["openbookqa"]._replace(n=3)}
        try:
            prepare.fetch_tasks(place / "tasks")
            content = (place / "tasks/openbookqa/test.jsonl").read_bytes()
            assert content == record * 3 or kind == ".tar", "not what is in the archive"  # tar has no checksums of contents
        finally:
            prepare.RELEASES, evaluation.TASKS = releases, tasks
            found = {str(path.relative_to(place)) for path in place.rglob("*")}
            assert found <= {"tasks", "tasks/openbookqa", "tasks/openbookqa/test.jsonl"}, f"written or left: {found}"
            assert not (folder / "new").exists() and not os.path.islink(place / "tasks/openbookqa/test.jsonl")

    names = list(vars(configurator.Settings()))
    values = ["1", "0", "-1", "1e5", "1e-5", "1e999", "-1e999", "nan", "inf", "True", "None", "", "''", "[]", "1/2", "63/64",
              "1/0", "-1/2", "1e999999999", "1e-999999999", "10**9", "1_000", "0x10", "1j", "9" * 400, "9" * 5000,
              "-" * 3000 + "1", "(" * 300, "auto", "cpu", "cuda", "float32", "\0", "\ud800", "\u0661", "a=b", "--x", "1,2",
              "{}", "__import__('os').getpid()"]

    def settings(rng):
        """Command lines: what is accepted has the right types, is in range, and is accepted again."""
        argv = []
        for _ in range(rng.randint(1, 4)):
            name, number = rng.choice(names), rng.randint(-5, 2 ** rng.randint(1, 60))
            value = rng.choice((rng.choice(values), str(number), repr(rng.random())))
            if rng.random() < 0.2:
                name = damaged(name.encode(), rng).decode("latin-1").replace("\0", "")
            if rng.random() < 0.2:
                value = damaged(value.encode("utf-8", "surrogatepass"), rng).decode("latin-1")
            argv.append(f"--{name}={value}" if rng.random() < 0.95 else f"--{name}")
        s = configurator.load_settings(argv, "")
        for name, default in vars(configurator.Settings()).items():
            value = getattr(s, name)
            assert type(value) is type(default) and value != "", (argv, name)
            assert not isinstance(value, (int, float)) or 0 <= value <= 1e15, (argv, name)
        assert re.fullmatch(r"\d+(/\d+)?", s.alpha) and 0 <= eval(s.alpha) <= 1, argv
        assert s.batch_size % s.micro_batch_size == 0 and s.n_embd % (2 * s.n_head) == 0, argv
        assert vars(configurator.check(configurator.Settings(**vars(s)))) == vars(s)

    official = tiny_settings(n_layer=1, n_embd=8, n_ff=8, n_head=1, extra_head=True)
    state = {export.rename(k, 1): v for k, v in random_model(official).state_dict().items()}
    (folder / "tokenizer.json").write_text(tokenizer)
    export.Settings, export.load_file, export.save_file = lambda **changes: official, load_file, save_file
    stored, pickled = save(state), io.BytesIO()
    torch.save(state, pickled)

    def official_models(rng):
        """The paper's released models: .safetensors or a pickled state dict."""
        kind = rng.choice(("model.safetensors", "model.bin", "altered.bin", "evil.bin"))
        path, out = folder / ("bad-" + kind), folder / "official"
        shutil.rmtree(out, ignore_errors=True)
        if kind == "altered.bin":
            with contextlib.suppress(UnicodeEncodeError):
                torch.save(altered(state, rng), path)
        elif kind == "evil.bin":
            torch.save({**state, rng.choice(list(state)): Evil()} if rng.random() < 0.5 else Evil(), path)
        else:
            path.write_bytes(damaged(stored if kind == "model.safetensors" else pickled.getvalue(), rng))
        out.mkdir()
        try:
            export.from_official(str(path), out)
        except Exception as error:  # as the script itself does
            sys.exit(f"error: {type(error).__name__}")
        assert model.load_checkpoint(str(out))["model"].keys() == weights_of_official, "a tensor is missing"

    weights_of_official = random_model(official).state_dict().keys()
    return dict(prepared=prepared, corpora=corpora, checkpoints=checkpoints, tokenizers=tokenizer_files, tasks=tasks,
                archives=archives, settings=settings, official_models=official_models)


def fuzz(folder, names, inputs, seed, say=lambda *_, **__: None):
    """{reader: (results, clear errors)}; the first input that ends otherwise is an AssertionError with its number."""
    readers, counts = make_readers(folder), {}

    def too_long(*_):
        raise TimeoutError("no answer within 20 seconds")
    signal.signal(signal.SIGALRM, too_long)
    errors, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)  # tokenizers, written in Rust, tells of its panics there
    for name in names or readers:
        counts[name] = [0, 0]
        for i in range(inputs):
            output = io.StringIO()
            signal.alarm(20)
            os.dup2(nothing, 2)
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    readers[name](random.Random(f"{name} {seed} {i}"))
                counts[name][0] += 1
            except SystemExit as end:
                assert re.fullmatch("error: [^\n]+", str(end.code)), f"{name}, input {i}: {end.code!r}"
                counts[name][1] += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                what = f"{name}, seed {seed}, input {i}: {type(error).__name__}: {error}"
                assert isinstance(error, OSError) and not isinstance(error, TimeoutError), what[:2000]
                counts[name][1] += 1  # configurator.excepthook makes one line of it
            finally:
                signal.alarm(0)
                os.dup2(errors, 2)
            assert not (folder / "executed").exists(), f"{name}, input {i}: code in a file was executed"
            if i % 100 == 99:
                say(f"\r{name}: {i + 1:,} inputs, {counts[name][0]:,} read, {counts[name][1]:,} refused", end="")
        say()
    return counts


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        sys.exit(serve())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inputs", type=int, default=20000, help="for each reader")
    parser.add_argument("--readers", default="", help="only these, by name")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    def say(*text, **options):
        print(*text, **options, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        make_corpus(folder)
        for worlds, kills in (((1,), args.kills - args.kills // 3), ((2, 1, 4), args.kills // 3)):
            if kills:
                with Launcher() as launcher:
                    count = kill_runs(launcher, folder, kills, args.seed * 10 + len(worlds), worlds, say)
                say(f"\n{'one process' if worlds == (1,) else 'processes 2, 1, 4, 2, ... in turn'}: {count}")
        if args.inputs:
            fuzz(folder, args.readers.split(",") if args.readers else None, args.inputs, args.seed, say)
