"""
Two hosts on one machine: two network namespaces with addresses of their own, joined by a cable that can be cut. Needs
Linux, the right to make namespaces (root) and `ip` (package iproute2); says so and does nothing where these are missing.

    python tests/hosts.py

1. torchrun --nnodes=2 with a c10d rendezvous, gloo, two processes on each host: the losses of one process on one host.
2. The cable is cut in the middle of a run: all four processes end within the timeout of the process group (20 s here,
   ten minutes in train.py), and so does torchrun on the host of the rendezvous; the torchrun that is cut off waits for
   its rendezvous and is ended by hand, as a scheduler would. The checkpoint is sound, and both hosts resume from it to
   the same weights.
"""
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from conftest import ROOT, flags, read_log, run
from soak import difference, make_corpus, read

HOSTS = {"nanodual-a": "10.77.0.1", "nanodual-b": "10.77.0.2"}
# train.py with a group timeout that a test can wait for; its own is ten minutes
TRAIN = """
import datetime, os, runpy, sys
import torch.distributed as dist
init = dist.init_process_group
dist.init_process_group = lambda backend, timeout: init(backend, timeout=datetime.timedelta(seconds=20))
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ip(*arguments):
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


def take_down():
    for name in HOSTS:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def set_up():
    """The two hosts, each with its end of the cable, called eth0."""
    take_down()
    for name in HOSTS:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    a, b = HOSTS
    ip("-n", a, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b)
    for name, address in HOSTS.items():
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


def start(folder, port, *arguments):
    """The job on both hosts; returns their processes and files of output."""
    jobs, environment = [], {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    (folder / "train_20s.py").write_text(TRAIN)
    for name, address in HOSTS.items():
        output = folder / f"{name}.txt"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", f"--rdzv_id={port}",
                    "--rdzv_backend=c10d", f"--rdzv_endpoint={HOSTS['nanodual-a']}:{port}", f"--local_addr={address}",
                    f"--rdzv_conf=join_timeout=60,is_host={name == 'nanodual-a'}"]  # one machine, one host name: say who
        launcher += [str(folder / "train_20s.py"), os.path.join(ROOT, "train.py")]
        with open(output, "w") as f:
            jobs.append((subprocess.Popen(["ip", "netns", "exec", name, *launcher, *arguments], cwd=folder, env=environment,
                                          stdout=f, stderr=f, start_new_session=True), output))
    return jobs


def count_ranks():
    """How many processes of train.py there are on both hosts."""
    pids = [pid for name in HOSTS for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True).stdout.split()]
    count = 0
    for pid in map(int, pids):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as f:
            count += b"\0RANK=" in f.read()
    return count


def finish(jobs, seconds, hosts=2):
    """The exit statuses of these hosts; what is still there after so many seconds is a failure of this test."""
    try:
        return [job.wait(seconds) for job, _ in jobs[:hosts]]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"a host hangs: {[output.read_text()[-2000:] for _, output in jobs]}")
    finally:
        for job, _ in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def main(folder):
    make_corpus(folder)
    settings = dict(data_dir="data/tiny", max_steps=400, decay_steps=100, eval_interval=100, save_interval=20)
    run("train.py", *flags(**settings, out_dir="out/one"), cwd=folder)

    jobs = start(folder, 29511, *flags(**settings, out_dir="out/two"))
    statuses = finish(jobs, 240)
    assert statuses == [0, 0], jobs[0][1].read_text()[-3000:]
    one, two = (read_log(folder / f"out/{name}") for name in ("one", "two"))
    worst = max(abs(a[k] / b[k] - 1) for a, b in zip(one, two, strict=True) for k in a if k[:5] in ("train", "val_a", "val_m"))
    weights = read(folder / "out/one/ckpt.pt")["model"]
    distance = difference(weights, read(folder / "out/two/ckpt.pt")["model"])
    print(f"2 hosts x 2 processes against 1 process, {settings['max_steps']} steps: losses differ by {worst:.1e}, "
          f"weights by {distance:.1e}")
    assert "4 x cpu" in "".join(output.read_text() for _, output in jobs) and worst < 1e-4 and distance < 1e-3

    jobs, out = start(folder, 29512, *flags(**settings, out_dir="out/cut")), folder / "out/cut"
    end = time.time() + 120
    while not (out / "ckpt.pt").exists() and time.time() < end:
        time.sleep(0.05)
    ip("-n", "nanodual-b", "link", "set", "eth0", "down")
    begin = time.time()
    while n := count_ranks():
        assert time.time() < begin + 90, f"{n} processes hang"
        time.sleep(0.5)
    seconds, (status,) = time.time() - begin, finish(jobs, 60, 1)
    step = read(out / "ckpt.pt")["step"]
    print(f"cable cut: all processes ended after {seconds:.0f} s, torchrun with status {status}; checkpoint of step {step}")
    assert status and 0 < step < 400 and step % 20 == 0

    ip("-n", "nanodual-b", "link", "set", "eth0", "up")
    jobs = start(folder, 29513, *flags(**settings, out_dir="out/cut", resume=True))
    assert finish(jobs, 240) == [0, 0], jobs[0][1].read_text()[-3000:]
    found = int(re.search(r"resuming out/cut at step (\d+)", "".join(o.read_text() for _, o in jobs)).group(1))
    distance = difference(read(folder / "out/two/ckpt.pt")["model"], read(out / "ckpt.pt")["model"])
    print(f"resumed at step {found}; final weights differ by {distance:.1e} from the run that was not cut")
    assert found == step and distance < 1e-4


if __name__ == "__main__":
    try:
        if not shutil.which("ip"):
            raise OSError("no command `ip` (package iproute2)")
        set_up()
    except OSError as error:
        take_down()
        sys.exit(print(f"skipped: this machine does not let us make network namespaces ({error})"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            main(pathlib.Path(folder))
        print("two hosts: passed")
    finally:
        take_down()
