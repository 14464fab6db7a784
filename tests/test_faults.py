"""Kills, lost ranks, bad numbers, bad files: nothing is lost, nothing hangs. The quick form of soak.py."""
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import soak
from conftest import ROOT, flags, run
from soak import Launcher, difference, kill_runs, log_of, read


@pytest.fixture(scope="module")
def launcher():
    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    shutil.copytree(corpus / "data", folder / "data")
    return folder


def test_kills_change_no_bit(launcher, folder):
    """At random moments and in the middle of checkpoints, one process: the weights and the log of a run in peace."""
    count = kill_runs(launcher, folder, 3, seed=5)
    assert count["kills"] >= 3 and count["difference"] == 0 and count["bytes lost"] == 0


def test_kills_with_other_numbers_of_processes_change_rounding_alone(launcher, folder):
    """2, then 1, then 4 processes, one of them or all killed each time."""
    count = kill_runs(launcher, folder, 3, seed=6, worlds=(2, 1, 4))
    assert count["kills"] >= 3 and count["difference"] <= 1e-4 and count["bytes lost"] == 0 and count["slowest end"] < 60


@pytest.mark.parametrize("point", [0.7, "link before", "link after", "replace before"])
def test_a_kill_at_every_point_of_a_checkpoint(launcher, folder, point):
    """The second checkpoint is cut off: what is there then is whole, and a restart ends as if nothing had been."""
    changes = dict(data_dir="data/tiny", out_dir=f"out/cut_{str(point).replace(' ', '_')}", keep=2, eval_interval=0)
    output = folder / "cut.txt"
    pid = launcher.start("train.py", flags(**changes), folder, output, hook=["die_in_save", 2, point])
    assert launcher.wait(pid) == -signal.SIGKILL
    out = folder / changes["out_dir"]
    assert {read(file)["step"] for file in out.glob("ckpt*.pt")} <= {2, 4} and (out / "ckpt.pt").exists()
    assert launcher.wait(launcher.start("train.py", flags(**changes, resume=True), folder, output)) == 0
    assert sorted(p.name for p in out.iterdir() if p.name != ".lock") == [
        "ckpt.pt", "ckpt_4.pt", "ckpt_6.pt", "ckpt_decay.pt", "log.jsonl"]
    peace = folder / "out/cut_peace"
    if not peace.exists():
        launcher.wait(launcher.start("train.py", flags(**changes | dict(out_dir="out/cut_peace")), folder, output))
    assert difference(read(peace / "ckpt.pt")["model"], read(out / "ckpt.pt")["model"]) == 0
    assert log_of(peace) == log_of(out)


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_bad_gradient_on_one_rank_stops_all_before_the_update(launcher, folder, value):
    """Not a number, or so large that its square is: the line names rank and step, the checkpoint before stays."""
    changes = dict(data_dir="data/tiny", out_dir=f"out/bad_{value}", save_interval=1)
    output = folder / f"bad_{value}.txt"
    pids = launcher.ranks(2, "train.py", flags(**changes), folder, output, hooks={1: ["bad_gradient", 3, value]})
    assert [launcher.wait(pid, 60) for pid in pids] == [1, 1]
    errors = re.findall("^error: .*", output.read_text(), re.M)
    assert len(errors) == 1 and "not finite at step 3 on rank 1;" in errors[0] and "Traceback" not in output.read_text()
    assert read(folder / changes["out_dir"] / "ckpt.pt")["step"] == 3
    # without the fault it goes on from there
    assert launcher.wait(launcher.start("train.py", flags(**changes, resume=True), folder, output)) == 0


def find(marker, rank):
    """The process of this rank among those with the marker on their command line."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as command, open(f"/proc/{pid}/environ", "rb") as environment:
                if {marker, f"RANK={rank}"} <= {*(command.read() + environment.read()).decode().split("\0")}:
                    return int(pid)
        except (OSError, UnicodeError):
            continue


def torchrun_and_kill(folder, out, restarts, rank, when, **changes):
    """Start two processes, kill one when a line is logged; returns status, output, and the seconds from kill to end."""
    marker, output = f"--out_dir={out}", folder / (out.replace("/", "_") + ".txt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               f"--max-restarts={restarts}", os.path.join(ROOT, "train.py"),
               *flags(data_dir="data/tiny", out_dir=out, eval_interval=0, **changes)]
    with open(output, "w") as f:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the README says
        job = subprocess.Popen(command, cwd=folder, stdout=f, stderr=f, env=env)
    try:
        end = time.time() + 120
        while when not in output.read_text() and time.time() < end:
            time.sleep(0.01)
        os.kill(find(marker, rank), signal.SIGKILL)
        start = time.time()
        return job.wait(120), output.read_text(), time.time() - start
    finally:
        job.kill()


def test_without_restarts_a_lost_rank_ends_the_job(folder):
    """Within seconds, with a failure, by torchrun; the checkpoint is sound and nobody holds the lock."""
    status, output, seconds = torchrun_and_kill(folder, "out/lost", 0, 1, "step 5 ", max_steps=300, save_interval=5)
    assert status == 1 and seconds < 60 and "done" not in output
    assert read(folder / "out/lost/ckpt.pt")["step"] % 5 == 0
    assert find("--out_dir=out/lost", 0) is None and find("--out_dir=out/lost", 1) is None


def test_elastic_restart_goes_on_by_itself(folder):
    """torchrun --max-restarts: rank 0, which holds the lock, is killed; the job goes on from the last checkpoint."""
    status, output, _ = torchrun_and_kill(folder, "out/elastic", 2, 0, "step 7 ", max_steps=200, save_interval=5)
    assert status == 0 and "done" in output, output
    step = int(re.search(r"resuming out/elastic at step (\d+)", output).group(1))
    assert step >= 5 and step % 5 == 0
    assert [r["step"] for r in log_of(folder / "out/elastic") if r["step"]] == list(range(1, 201))


def test_after_a_restart_the_lock_is_waited_for(launcher, folder):
    """The process that went before may still be there for a while: a restart does not give up at once, a start does."""
    out = folder / "out/busy"
    out.mkdir(parents=True)
    changes, output = dict(data_dir="data/tiny", out_dir="out/busy", max_steps=1, decay_steps=0), folder / "busy.txt"
    arguments = "train.py", flags(**changes), folder, output
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launcher.wait(launcher.start(*arguments)) == 1
        assert "another process is training in out/busy" in output.read_text()
        pid = launcher.start(*arguments, TORCHELASTIC_RESTART_COUNT="1")
        assert launcher.wait(pid, 3) is None
    assert launcher.wait(pid) == 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs the right to mount")
def test_a_disk_that_is_full_or_read_only(launcher, folder):
    """A file system of 800 kB, then one that is read-only: one line each, and the checkpoint before is intact."""
    disk, output = folder / "disk", folder / "disk.txt"
    changes = dict(data_dir="data/tiny", out_dir="disk/run", save_interval=1, eval_interval=0, keep=9)
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=800k tmpfs {disk} 2>/dev/null"):
        pytest.skip("no right to mount")
    try:
        assert launcher.wait(launcher.start("train.py", flags(**changes), folder, output)) == 1
        errors = re.findall("^error: .*", output.read_text(), re.M)
        assert len(errors) == 1 and "could not write disk/run/ckpt" in errors[0]
        assert "Traceback" not in output.read_text()
        files = {file: file.read_bytes() for file in (disk / "run").glob("ckpt*.pt")}
        assert files and not list((disk / "run").glob("*.tmp")) and all(read(file)["step"] > 0 for file in files)
        os.system(f"mount -o remount,ro {disk}")
        output.unlink()
        assert launcher.wait(launcher.start("train.py", flags(**changes, resume=True), folder, output)) == 1
        errors = re.findall("^error: .*", output.read_text(), re.M)
        assert len(errors) == 1 and "Read-only file system" in errors[0] and "Traceback" not in output.read_text()
        assert files == {file: file.read_bytes() for file in (disk / "run").glob("ckpt*.pt")}
    finally:
        os.system(f"umount -l {disk}")


def test_the_same_bits_in_two_processes(launcher, folder, corpus):
    """prepare, train, eval and sample, each twice with the same seed: equal files, equal numbers, equal texts."""
    shutil.copy(corpus / "text.jsonl", folder / "text.jsonl")
    found = []
    for i in "12":
        data, out, scores, dump = folder / f"data/again{i}", folder / f"out/again{i}", f"again{i}.json", f"again{i}.jsonl"

        def start(command, *more):
            script, *arguments = command.split()
            output = folder / f"again{i}_{script}.txt"
            assert launcher.wait(launcher.start(script, [*arguments, *more], folder, output)) == 0, output.read_text()
            return output.read_text()
        run("prepare.py", "--input", "text.jsonl", "--out", data, "--vocab_size", "300", cwd=folder, PYTHONHASHSEED=i)
        start("train.py", *flags(data_dir=data, out_dir=out, seed=7))
        start(f"eval.py --ckpt {out} --tasks heldout --modes ar,prefix,pll,mc --mc 8 --limit 5 --json {scores} --dump {dump}")
        texts = [start(f"sample.py --ckpt {out} --mode {mode} --length 12 --seed 3 --prompt <mask:4>a")
                 for mode in ("ar", "diffusion")]
        results = json.loads((folder / scores).read_text())
        found.append(({file.name: file.read_bytes() for file in data.iterdir()}, log_of(out), results["tasks"],
                      (folder / dump).read_text(), texts))
    for a, b in zip(*found):
        assert a == b
    a, b = (read(folder / f"out/again{i}/ckpt.pt") for i in "12")
    assert difference(a["model"], b["model"]) == 0
    assert all(map(torch.equal, a["momentum"], b["momentum"]))


@pytest.mark.parametrize("reader", ["prepared", "corpora", "checkpoints", "tokenizers", "tasks", "archives",
                                    "settings", "official_models"])
def test_damaged_and_hostile_inputs(reader, folder):
    """150 of each: read rightly or refused in one line; no other exception, no hang, nothing executed."""
    results, refused = soak.fuzz(folder, [reader], 150, seed=0)[reader]
    assert results + refused == 150 and refused > 0
