"""
The long form of the fault tests. pytest runs short forms of its parts, in test_faults.py.

    python tests/soak.py                             # all parts: some hours on 2 cores
    python tests/soak.py kills --kills 500 --seed 2
    python tests/soak.py inputs --readers corpora,tasks
    python tests/soak.py exits --runs 300

kills:  end small runs at random moments, in every way there is; continue them; compare the result
        with an undisturbed run.
inputs: give each reader damaged and hostile files. It must read them correctly, or refuse them in
        one line.
exits:  finish train.py and eval.py on two ranks, again and again on a loaded machine. Each must
        end with status 0.
"""

import argparse
import collections
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

import conftest  # noqa: F401  from here on the project's modules can be found
from checkpoint import list_checkpoints
from conftest import ROOT, flags, prose, read_records, run
from faults import Launcher
from fuzz import READERS, fuzz

# ---- reading what a run has left -----------------------------------------------------------------
STEPS = 24
RUN = dict(
    data_dir="data/tiny",
    max_steps=STEPS,
    decay=1 / 3,
    eval_interval=6,
    save_interval=3,
    milestones="5,9",
    resume=True,
)
STAY = {5, 9, 16, 24}  # the steps whose checkpoints a finished run keeps


def prepare_corpus(folder):
    """Make data/tiny in a folder, from 400 made-up documents."""
    lines = [json.dumps({"text": text}) + "\n" for text in prose(400)]
    (folder / "text.jsonl").write_text("".join(lines))
    arguments = ["--input", "text.jsonl", "--out", "data/tiny", "--vocab_size", "300"]
    run("prepare.py", *arguments, cwd=folder)


def read_checkpoint(path):
    return torch.load(path, weights_only=True)


def read_losses(folder):
    """Return the log without what depends on the machine."""
    records = read_records(folder)
    for record in records:
        record.pop("tok_per_s", None)
    return records


def difference(one, other):
    """Return the largest relative L2 distance between two models' tensors; 0 if all bits agree."""
    assert one.keys() == other.keys()
    distances = [0.0]
    for name, tensor in one.items():
        if not torch.equal(tensor, other[name]):
            distances.append(float((tensor - other[name]).norm() / tensor.norm()))
    return max(distances)


# ---- kills ---------------------------------------------------------------------------------------
# How a process may end after each kind of kill, unless it has finished first.
ENDS = {
    "SIGKILL": {-signal.SIGKILL, 1},  # 1: a rank that has lost another one
    "SIGTERM": {128 + signal.SIGTERM, -signal.SIGTERM, 1},
    "in a checkpoint": {-signal.SIGKILL, 1},
    "one of several ranks": {-signal.SIGKILL, 1},
}
POINTS = ["before fsync", "before replace", "after replace", "before remove", "after remove"]


class Peace(NamedTuple):
    """A run that nobody disturbed."""

    weights: dict  # {step: weights of its checkpoint}
    losses: list
    seconds: float


def read_weights(out):
    """Return {step: weights} of the checkpoints that a run has left."""
    files = list_checkpoints(out)
    return {step: read_checkpoint(file)["model"] for step, file in files.items()}


def run_in_peace(launcher, folder):
    output = folder / "peace.txt"
    launcher.wait(launcher.start("train.py", ["-h"], folder, output))  # until all is imported
    start = time.time()
    pid = launcher.start("train.py", flags(**RUN, out_dir="out/peace"), folder, output)
    assert launcher.wait(pid) == 0, output.read_text()
    seconds = time.time() - start
    weights = read_weights(folder / "out/peace")
    assert weights.keys() == STAY
    return Peace(weights, read_losses(folder / "out/peace"), seconds)


class KillSeries:
    """Runs that are killed at random moments and continued, until they are finished.

    A run starts and continues with each number of processes in `worlds` in turn.
    """

    def __init__(self, launcher, folder, peace, seed, worlds=(1,)):
        self.launcher = launcher
        self.folder = folder
        self.peace = peace
        self.seed = seed
        self.worlds = worlds
        self.rng = random.Random(seed)
        self.runs = 0
        self.kills = collections.Counter()  # by their kind
        self.damaged = 0  # checkpoints that could not be read after a kill
        self.slowest_end = 0.0  # seconds from a kill until the last rank had ended
        self.difference = 0.0  # the largest, between weights and those of the undisturbed run

    def __str__(self):
        return (
            f"{self.kills.total()} kills {dict(self.kills)} of {self.runs} runs on "
            f"{', '.join(map(str, self.worlds))} processes in turn: {self.damaged} damaged "
            f"checkpoints, all ended within {self.slowest_end:.1f} s, "
            f"the weights of the checkpoints left differ by at most {self.difference:.1e}"
        )

    def kill(self, n_kills, say=None):
        """Kill runs n_kills times; compare each finished run with the undisturbed one."""
        while self.kills.total() < n_kills:
            out = self.folder / f"out/killed{self.seed}_{self.runs}"
            self.runs += 1
            for attempt, world in enumerate(itertools.cycle(self.worlds)):
                kind = None
                if attempt < 12 and self.kills.total() < n_kills:
                    kind = self.choose_kind(world)
                if self.finishes(out, world, kind):
                    break
            self.check_finished(out)
            shutil.rmtree(out)
            if say:
                say(f"\r{self.kills.total()} kills, {self.runs} runs ", end="")
        return self

    def choose_kind(self, world):
        kinds = list(ENDS)
        if world == 1:
            kinds.remove("one of several ranks")
        return self.rng.choice(kinds)

    def finishes(self, out, world, kind):
        """Begin or continue a run and kill it; return whether it finished first."""
        newest = self.find_newest(out)
        settings = RUN | dict(out_dir=out.relative_to(self.folder))
        output = out.with_suffix(".txt")
        output.parent.mkdir(exist_ok=True)
        # A rank that waits for one that never came would wait for minutes.
        faults = {rank: ["group_timeout", 60] for rank in range(world)}
        if kind == "in a checkpoint":
            point = self.rng.choice([self.rng.random(), *POINTS])
            faults[0] = ["die_in_save", self.rng.randint(1, 3), point]

        job = "train.py", flags(**settings), self.folder, output
        pids = self.launcher.start_ranks(world, *job, faults=faults)
        if kind in ("SIGKILL", "SIGTERM", "one of several ranks"):
            self.strike(pids, kind, newest)
        killed = time.time()
        statuses = [self.launcher.wait(pid) for pid in pids]  # the other ranks notice on their own
        if statuses == [0] * world:
            return True

        what = f"{kind}: {statuses}\n{output.read_text()[-3000:]}"
        assert None not in statuses, f"a process hangs after {what}"
        assert set(statuses) <= ENDS.get(kind, set()) | {0}, what
        assert "error: " not in output.read_text(), what
        self.kills[kind] += 1
        if kind != "in a checkpoint":
            self.slowest_end = max(self.slowest_end, time.time() - killed)
        found = self.find_newest(out)
        assert found >= newest, f"step {newest} was saved, now the newest is {found}"
        return False

    def strike(self, pids, kind, newest):
        """Wait for a random time, shorter if a part of the run is done; then kill."""
        share_left = 1 - newest / STEPS / 2
        time.sleep(self.rng.random() * self.peace.seconds * share_left * 0.8)
        if kind == "one of several ranks":
            pids = [self.rng.choice(pids)]
        for pid in pids:
            os.kill(pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)

    def find_newest(self, out):
        """Return the step of a run's newest checkpoint, or 0; try to read all of them."""
        steps = list_checkpoints(out)
        for step, file in steps.items():
            try:
                assert read_checkpoint(file)["step"] == step
            except Exception as error:
                print(f"\n{file} is damaged: {error}")
                self.damaged += 1
        return max(steps, default=0)

    def check_finished(self, out):
        """Compare a run that was killed with the undisturbed one."""
        losses = read_losses(out)
        weights = read_weights(out)
        assert losses[-1]["done"]
        assert not list(out.glob("*.tmp*")), "something is left of an unfinished checkpoint"
        assert weights.keys() >= STAY
        distance = max(difference(self.peace.weights[step], weights[step]) for step in STAY)
        self.difference = max(self.difference, distance)
        if self.worlds == (1,):
            assert distance == 0 and losses == self.peace.losses, f"{out} is not bit-identical"
        assert distance <= 1e-4, f"{out} differs by {distance}"


# ---- exits ---------------------------------------------------------------------------------------
def finish_runs(folder, script, runs, at_once, say=None):
    """Run a script on two ranks again and again; return the outputs of those that failed.

    They run under load: several jobs at once, and the process group's threads get only idle time.
    """
    tiny = dict(n_layer=1, n_embd=8, n_ff=8, batch_size=4, max_steps=2, eval_tokens=64)
    settings = tiny | dict(data_dir="data/tiny", eval_interval=0, save_interval=0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    faulty = [os.path.join(ROOT, "tests/faults.py"), json.dumps(["starve_gloo"])]

    def finish(number):
        out = f"out/{script}{number}"
        if script == "train.py":
            arguments = flags(**settings, out_dir=out)
        else:  # a folder of its own, so that it holds no earlier result
            shutil.copytree(folder / "out/finished", folder / out)
            arguments = ["--ckpt", out, "--tasks", "heldout", "--modes", "ar", "--limit", "4"]
        job = subprocess.run(
            [*torchrun, *faulty, script, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        shutil.rmtree(folder / out)
        return job.returncode, job.stdout

    if script == "eval.py":
        run("train.py", *flags(**settings, out_dir="out/finished"), cwd=folder)
    failures = []
    with ThreadPoolExecutor(at_once) as pool:
        for number, (status, output) in enumerate(pool.map(finish, range(runs)), start=1):
            if status != 0:
                failures.append(output)
            if say:
                say(f"\r{script}: {number} runs, {len(failures)} failed ", end="")
    return failures


# ---- the command ---------------------------------------------------------------------------------
def say(*text, **options):
    print(*text, **options, flush=True)


def soak_kills(folder, args):
    n_shared = args.kills // 3
    with Launcher() as launcher:
        peace = run_in_peace(launcher, folder)
        for worlds, n_kills in (((1,), args.kills - n_shared), ((2, 1, 4), n_shared)):
            series = KillSeries(launcher, folder, peace, args.seed, worlds)
            say(f"\r{series.kill(n_kills, say)}")
            assert series.damaged == 0


def soak_inputs(folder, args):
    fuzz(folder, args.readers.split(","), args.inputs, args.seed, say)


def soak_exits(folder, args):
    for script in ("train.py", "eval.py"):
        failures = finish_runs(folder, script, args.runs, args.at_once, say)
        aborts = sum("terminate called" in output for output in failures)
        say(f"\n{script}: {args.runs} runs, {len(failures)} failed, {aborts} of them by an abort")
        if failures:
            sys.exit(failures[-1])


def main():
    parts = {"kills": soak_kills, "inputs": soak_inputs, "exits": soak_exits}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("parts", nargs="*", metavar="PART", help="kills, inputs or exits (all of them)")
    flag("--kills", type=int, default=60, help="how many kills, a third on several ranks (60)")
    flag("--inputs", type=int, default=20000, help="how many for each reader (20000)")
    flag("--readers", default=",".join(READERS), help="only these (all)")
    flag("--runs", type=int, default=300, help="how many runs of each script to finish (300)")
    flag("--at_once", type=int, default=4, help="how many of these runs at a time (4)")
    flag("--seed", type=int, default=1, help="another seed gives other kills and damage (1)")
    args = parser.parse_args()
    chosen = args.parts or list(parts)
    for part in chosen:
        if part not in parts:
            parser.error(f"no part '{part}'; available: {', '.join(parts)}")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        prepare_corpus(folder)
        for part in chosen:
            parts[part](folder, args)


if __name__ == "__main__":
    main()
