"""
Run the project's scripts in processes of their own, with a fault at a chosen point.

A fault is the name of a function in the first section, and its arguments. Under torchrun, or by
hand, pass one to a script like this:

    python tests/faults.py '["bad_gradient", 3, "matrix", 1e30]' train.py --data_dir=...

A Launcher starts scripts as forks of a process that has already imported torch: this takes only a
fraction of a second.
"""

import atexit
import functools
import gc
import io
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# ---- faults: each is called inside the process, before its script starts -------------------------
def die_in_save(number, point):
    """Kill this process while it saves its `number`-th checkpoint.

    The point is a share of the bytes written or, once all are written, the first call of an `os`
    function that a checkpoint uses: "before fsync", "after replace", "after remove".
    """
    import torch

    save = torch.save
    checkpoints = itertools.count(1)

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def save_and_die(content, file):
        if next(checkpoints) < number:
            return save(content, file)
        whole = io.BytesIO()
        save(content, whole)
        if isinstance(point, float):
            file.write(whole.getvalue()[: int(point * whole.tell())])
            file.flush()
            kill()

        file.write(whole.getvalue())
        when, name = point.split()
        function = getattr(os, name)

        def call_and_die(*arguments):
            if when == "after":
                function(*arguments)
            kill()

        setattr(os, name, call_and_die)

    torch.save = save_and_die


def bad_gradient(step, where, value):
    """Put a value into a gradient of this rank at a step, in a "matrix" or in the "embedding"."""
    import device
    import muon

    def spoil_matrix(number, optimizer):
        if number == step:
            optimizer.stacks[0].grads[0, 1, 2] = value

    def spoil_embedding(number, params):
        if number == step:
            params[0].grad[1, 2] = value

    if where == "matrix":
        precede(muon.Muon, "reduce", spoil_matrix)
    else:
        precede(device, "all_reduce_gradients", spoil_embedding)


def wait_in_step(step, path):
    """Wait in the middle of a step until a file exists."""
    import muon

    def wait(number, optimizer):
        while number == step and not os.path.exists(path):
            time.sleep(0.01)

    precede(muon.Muon, "step", wait)


def full_disk(n_bytes):
    """Limit the size of every file, as if the disk were full."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))


def little_memory(n_bytes):
    """Limit the memory that this process can address."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


def set_variable(name, value):
    """Change the environment of one rank alone."""
    os.environ[name] = value


def report_lock():
    """Print a line before waiting for a lock."""
    import fcntl

    def tell(number, file, how):
        if how == fcntl.LOCK_EX:
            print("waiting for a lock", flush=True)

    precede(fcntl, "flock", tell)


def group_timeout(seconds):
    """Wait this long for another rank; by default the scripts wait for minutes."""
    import device
    import muon

    device.TIMEOUT = muon.TIMEOUT = timedelta(seconds=seconds)


def starve_gloo():
    """Run the process group's threads only when a core is idle, as can happen under load."""
    import torch.distributed as dist

    init = dist.init_process_group

    def init_process_group(*arguments, **options):
        before = set(os.listdir("/proc/self/task"))
        init(*arguments, **options)
        for thread in set(os.listdir("/proc/self/task")) - before:
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))

    dist.init_process_group = init_process_group


def report_threads():
    """Print, at the very end, how many threads of a process group are left."""

    def count():
        names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        n_threads = sum("gloo" in name for name in names)
        # In one write, on a line of its own: the ranks share the output, and print() may write
        # a line and its newline separately.
        os.write(1, f"\n{n_threads} threads of gloo at the end\n".encode())

    atexit.register(count)  # what is registered first is called last


def lose_rank(rank, step):
    """Kill one of torchrun's ranks at a step, but only once; report threads too."""
    import muon

    def kill(number, optimizer):
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    report_threads()
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_start and os.environ["RANK"] == str(rank):
        precede(muon.Muon, "step", kill)


def precede(owner, name, action):
    """Call action(number, *arguments) before each call of a function; the first has number 0."""
    function = getattr(owner, name)
    numbers = itertools.count()

    @functools.wraps(function)
    def preceded(*arguments):
        action(next(numbers), *arguments)
        return function(*arguments)

    setattr(owner, name, preceded)


# ---- processes -----------------------------------------------------------------------------------
def run_script(script, argv, fault=None):
    """Run a script of the project as the main program of this process."""
    if fault:
        name, *arguments = fault
        globals()[name](*arguments)
    sys.argv = [os.path.join(ROOT, script), *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")


def serve():
    """Answer each line of standard input, an order in JSON, with one line: see Launcher."""
    import torch._dynamo  # noqa: F401  slow to import, and train.py will need it

    import checkpoint  # noqa: F401
    import muon  # noqa: F401

    gc.freeze()  # so that garbage collection in a fork skips everything imported so far
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = wait_for(order["wait"], order["seconds"])
        else:
            answer = os.fork()
            if answer == 0:
                enter(order)
                return run_script(order["script"], order["argv"], order["fault"])
        print(json.dumps(answer), flush=True)


def enter(order):
    """Give a fork the folder, the output and the environment of a process of its own."""
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    with open(order["output"], "ab") as output, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def wait_for(pid, seconds):
    """Return the exit status of a child, or None if it is still running after this many seconds."""
    end = time.time() + seconds
    while time.time() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)


class Launcher:
    """Starts scripts as forks of one process; on exit, kills those that are still running."""

    def __enter__(self):
        self.server = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.running = set()
        return self

    def __exit__(self, *_):
        for pid in list(self.running):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        self.server.stdin.close()
        self.server.wait()

    def ask(self, **order):
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, script, argv, cwd, output, fault=None, **environment):
        """Start a script whose output is appended to a file; return its process id."""
        pid = self.ask(
            script=script,
            argv=[str(argument) for argument in argv],
            cwd=str(cwd),
            output=str(output),
            fault=fault,
            environment=environment,
        )
        self.running.add(pid)
        return pid

    def start_ranks(self, n, *job, faults=None, **environment):
        """Start n processes of one group as torchrun does; `faults` is {rank: fault}."""
        if n == 1:
            return [self.start(*job, fault=(faults or {}).get(0), **environment)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        group = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pids = []
        for rank in range(n):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            fault = (faults or {}).get(rank)
            pids.append(self.start(*job, fault=fault, **environment, **group, **place))
        return pids

    def wait(self, pid, seconds=600):
        """Return the exit status, or None if the process is still running after that time."""
        status = self.ask(wait=pid, seconds=seconds)
        if status is not None:
            self.running.remove(pid)
        return status


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        run_script(sys.argv[2], sys.argv[3:], json.loads(sys.argv[1]))
