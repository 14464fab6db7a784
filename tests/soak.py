"""
The long form of the fault tests; pytest does not collect it, test_faults.py runs a quick form of its parts.

    python tests/soak.py                              # 50 kills, 20,000 inputs for each reader
    python tests/soak.py --kills 500 --inputs 0 --seed 2

Kills: small runs are ended at random moments in every way there is, restarted, and compared with runs that nobody disturbed.
Inputs: each reader gets damaged or hostile files. A result, or SystemExit with one line, is fine; anything else is a bug.
"""
import argparse
import contextlib
import io
import json
import math
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
import tempfile
import time

import numpy as np
import torch

from conftest import ROOT, TINY, flags, prose, random_model, run, tiny_settings

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


def kill_runs(launcher, folder, kills, seed, worlds=(1,), say=lambda *_: None):
    """Runs that are killed at random moments, until there were so many kills. Returns counts and the largest difference of
    final weights from those of a run in peace; every checkpoint found after a kill must be whole, and none older."""
    rng, count = random.Random(seed), dict(kills=0, restarts=0, runs=0, lost=0, slowest=0.0, difference=0.0, **dict.fromkeys(
        ("SIGKILL", "SIGTERM", "in a checkpoint", "one of several ranks"), 0))
    peace, start = folder / "out/peace", time.time()
    if not peace.exists():
        status = launcher.wait(launcher.start("train.py", flags(**RUN, out_dir="out/peace"), folder, folder / "peace.txt"))
        assert status == 0, (folder / "peace.txt").read_text()
    duration, whole = max(1.0, time.time() - start), read(peace / "ckpt.pt")["model"]
    while count["kills"] < kills:
        out, output, best, done = f"out/killed{seed}_{count['runs']}", folder / f"killed{seed}_{count['runs']}.txt", 0, False
        used, count["runs"] = [], count["runs"] + 1
        while not done:
            n = worlds[len(used) % len(worlds)]
            used.append(n)
            kind = rng.choice(("SIGKILL", "SIGTERM", "in a checkpoint") + ("one of several ranks",) * (n > 1))
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
                time.sleep(rng.random() * duration * 0.8)
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
                count["kills"] += 1
                count[kind] += 1
                count["restarts"] += 1
                count["slowest"] = max(count["slowest"], time.time() - begin if killed else 0)
                files = list((folder / out).glob("ckpt*.pt"))
                steps = []
                for file in files:
                    try:
                        steps.append(read(file)["step"])
                    except Exception as error:
                        count["lost"] += os.path.getsize(file)
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


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        sys.exit(serve())
    import logging
    with tempfile.TemporaryDirectory() as f, Launcher() as l:
        f = pathlib.Path(f)
        make_corpus(f)
        t=time.time()
        print(kill_runs(l, f, 12, 1, say=print)); print(time.time()-t)
        print(kill_runs(l, f, 8, 2, (2,1,4), say=print)); print(time.time()-t)
