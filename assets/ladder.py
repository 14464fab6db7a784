"""
Draw what the mix gains and costs at three model sizes, all at the paper's proportions.

    python assets/ladder.py        # writes assets/ladder.png, prints the numbers

The runs are in parity_14k.jsonl, parity.jsonl (56k parameters) and parity_226k.jsonl, all in
assets/. NOTES.md has the commands that made them.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

ASSETS = Path(__file__).parent
RESULTS = ["parity_14k.jsonl", "parity.jsonl", "parity_226k.jsonl"]
LINES = {(16, "15/16"): "#3f58cf", (128, "1/4"): "#8e44ad"}  # (R, alpha)
PANELS = [  # column, the alpha to compare with, title
    ("acc_pll6", "0", "PLL accuracy,\npoints above MD alone"),
    ("acc_ar", "1", "AR accuracy at the end,\npoints above AR alone"),
    ("val_ar_best", "1", "best AR loss,\nnats above AR alone"),
    ("val_md", "0", "MD loss (a bound),\nnats above MD alone"),
]


def count_parameters(width):
    """Return the number of weights in two blocks' matrices; the FFN is 11/4 times as wide."""
    return 2 * (4 * width**2 + 3 * width * (11 * width // 4))


def read_runs(folder):
    """Return {(R, width, alpha): {seed: run}}."""
    runs = defaultdict(dict)
    for name in RESULTS:
        for line in (folder / name).read_text().splitlines():
            run = json.loads(line)
            width = int(re.search(r"--n_embd=(\d+)", run["settings"])[1])
            runs[run["repetitions"], width, run["alpha"]][run["seed"]] = run
    return runs


def compare(runs, rivals, column):
    """Return how far runs are above their rivals in a column, its error, and the number of seeds.

    The first is the mean over the seeds for which both have this column, and the error is the
    standard error of that mean; each is nan if there are too few seeds.
    """
    seeds = [s for s in runs if s in rivals and column in runs[s] and column in rivals[s]]
    differences = np.array([runs[seed][column] - rivals[seed][column] for seed in seeds])
    mean = differences.mean() if len(seeds) > 0 else np.nan
    error = differences.std(ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else np.nan
    return mean, error, len(seeds)


def describe(mean, error, n_seeds):
    """Return what `compare` found as text; a single seed has no error."""
    return (
        f"{mean:+.3f} ± {error:.3f} ({n_seeds} seeds)" if n_seeds > 1 else f"{mean:+.3f} (1 seed)"
    )


def main():
    runs = read_runs(ASSETS)
    widths = sorted({width for _, width, _ in runs})
    for (R, width, alpha), by_seed in sorted(runs.items()):
        for column, rival, _ in PANELS:
            mean, error, n_seeds = compare(by_seed, runs.get((R, width, rival), {}), column)
            if n_seeds > 0 and alpha not in ("0", "1"):
                print(
                    f"{column}, R = {R:g}, {count_parameters(width):,} parameters: alpha = {alpha} "
                    f"minus {rival} {describe(mean, error, n_seeds)}"
                )

    sizes = [count_parameters(width) for width in widths]
    page = Figure((11, 3.2), layout="constrained")
    for ax, (column, rival, title) in zip(page.subplots(1, len(PANELS)), PANELS):
        ax.axhline(0, color="0.7", lw=1)
        for shift, ((R, alpha), color) in zip((0.96, 1.04), LINES.items()):
            points = []
            for width, size in zip(widths, sizes):
                pair = runs.get((R, width, alpha), {}), runs.get((R, width, rival), {})
                mean, error, _ = compare(*pair, column)
                points.append((size * shift, mean, error))  # side by side, not on top
            label = f"R = {R}, α = {alpha}"
            ax.errorbar(*zip(*points), fmt="o-", color=color, capsize=3, ms=4, label=label)
        ax.set(xscale="log", xlim=(sizes[0] * 0.7, sizes[-1] * 1.4), xlabel="parameters")
        ax.set_xticks(sizes, [f"{size / 1000:.0f}k" for size in sizes])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(title, fontsize=10)
    page.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    page.savefig(ASSETS / "ladder.png", dpi=160)


if __name__ == "__main__":
    main()
