"""
How fast, against what: ratios of times measured in turn, in one run, so that anyone can check them on any machine.

    python bench.py --json bench.json                                        # some 40 minutes on 2 cores
    python bench.py --only cost --devices 8 --peak_flops 989e12 --mfu 0.4    # arithmetic, of the paper's model

Needs requirements-dev.txt; what is timed, ours and others', is in tests/peers.py. `evaluation` reads data/tasks.
"""

import json, os, pathlib, sys, time
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests"))
import peers
from configurator import Settings, check, die, flags, suggest
from model import HeadLoss


def seconds(**functions):
    """The median time of each, over rounds in which they take turns; a first round warms up."""
    times = []
    for function in [*functions.values()] * (1 + seconds.rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return SimpleNamespace(
        **dict(zip(functions, np.median(np.reshape(times, (-1, len(functions)))[1:], 0)))
    )


def cost(_):
    """Of training: FLOPs are 6 for each weight in a matrix product, and attention over the window or half of it."""
    s, n, D = check(Settings()), args.devices, Settings.n_embd
    matrices, tables, norms = (
        s.n_layer * (4 * D**2 + 3 * D * s.n_ff),
        2 * D * s.vocab_size,
        (2 * s.n_layer + 1) * D,
    )
    for what, size in (
        ("weights, as of gradients", matrices + tables + norms),
        ("Muon's momentum", matrices / n),
        ("AdamW's two moments", 2 * (tables + norms)),
        ("a chunk of logits", HeadLoss.CHUNK),
    ):
        yield f"{what}: GB on each of {n} devices", 4 * size / 1e9, ""
    for what, share in (("AR", 6), ("MD", 12)):
        flops = 6 * (matrices + tables / 2) + share * s.n_layer * D * s.seq_len
        yield f"{what}: GFLOPs a token", flops / 1e9, ""
        if args.peak_flops:
            yield (
                f"{what}: tokens/s of {n} devices, MFU {args.mfu:.0%}",
                n * args.mfu * args.peak_flops / flops,
                "",
            )


if __name__ == "__main__":
    parts, table = peers.PARTS | {"cost": cost}, []
    args = flags(
        __doc__, only=",".join(parts), rounds=7, json=os.devnull, devices=1, peak_flops=0.0, mfu=0.4
    )
    names, seconds.rounds = args.only.split(","), args.rounds
    bad = [name for name in names if name not in parts]
    if bad or min(args.devices, args.rounds) < 1:
        die(
            f"no part '{bad[0]}'{suggest(bad[0], [*parts])}"
            if bad
            else "--devices and --rounds are at least 1"
        )
    for name in names:
        for what, value, bound in parts[name](seconds):
            table.append(dict(part=name, what=what, value=float(value), bound=bound))
            print(f"{value:10.4g}  {bound:<9}{name}: {what}", flush=True)
            pathlib.Path(args.json).write_text(json.dumps(table, indent=1))
