"""Kills, lost ranks, bad numbers, bad files: nothing is lost, nothing hangs. See also soak.py."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import time

import pytest
import torch

import errors
from checkpoint import newest_checkpoint, save_checkpoint
from conftest import ROOT, flags, run
from faults import Launcher
from fuzz import READERS, fuzz
from soak import KillSeries, difference, read_checkpoint, read_losses, run_in_peace


@pytest.fixture(scope="module")
def launcher():
    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    shutil.copytree(corpus / "data", folder / "data")
    return folder


def errors_in(output):
    """Return the error lines in a file of output, which must have no traceback."""
    text = output.read_text()
    assert "Traceback" not in text, text
    return re.findall("^error: .*", text, re.MULTILINE)


def newest(folder):
    return read_checkpoint(newest_checkpoint(folder))


def wait_for_text(output, text, seconds=600):
    end = time.time() + seconds
    while not (output.exists() and text in output.read_text()):
        assert time.time() < end, f"no '{text}' in {output.read_text()}"
        time.sleep(0.01)


# ---- kills ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def peace(launcher, folder):
    return run_in_peace(launcher, folder)


def test_kills_change_no_bit(launcher, folder, peace):
    """At random moments and within checkpoints: the same weights and log as an undisturbed run."""
    series = KillSeries(launcher, folder, peace, seed=5).kill(3)
    assert series.kills.total() == 3
    assert series.difference == 0
    assert series.damaged == 0


def test_kills_on_changing_numbers_of_ranks_change_rounding_alone(launcher, folder, peace):
    """2, then 1, then 4 ranks, one of them or all killed each time."""
    series = KillSeries(launcher, folder, peace, seed=6, worlds=(2, 1, 4)).kill(3)
    assert series.kills.total() == 3
    assert series.difference <= 1e-4
    assert series.damaged == 0


CUT = dict(data_dir="data/tiny", eval_interval=0)
LEFT = {"ckpt_4.pt", "ckpt_6.pt", "log.jsonl", ".lock"}


@pytest.fixture(scope="module")
def uncut(launcher, folder):
    """A run of 6 steps that saves at steps 2, 4 (where its decay begins) and 6."""
    pid = launcher.start("train.py", flags(**CUT, out_dir="out/uncut"), folder, os.devnull)
    assert launcher.wait(pid) == 0
    assert {file.name for file in (folder / "out/uncut").iterdir()} == LEFT
    return folder / "out/uncut"


KILL_POINTS = {
    0.7: ["ckpt.tmp", "ckpt_2.pt"],
    "before replace": ["ckpt.tmp", "ckpt_2.pt"],
    "after replace": ["ckpt_2.pt", "ckpt_4.pt"],
    "after remove": ["ckpt_4.pt"],
}


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_kill_within_a_checkpoint_loses_nothing(launcher, folder, uncut, point):
    """What is left is intact, and the continued run leaves what an undisturbed one leaves."""
    out = folder / f"out/cut {point}"
    output = folder / "cut.txt"
    job = "train.py", flags(**CUT, out_dir=out, resume=True), folder, output
    pid = launcher.start(*job, ["die_in_save", 2, point])
    assert launcher.wait(pid) == -signal.SIGKILL
    assert sorted(file.name for file in out.glob("ckpt*")) == KILL_POINTS[point]
    for file in out.glob("ckpt_*.pt"):
        assert file.name == f"ckpt_{read_checkpoint(file)['step']}.pt"

    assert launcher.wait(launcher.start(*job)) == 0, output.read_text()
    assert {file.name for file in out.iterdir()} == LEFT
    for name in ("ckpt_4.pt", "ckpt_6.pt"):
        content = read_checkpoint(out / name)
        assert difference(content["model"], read_checkpoint(uncut / name)["model"]) == 0
    assert read_losses(out) == read_losses(uncut)


def test_only_older_checkpoints_are_removed_and_no_file_of_ones_own(tmp_path):
    """Checkpoints in `stay`, later ones, and files with names that train.py never gives stay."""
    stay = ["ckpt_2.pt", "ckpt_8.pt", "ckpt.pt", "log.jsonl"]
    own = ["ckpt_0004.pt", "ckpt_best.pt", "ckpt_4b.pt", "ckpt_\u0664.pt"]
    for name in [*stay, *own, "ckpt_4.pt", "ckpt_5.pt"]:
        (tmp_path / name).touch()
    save_checkpoint({"step": 6}, str(tmp_path), stay={2})
    assert {file.name for file in tmp_path.iterdir()} == {*stay, *own, "ckpt_6.pt"}


# ---- signals -------------------------------------------------------------------------------------
def interrupt_step_2(launcher, folder, name):
    """Start a run, and press Ctrl-C in its third step, which ends once the file `name` exists.

    Return the process, its output and the run's directory.
    """
    output = folder / f"{name}.txt"
    settings = dict(data_dir="data/tiny", out_dir=f"out/{name}", save_interval=0)
    fault = ["wait_in_step", 2, str(folder / name)]
    pid = launcher.start("train.py", flags(**settings), folder, output, fault)
    wait_for_text(output, "step 2 ")
    os.kill(pid, signal.SIGINT)
    wait_for_text(output, "finishing this step, then saving; press again to quit at once")
    return pid, output, folder / f"out/{name}"


def test_ctrl_c_finishes_the_step_and_saves(launcher, folder):
    """It is acknowledged within the step."""
    pid, output, out = interrupt_step_2(launcher, folder, "once")
    (folder / "once").touch()
    assert launcher.wait(pid) == 128 + signal.SIGINT
    assert "stopped at step 3, saved; to continue: " in output.read_text()
    assert newest(out)["step"] == 3


def test_a_second_ctrl_c_quits_at_once(launcher, folder):
    """In the middle of the step, which never ends here."""
    pid, output, out = interrupt_step_2(launcher, folder, "twice")
    os.kill(pid, signal.SIGINT)
    assert launcher.wait(pid) == 128 + signal.SIGINT
    assert newest_checkpoint(out) is None
    assert errors_in(output) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_first_step_quits_at_once(launcher, folder, number):
    """There is nothing new to save, and a compiler may have got the signal too."""
    name = f"first{int(number)}"
    output = folder / f"{name}.txt"
    settings = flags(data_dir="data/tiny", out_dir=f"out/{name}", save_interval=0)
    fault = ["wait_in_step", 0, str(folder / "never")]
    pid = launcher.start("train.py", settings, folder, output, fault)
    wait_for_text(output, "step 0 ")
    os.kill(pid, number)
    assert launcher.wait(pid) == 128 + number
    assert newest_checkpoint(folder / f"out/{name}") is None
    assert errors_in(output) == []


# ---- ranks ---------------------------------------------------------------------------------------
BAD_GRADIENTS = {
    "not a number": ("matrix", float("nan")),
    "its square is infinite": ("embedding", 1e30),
}


@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_a_bad_gradient_on_one_rank_stops_all_before_the_update(launcher, folder, name):
    """In one line, since torchrun ends the other rank; without the fault the run goes on."""
    where, value = BAD_GRADIENTS[name]
    output = folder / f"bad_{where}.txt"
    settings = dict(data_dir="data/tiny", out_dir=f"out/bad_{where}", save_interval=1)
    job = "train.py", flags(**settings), folder, output
    pids = launcher.start_ranks(2, *job, faults={1: ["bad_gradient", 3, where, value]})
    wait_for_text(output, "error: ")
    os.kill(pids[1], signal.SIGTERM)
    first, second = [launcher.wait(pid) for pid in pids]
    assert first == 1
    assert second in (-signal.SIGTERM, 1)  # on a busy machine it may already have printed
    (error,) = set(errors_in(output))
    assert "not finite at step 3, so nothing was updated" in error
    assert newest(folder / settings["out_dir"])["step"] == 3

    pid = launcher.start("train.py", flags(**settings, resume=True), folder, output)
    assert launcher.wait(pid) == 0


def test_a_problem_of_one_rank_alone_is_told_after_a_while(monkeypatch):
    """Every rank but the first waits before it prints, so that torchrun's SIGTERM can end it."""
    waits = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("signal.signal", lambda *handler: waits.append(handler))
    with pytest.raises(SystemExit, match="error: a problem"):
        errors.die("a problem")
    assert waits == [(signal.SIGTERM, signal.SIG_DFL), 5]


def processes_in(folder):
    """Return the processes that work in a folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd") == os.path.realpath(folder):
                found.append(pid)
    return found


LOST = dict(data_dir="data/tiny", max_steps=10, save_interval=5, eval_interval=0)


def lose_rank(folder, name, rank, *torchrun_flags, **changes):
    """Return the output of a job of ten steps under torchrun; a rank is killed in the seventh."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *torchrun_flags]
    command += [os.path.join(ROOT, "tests/faults.py"), json.dumps(["lose_rank", rank, 6])]
    command += ["train.py", *flags(**LOST, out_dir=f"out/{name}", **changes)]
    # As NOTES.md says for elastic jobs: the store outlives the first attempt.
    output = run(*command, cwd=folder, code=None, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    assert processes_in(folder) == [], "a rank is left behind"
    return output


def test_without_restarts_a_lost_rank_ends_the_job(folder):
    """The last checkpoint is intact and no process is left behind."""
    output = lose_rank(folder, "lost", 1, "--nproc_per_node=2")
    assert "ChildFailedError" in output and "done" not in output
    assert newest(folder / "out/lost")["step"] == 5


def test_a_restarted_job_continues_its_run_and_leaves_no_thread(folder):
    """Rank 0, which holds the lock, is killed. A thread of gloo could abort a finished process."""
    ranks = ["--nproc_per_node=2", "--max-restarts=2"]
    output = lose_rank(folder, "elastic", 0, *ranks, resume=True)
    assert "continuing out/elastic at step 5" in output and "done" in output, output
    steps = [record["step"] for record in read_losses(folder / "out/elastic")]
    assert steps == list(range(1, 11))
    assert output.count("\n0 threads of gloo at the end") == 2


def test_a_restarted_job_without_resume_is_refused_and_loses_nothing(folder):
    """On a restart too, a directory that holds a run is continued only with --resume."""
    output = lose_rank(folder, "unasked", 0, "--max-restarts=1")
    assert output.count("error: out/unasked already holds a run") == 1, output
    assert "continuing" not in output
    assert newest(folder / "out/unasked")["step"] == 5


def test_groups_within_and_across_hosts_leave_no_thread(launcher, folder):
    """Two ranks, each on a host of its own."""
    output = folder / "groups.txt"
    job = "train.py", flags(data_dir="data/tiny", out_dir="out/groups"), folder, output
    faults = {rank: ["report_threads"] for rank in (0, 1)}
    pids = launcher.start_ranks(2, *job, faults=faults, LOCAL_WORLD_SIZE="1")
    assert [launcher.wait(pid) for pid in pids] == [0, 0]
    assert output.read_text().count("\n0 threads of gloo at the end") == 2


def test_a_restarted_job_waits_for_the_lock(launcher, folder):
    """The previous process may hold it for a while. One restarted host is enough."""
    out = folder / "out/busy"
    out.mkdir(parents=True)
    output = folder / "busy.txt"
    job = "train.py", flags(data_dir="data/tiny", out_dir=out, max_steps=1), folder, output
    faults = {0: ["report_lock"], 1: ["set_variable", "TORCHELASTIC_RESTART_COUNT", "1"]}
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pids = launcher.start_ranks(2, *job, faults=faults)
        wait_for_text(output, "waiting for a lock")
    assert [launcher.wait(pid) for pid in pids] == [0, 0]


# ---- disks ---------------------------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root, mount")
def test_a_full_or_read_only_disk_is_one_line_and_harms_nothing(launcher, folder):
    """A file system of 1 MB, which holds two checkpoints, is then made read-only."""
    disk = folder / "disk"
    settings = dict(data_dir="data/tiny", out_dir="disk/run", save_interval=1, eval_interval=0)
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=1000k tmpfs {disk} 2>/dev/null") != 0:
        pytest.skip("no right to mount")
    try:
        output = folder / "full.txt"
        arguments = flags(**settings, milestones="1,2,3")
        pid = launcher.start("train.py", arguments, folder, output)
        assert launcher.wait(pid) == 1
        (error,) = errors_in(output)
        assert "could not write ckpt_3.pt in disk/run; no other checkpoint is affected" in error
        files = {file: file.read_bytes() for file in (disk / "run").glob("ckpt*")}
        assert {file.name for file in files} == {"ckpt_1.pt", "ckpt_2.pt"}
        assert [read_checkpoint(file)["step"] for file in sorted(files)] == [1, 2]

        os.system(f"mount -o remount,ro {disk}")
        output = folder / "read_only.txt"
        pid = launcher.start("train.py", flags(**settings, resume=True), folder, output)
        assert launcher.wait(pid) == 1
        (error,) = errors_in(output)
        assert "Read-only file system" in error
        assert files == {file: file.read_bytes() for file in (disk / "run").glob("ckpt*")}
    finally:
        os.system(f"umount -l {disk}")


# ---- the same again ------------------------------------------------------------------------------
def do_everything(launcher, folder, name):
    """Prepare, train, evaluate and sample; return all that was written or printed."""
    data, out, scores = f"data/{name}", f"out/{name}", f"{name}.json"
    arguments = ["--input", "text.jsonl", "--out", data, "--vocab_size", "300"]
    run("prepare.py", *arguments, cwd=folder, PYTHONHASHSEED=len(name))
    modes = ["--modes", "ar,prefix,pll,mc", "--mc", "8"]
    sampling = ["--ckpt", out, "--length", "12", "--seed", "3", "--prompt", "<mask:4>a"]
    jobs = [
        ["train.py", *flags(data_dir=data, out_dir=out, seed=7)],
        ["eval.py", "--ckpt", out, "--tasks", "heldout", *modes, "--limit", "5", "--json", scores],
        ["sample.py", *sampling, "--mode", "ar"],
        ["sample.py", *sampling, "--mode", "diffusion"],
    ]
    texts = []
    for script, *arguments in jobs:
        output = folder / f"{name}_{len(texts)}.txt"
        assert launcher.wait(launcher.start(script, arguments, folder, output)) == 0, output
        texts.append(output.read_text())
    files = {file.name: file.read_bytes() for file in (folder / data).iterdir()}
    results = json.loads((folder / scores).read_text())["tasks"]
    return files, read_losses(folder / out), results, texts[2:]


def test_the_same_seed_gives_the_same_bits(launcher, folder, corpus):
    """Files, losses, scores, texts and weights are the same in two runs of everything."""
    shutil.copy(corpus / "text.jsonl", folder / "text.jsonl")
    assert do_everything(launcher, folder, "one") == do_everything(launcher, folder, "again")
    one = newest(folder / "out/one")
    again = newest(folder / "out/again")
    assert difference(one["model"], again["model"]) == 0
    assert all(map(torch.equal, one["momentum"], again["momentum"]))


# ---- inputs --------------------------------------------------------------------------------------
@pytest.mark.parametrize("reader", READERS)
def test_damaged_and_hostile_inputs_are_read_correctly_or_refused(reader, folder):
    """In one line, without a hang, and nothing in them is executed."""
    results, refusals = fuzz(folder, [reader], 150, seed=0)[reader]
    assert results > 0 and refusals > 0
