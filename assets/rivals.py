"""
Print what the mix is worth at R = 64 against MD alone, and against AR alone in all its forms.

    python assets/rivals.py        # reads assets/parity.jsonl and assets/rivals.jsonl

Differences are paired by seed, ± the standard error of their mean. NOTES.md has the commands that
made the runs.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

from ladder import compare

ASSETS = Path(__file__).parent
N_STEPS = 1280  # as in config/parity.py
COLUMNS = ["val_ar", "val_ar_best", "val_md", "acc_ar", "logp_ar", "acc_pll6", "logp_pll6"]
MIXES = ["alpha = 1/2, weight decay 0.1", "alpha = 1/2, weight decay 0.3"]


def name_of(run):
    """Return what distinguishes a run with the text of R = 64, None if it has another text."""
    named = dict(re.findall(r"--(\w+)=(\S+)", run["settings"]))
    name = f"alpha = {run['alpha']}, weight decay {named.get('weight_decay', '0.1')}"
    if int(named.get("max_steps", N_STEPS)) < N_STEPS:
        return f"{name}, stopped after {run['repetitions']:g}"
    return name if run["repetitions"] == 64 else None


def read_runs(folder):
    """Return {name: {seed: run}}."""
    runs = defaultdict(dict)
    for file in ("parity.jsonl", "rivals.jsonl"):
        for line in (folder / file).read_text().splitlines():
            run = json.loads(line)
            runs[name_of(run)][run["seed"]] = run
    del runs[None]
    return dict(sorted(runs.items()))


def main():
    runs = read_runs(ASSETS)
    for mix in MIXES:
        for rival in runs:
            if not rival.startswith(("alpha = 0,", "alpha = 1,")):
                continue
            print(f"\n{mix}, minus {rival}")
            for column in COLUMNS:
                mean, error, n_seeds = compare(runs[mix], runs[rival], column)
                if n_seeds > 0:
                    print(f"  {column:12} {mean:+7.3f} ± {error:.3f} ({n_seeds} seeds)")


if __name__ == "__main__":
    main()
