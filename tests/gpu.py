"""
Check on a machine with GPUs what only GPUs can show. It takes about ten minutes, 20 GB of disk and
at least 12 GB on one GPU, and ends with a table: please paste it into an issue.

    python tests/gpu.py

1. Small runs of train.py: on the CPU, on the GPU in fp32 and in bf16, continued, on two ranks.
   (tests/interpret.py compares every gradient of the same kernels, without a GPU.)
2. The paper's model: tokens per second, MFU, peak memory, compiled graphs; on one GPU and on all.
3. eval.py and sample.py.

--fake is for a device that computes nothing, such as a simulated driver. It runs every line, but
judges no number.
"""

import argparse
import json
import math
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from checkpoint import load_checkpoint  # noqa: E402
from configurator import Settings, check  # noqa: E402

# Dense bf16 FLOP/s, by what a GPU's name contains.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 192e12,
    "Fake": 989e12,
}

# GB that the paper's model needs with a micro_batch_size, the largest first.
MEMORY = {8: 26, 4: 18, 1: 12}

# n_ff is not a multiple of 64, so that bf16 pads it with zeros.
SMALL = dict(
    n_layer=2,
    n_head=2,
    n_embd=128,
    n_ff=444,
    vocab_size=1024,
    seq_len=256,
    alpha="1/2",
    batch_size=16,
    micro_batch_size=4,
    max_steps=24,
    decay=1 / 3,
    eval_interval=12,
    eval_tokens=16384,
    save_interval=0,
    log_interval=1,
)

PAPER = dict(
    repetitions=0,  # as often as it takes
    eval_interval=0,
    eval_tokens=65536,
    save_interval=0,
    log_interval=1,
    decay=0.0,
)

# What hides the GPUs from a process; the last is for a simulated driver.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "FAKE_DEVICES": "0"}


# ---- the table -----------------------------------------------------------------------------------
class Line(NamedTuple):
    name: str
    found: str
    expected: str = ""
    verdict: str = ""


class Table:
    def __init__(self, fake):
        self.fake = fake
        self.lines = []

    def note(self, name, found):
        """Add a fact that is not judged."""
        self.add(Line(name, str(found)))

    def judge(self, name, found, expected, passed):
        verdict = "ok" if passed else "FAILED"
        self.add(Line(name, found, expected, "not judged" if self.fake else verdict))

    def judge_difference(self, name, difference, limit):
        self.judge(name, f"{difference:.1e}", f"<= {limit:.0e}", difference <= limit)

    def fail(self, name, reason):
        """Add something that could not be done at all: a failure on any device."""
        self.add(Line(name, reason, "", "FAILED"))

    def add(self, line):
        self.lines.append(line)
        print("  ".join(line), flush=True)

    def print(self):
        print("\n| what | found | expected | verdict |\n|---|---|---|---|")
        for line in self.lines:
            print(f"| {' | '.join(line)} |")


# ---- running scripts -----------------------------------------------------------------------------
def run(*command, n_ranks=1, **environment):
    """Run a script of the project; return its output. If it fails, raise its error."""
    python = [sys.executable]
    if n_ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"]
    result = subprocess.run(
        [*python, __file__, "--child", *command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        print(result.stdout)
        errors = [line for line in result.stdout.splitlines() if line.startswith("error:")]
        raise RuntimeError(f"{command[0]}: {errors[0] if errors else 'see its output above'}")
    return result.stdout


def be_child(script, *arguments):
    """Run a script in this process; at the end, print its GPU usage."""
    sys.argv = [str(ROOT / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    counters = torch._dynamo.utils.counters
    if int(os.environ.get("RANK", 0)) == 0 and torch.cuda.is_available():
        usage = {
            "allocated": torch.cuda.max_memory_allocated() / 1e9,
            "reserved": torch.cuda.max_memory_reserved() / 1e9,
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
        }
        print("usage:", json.dumps(usage))


def read_usage(output):
    return json.loads(output.rpartition("usage:")[2].splitlines()[0])


def train(folder, name, *config, n_ranks=1, **settings):
    """Run train.py; return the records of its log, and its GPU usage."""
    settings = {"data_dir": folder / "data", "out_dir": folder / name, **settings}
    flags = [f"--{key}={value}" for key, value in settings.items()]
    output = run("train.py", *config, *flags, n_ranks=n_ranks)
    usage = read_usage(output) if "usage:" in output else None
    return read_records(folder / name), usage


def read_records(out_dir):
    """Return what a run has logged, without the settings in its first line."""
    lines = (out_dir / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def largest_difference(records, others):
    """Return the largest relative difference between the losses in two logs."""
    differences = []
    for record, other in zip(records, others, strict=True):
        for name in ("train_ar", "train_md", "val_ar", "val_md"):
            if name in record and name in other:
                difference = abs(record[name] - other[name]) / max(abs(other[name]), 1e-9)
                differences.append(difference)
            elif name in record or name in other:
                differences.append(math.inf)
    return max(differences)


# ---- 1: small runs -------------------------------------------------------------------------------
def compare_small_runs(table, folder):
    cpu, _ = train(folder, "cpu", **SMALL, device="cpu", compile=False)
    gpu, _ = train(folder, "plain32", **SMALL, dtype="float32", compile=False)
    difference = largest_difference(gpu, cpu)
    table.judge_difference("small run, fp32, not compiled, against CPU", difference, 1e-3)
    gpu, _ = train(folder, "gpu32", **SMALL, dtype="float32")
    table.judge_difference("small run, fp32, against CPU", largest_difference(gpu, cpu), 1e-3)
    gpu, usage = train(folder, "gpu", **SMALL)
    table.judge_difference("small run, bf16, against CPU", largest_difference(gpu, cpu), 1e-2)
    # The four graphs: the block with and without gradients, the mask, the loss.
    found = f"{usage['graphs']} graphs, {usage['breaks']} breaks"
    passed = usage["graphs"] == 4 and usage["breaks"] == 0
    table.judge("small run, compiled", found, "4 graphs, 0 breaks", passed)

    first_part = folder / "continued"
    first_part.mkdir()
    shutil.copy(folder / "gpu/ckpt_16.pt", first_part)  # where the decay begins
    train(folder, "continued", **SMALL, resume=True)
    whole = last_weights(folder / "gpu")
    difference = ((last_weights(first_part) - whole).norm() / whole.norm()).item()
    table.judge_difference("continued run, its weights against the whole run's", difference, 1e-3)
    train(folder, "again", **SMALL)
    same = torch.equal(last_weights(folder / "again"), whole)
    table.note("the same run again gives the same bits", same)


def last_weights(out_dir):
    """Return the weights at the end of a run as one vector."""
    weights = load_checkpoint(out_dir)["model"]
    return torch.cat([p.flatten() for p in weights.values()])


def compare_ranks(table, folder):
    if torch.cuda.device_count() < 2:
        table.note("two ranks", "needs a second GPU")
        return
    two, _ = train(folder, "two", **SMALL, n_ranks=2)
    difference = largest_difference(two, read_records(folder / "gpu"))
    table.judge_difference("small run, two ranks against one", difference, 1e-2)


# ---- 2: the paper's model ------------------------------------------------------------------------
def flops_per_token(s):
    """Return 6 FLOPs for each weight in a matrix product, plus those of attention.

    In AR a token sees half a window on average, in MD a whole one.
    """
    weights = s.n_layer * (4 * s.n_embd**2 + 3 * s.n_embd * s.n_ff) + s.n_embd * s.vocab_size
    attention = 6 * s.n_layer * s.n_embd * s.seq_len
    alpha = float(Fraction(s.alpha))
    return 6 * weights + alpha * attention + (1 - alpha) * 2 * attention


def measure_all_gpus(table, folder):
    if torch.cuda.device_count() > 1:
        measure_paper(table, folder, torch.cuda.device_count())


def measure_paper(table, folder, n_gpus=1):
    """Time the paper's model: 8 slots a step on each GPU, leaving out the first steps."""
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    fitting = [size for size, needed in MEMORY.items() if needed <= memory]
    if not fitting:
        table.note("the paper's model", f"needs {min(MEMORY.values())} GB")
        return
    s = check(Settings(alpha="63/64"))
    size = fitting[0]
    name = f"paper{n_gpus}"
    config = str(ROOT / "config/rep16_a63_64.py")
    settings = dict(batch_size=8 * size * n_gpus, micro_batch_size=size, max_steps=12, **PAPER)
    start = time.time()
    records, usage = train(folder, name, config, n_ranks=n_gpus, **settings)
    seconds = time.time() - start

    label = f"the paper's model on {n_gpus} x GPU"
    speed = statistics.median(record["tok_per_s"] for record in records[3:])
    table.note(f"{label}: micro_batch_size", size)
    table.note(f"{label}: tokens/s", f"{speed:,.0f}")
    gpu = torch.cuda.get_device_name()
    peaks = [flops for known, flops in PEAK_FLOPS.items() if known in gpu]
    if peaks:
        utilization = speed * flops_per_token(s) / (n_gpus * peaks[0])
        table.note(f"{label}: MFU", f"{utilization:.1%} of {peaks[0] / 1e12:.0f} TFLOP/s")
    first = settings["batch_size"] * s.seq_len / records[0]["tok_per_s"]
    table.note(f"{label}: seconds for the first step, with compilation", f"{first:.0f}")
    table.note(f"{label}: seconds in all", f"{seconds:.0f}")
    found = f"{usage['allocated']:.1f}, {usage['reserved']:.1f} reserved"
    needed = MEMORY[size]
    table.judge(f"{label}: peak GB", found, f"< {needed}", usage["reserved"] < needed)
    found = f"{usage['graphs']} graphs, {usage['breaks']} breaks"
    passed = usage["graphs"] == 4 and usage["breaks"] == 0
    table.judge(f"{label}: compiled", found, "4 graphs, 0 breaks", passed)


# ---- 3: use --------------------------------------------------------------------------------------
def evaluate(folder, name, limit, **environment):
    """Run eval.py on held-out text; return the results and the time in seconds."""
    file = folder / f"{name}.json"
    ckpt = str(folder / name.partition("-")[0])
    arguments = ["--tasks", "heldout", "--limit", str(limit), "--json", str(file)]
    start = time.time()
    run("eval.py", "--ckpt", ckpt, *arguments, **environment)
    return json.loads(file.read_text())["tasks"]["heldout"], time.time() - start


def check_use(table, folder):
    on_gpu, _ = evaluate(folder, "gpu-eval", 100)
    on_cpu, _ = evaluate(folder, "gpu-eval-cpu", 100, **NO_GPU)
    for mode in ("ar", "prefix", "pll1", "pll6"):
        gpu, cpu = (results[mode]["nats_per_token"] for results in (on_gpu, on_cpu))
        difference = abs(gpu - cpu) / abs(cpu)
        table.judge_difference(f"eval.py, {mode}, GPU against CPU", difference, 1e-2)
    for mode in ("ar", "prefix", "diffusion", "infill"):
        prompt = "Return the<mask:3> of" if mode == "infill" else "Return the"
        arguments = ["--mode", mode, "--prompt", prompt, "--length", "32"]
        output = run("sample.py", "--ckpt", str(folder / "gpu"), *arguments)
        text = output.partition("usage:")[0].strip()
        table.judge(f"sample.py, {mode}", f"{len(text)} characters", "a text", len(text) > 0)


def time_paper_evaluation(table, folder):
    if not (folder / "paper1").exists():
        return
    _, seconds = evaluate(folder, "paper1-eval", 1000)
    table.note("eval.py, the paper's model: seconds for 1,000 passages", f"{seconds:.0f}")


# ---- the script ----------------------------------------------------------------------------------
def main():
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fake", action="store_true", help="run every line, judge no number")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU here")
    gpu = torch.cuda.get_device_properties(0)
    if args.fake != gpu.name.startswith("Fake"):
        sys.exit(f"error: --fake is for a device that computes nothing; this is {gpu.name}")

    start = time.time()
    table = Table(args.fake)
    n_gpus = torch.cuda.device_count()
    table.note("GPUs", f"{n_gpus} x {gpu.name}, {gpu.total_memory / 1e9:.0f} GB")
    table.note("torch, CUDA, Python", f"{torch.__version__}, {torch.version.cuda}, {sys.version}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("prepare.py", "--out", str(folder / "data"))
        for section in (
            compare_small_runs,
            compare_ranks,
            measure_paper,
            check_use,
            time_paper_evaluation,
            measure_all_gpus,
        ):
            try:
                section(table, folder)
            except (RuntimeError, OSError, LookupError, ValueError) as error:
                table.fail(section.__name__, " ".join(str(error).split()))
    table.note("seconds in all", f"{time.time() - start:.0f}")
    table.print()
    n_failed = sum(line.verdict == "FAILED" for line in table.lines)
    sys.exit(f"error: {n_failed} of these failed" if n_failed > 0 else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        be_child(*sys.argv[2:])
    else:
        main()
