"""
Errors that a user can fix, each in one line: what is wrong, and what to do. Also two small helpers
that several scripts share.

This file imports only the standard library, so that a missing package can be reported too.
"""

import difflib
import os
import signal
import sys
import time

OUT_OF_MEMORY = (
    "the GPU is out of memory: is another program using it? In training, choose a smaller "
    "micro_batch_size (estimated, not measured: the paper's model takes about 11, 17, 25, 40 GB "
    "with 1, 4, 8, 16; see NOTES.md)"
)


def die(message):
    """Print one line and exit with status 1, when the user or the machine is at fault."""
    let_the_first_rank_speak()
    sys.exit("error: " + " ".join(str(message).split()))


def report(kind, error, trace):
    """Report an exception in one line if the user or the machine caused it, not a bug.

    This is the excepthook of every script. A bug keeps its traceback.
    """
    let_the_first_rank_speak()
    if isinstance(error, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)
    if isinstance(error, ImportError) and error.name:
        package = error.name.partition(".")[0]
        names = {"sklearn": "scikit-learn", "backports": "backports.zstd"}
        sys.exit(f"error: {error}: pip install {names.get(package, package)}")
    if isinstance(error, BrokenPipeError):  # as in `sweep.py table | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for any further output
        sys.exit(1)
    if isinstance(error, OSError):
        sys.exit(f"error: {error}")
    if kind.__name__ == "OutOfMemoryError":  # torch's
        sys.exit(f"error: {OUT_OF_MEMORY}")
    if "out of resource" in str(error):  # Triton's: a kernel needs more than a core's own memory
        sys.exit("error: heads are too wide for this GPU: raise n_head, or use --compile=False")
    if kind.__name__ == "InductorError":  # torch's: for example, g++ is missing or does not work
        lines = str(error).splitlines()
        reason = next((line for line in lines if "error:" in line), lines[0])
        sys.exit(f"error: torch.compile failed: use --compile=False ({reason})")
    # torch's RuntimeErrors on a CPU, the second one for a size beyond 64 bits
    refusals = ["can't allocate memory", "size calculation overflowed"]
    if isinstance(error, MemoryError) or any(text in str(error) for text in refusals):
        sys.exit("error: there is not enough memory: choose a smaller model or smaller batches")
    sys.__excepthook__(kind, error, trace)


def let_the_first_rank_speak():
    """Wait, on all ranks of a host but the first, so that torchrun can end them before they speak.

    torchrun ends every process as soon as one fails. A mistake that all ranks share is then
    printed once; a problem that only this rank has is still printed, a few seconds later.
    """
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # train.py's handler only records it
        time.sleep(5)


def suggest(name, names):
    """Return the end of a sentence about an unknown name: the closest known one, or all of them."""
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f", did you mean '{close[0]}'?"
    return f"; available: {', '.join(names) or 'none'}"


def write_atomically(path, text):
    """Write a text file under a temporary name, then rename it: it is complete or absent."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
