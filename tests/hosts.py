"""
Train on two hosts simulated on one machine: network namespaces, joined by a cable that can be cut.

    python tests/hosts.py

1. Two ranks on each host, started by torchrun with a c10d rendezvous, reach the losses and weights
   of one process on one host.
2. The cable is cut in the middle of a run: all four ranks end within the timeout of the process
   group (20 s here, ten minutes in train.py), and so does torchrun on the host of the rendezvous.
   The torchrun that is cut off waits for the rendezvous, and is killed by hand, as a scheduler
   would do. The checkpoint is intact.
3. Both hosts are started again with the same command: they continue, to the same weights.

This needs Linux, the right to make namespaces (root) and `ip` (package iproute2). If any of these
is missing, it says so and does nothing.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import conftest  # noqa: F401  from here on the project's modules can be found
from checkpoint import newest_checkpoint
from conftest import ROOT, flags, read_records, run
from soak import difference, prepare_corpus, read_checkpoint

HOSTS = {"nanodual-a": "10.77.0.1", "nanodual-b": "10.77.0.2"}
RENDEZVOUS = "nanodual-a"
SETTINGS = dict(
    data_dir="data/tiny",
    max_steps=400,
    decay=0.25,
    eval_interval=100,
    save_interval=20,
    resume=True,
)


# ---- hosts ---------------------------------------------------------------------------------------
def ip(*arguments):
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if result.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def set_up():
    """Make the two hosts, each with its end of the cable, called eth0."""
    take_down()
    for name in HOSTS:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    one, other = HOSTS
    ip("-n", one, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
    for name, address in HOSTS.items():
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


def take_down():
    for name in HOSTS:
        with contextlib.suppress(OSError):
            ip("netns", "del", name)


# ---- jobs ----------------------------------------------------------------------------------------
class Job(NamedTuple):
    """torchrun on one of the hosts."""

    process: subprocess.Popen
    output: Path


def start(folder, port, **settings):
    """Start train.py on both hosts."""
    jobs = []
    for name, address in HOSTS.items():
        launcher = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        launcher += ["--nnodes=2", "--nproc_per_node=2", f"--local_addr={address}"]
        launcher += ["--rdzv_backend=c10d", f"--rdzv_endpoint={HOSTS[RENDEZVOUS]}:{port}"]
        # The two share a machine name, so each must be told whether it hosts the rendezvous.
        is_host = name == RENDEZVOUS
        launcher += [f"--rdzv_id={port}", f"--rdzv_conf=join_timeout=60,is_host={is_host}"]
        fault = json.dumps(["group_timeout", 20])
        script = [os.path.join(ROOT, "tests/faults.py"), fault, "train.py"]
        output = folder / f"{name}.txt"
        with open(output, "w") as file:
            process = subprocess.Popen(
                [*launcher, *script, *flags(**SETTINGS | settings)],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        jobs.append(Job(process, output))
    return jobs


def finish(jobs, seconds, all_jobs):
    """Return the exit statuses of jobs that end in time; kill all that are still running."""
    try:
        return [job.process.wait(seconds) for job in jobs]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"a host hangs:\n{read_output(all_jobs)}") from None
    finally:
        for job in all_jobs:
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()


def read_output(jobs):
    return "\n".join(job.output.read_text() for job in jobs)


def count_ranks():
    """Return how many processes of train.py run on the two hosts together."""
    n_ranks = 0
    for name in HOSTS:
        for pid in ip("netns", "pids", name).split():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if b"\0RANK=" in file.read():
                    n_ranks += 1
    return n_ranks


# ---- the three parts -----------------------------------------------------------------------------
def newest(out):
    return read_checkpoint(newest_checkpoint(out))


def compare_with_one_host(folder):
    run("train.py", *flags(**SETTINGS, out_dir="out/one"), cwd=folder)
    jobs = start(folder, 29511, out_dir="out/two")
    assert finish(jobs, 900, jobs) == [0, 0], read_output(jobs)
    assert "4 x cpu" in read_output(jobs)

    worst = 0.0
    records = [read_records(folder / name) for name in ("out/one", "out/two")]
    for one, two in zip(*records, strict=True):
        for name in ("train_ar", "train_md", "val_ar", "val_md"):
            if name in one:
                worst = max(worst, abs(one[name] / two[name] - 1))
    distance = difference(newest(folder / "out/one")["model"], newest(folder / "out/two")["model"])
    print(
        f"2 hosts x 2 ranks against 1 process, {SETTINGS['max_steps']} steps: "
        f"losses differ by {worst:.1e}, weights by {distance:.1e}"
    )
    assert worst < 1e-4 and distance < 1e-3


def cut_the_cable(folder):
    """Cut the cable after the first checkpoint; return the step of the last checkpoint."""
    out = folder / "out/cut"
    jobs = start(folder, 29512, out_dir="out/cut")
    end = time.time() + 600
    while not newest_checkpoint(out) and time.time() < end:
        time.sleep(0.05)
    ip("-n", "nanodual-b", "link", "set", "eth0", "down")
    cut = time.time()
    while count_ranks() > 0:
        assert time.time() < cut + 600, f"{count_ranks()} ranks hang"
        time.sleep(0.5)
    seconds = time.time() - cut
    (status,) = finish(jobs[:1], 600, jobs)
    step = newest(out)["step"]
    print(
        f"cable cut: all ranks had ended after {seconds:.0f} s, torchrun with status {status}; "
        f"the last checkpoint is that of step {step}"
    )
    assert status != 0
    assert 0 < step < SETTINGS["max_steps"] and step % SETTINGS["save_interval"] == 0
    return step


def continue_after_the_cut(folder, step):
    ip("-n", "nanodual-b", "link", "set", "eth0", "up")
    jobs = start(folder, 29513, out_dir="out/cut")
    assert finish(jobs, 900, jobs) == [0, 0], read_output(jobs)
    assert f"continuing out/cut at step {step}" in read_output(jobs)
    distance = difference(newest(folder / "out/two")["model"], newest(folder / "out/cut")["model"])
    print(
        f"continued at step {step}: "
        f"final weights differ by {distance:.1e} from those of the run that was not cut"
    )
    assert distance < 1e-4


def main():
    try:
        if not shutil.which("ip"):
            raise OSError("the command `ip` (package iproute2) is missing")
        set_up()
    except OSError as error:
        print(f"skipped: this machine does not let us make network namespaces ({error})")
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            prepare_corpus(folder)
            compare_with_one_host(folder)
            step = cut_the_cable(folder)
            continue_after_the_cut(folder, step)
        print("two hosts: passed")
    finally:
        take_down()


if __name__ == "__main__":
    main()
