"""
Print how the mix compares with MD alone, and with AR alone in all its forms.

    python assets/rivals.py        # reads the runs in assets/

There are two cases: R = 64 with 56k parameters, and R = 128 with 226k. Differences are paired by
seed, ± the standard error of their mean. NOTES.md has the commands that made the runs.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

from ladder import RESULTS, compare, describe

ASSETS = Path(__file__).parent
COLUMNS = ["val_ar", "val_ar_best", "val_md", "acc_ar", "logp_ar", "acc_pll6", "logp_pll6"]
CASES = [  # width, its steps, R, the alpha of the mix
    (48, 1280, 64, "1/2"),
    (96, 2560, 128, "1/4"),
]


def name_of(run, width, n_steps, R):
    """Return a name for a run of this size on the text of this R, or None for any other run."""
    named = dict(re.findall(r"--(\w+)=(\S+)", run["settings"]))
    if int(named["n_embd"]) != width:
        return None
    name = f"alpha = {run['alpha']}, weight decay {named.get('weight_decay', '0.1')}"
    if int(named["max_steps"]) < n_steps:
        return f"{name}, stopped after {run['repetitions']:g}"
    return name if run["repetitions"] == R else None


def read_runs(folder, width, n_steps, R):
    """Return {name: {seed: run}}."""
    runs = defaultdict(dict)
    for file in (*RESULTS, "rivals.jsonl"):
        for line in (folder / file).read_text().splitlines():
            run = json.loads(line)
            runs[name_of(run, width, n_steps, R)][run["seed"]] = run
    runs.pop(None, None)
    return dict(sorted(runs.items()))


def main():
    for width, n_steps, R, alpha in CASES:
        runs = read_runs(ASSETS, width, n_steps, R)
        mixes = [name for name in runs if name.startswith(f"alpha = {alpha},")]
        rivals = [name for name in runs if name.startswith(("alpha = 0,", "alpha = 1,"))]
        for mix in mixes:
            for rival in rivals:
                print(f"\nR = {R}, width {width}: {mix}, minus {rival}")
                for column in COLUMNS:
                    mean, error, n_seeds = compare(runs[mix], runs[rival], column)
                    if n_seeds > 0:
                        print(f"  {column:12} {describe(mean, error, n_seeds)}")


if __name__ == "__main__":
    main()
