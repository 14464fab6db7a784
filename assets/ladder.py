"""
Draw what the mix gains and costs at three sizes of the model, all at the paper's proportions.

    python assets/ladder.py        # writes assets/ladder.png, prints the numbers

The middle size is that of assets/parity.jsonl, the others are in assets/ladder.jsonl. NOTES.md has
the commands that made the runs.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

ASSETS = Path(__file__).parent
REPETITIONS = (16, 64)
COLORS = {"1/2": "#8e44ad", "15/16": "#3f58cf"}
PANELS = [  # column, the alpha to compare with, title
    ("acc_pll6", "0", "PLL accuracy,\npoints above MD alone"),
    ("acc_ar", "1", "AR accuracy,\npoints above AR alone"),
    ("val_ar_best", "1", "best AR loss,\nnats above AR alone"),
    ("val_md", "0", "MD loss (a bound),\nnats above MD alone"),
]


def count_parameters(width):
    """Return the size of all matrices of two blocks, whose FFN is 11/4 as wide."""
    return 2 * (4 * width**2 + 3 * width * (11 * width // 4))


def read_runs(folder):
    """Return {(R, width, alpha): {seed: run}}."""
    runs = defaultdict(dict)
    for name in ("parity.jsonl", "ladder.jsonl"):
        for line in (folder / name).read_text().splitlines():
            run = json.loads(line)
            named = re.search(r"--n_embd=(\d+)", run["settings"])
            width = int(named[1]) if named else 48  # as in config/parity.py
            runs[run["repetitions"], width, run["alpha"]][run["seed"]] = run
    return runs


def compare(runs, rivals, column):
    """Return how far runs are above their rivals in a column, its error, and the number of seeds.

    It is the mean over the seeds for which both have this column, and the standard error of that
    mean; nan where there are too few seeds.
    """
    seeds = [s for s in runs if s in rivals and column in runs[s] and column in rivals[s]]
    differences = np.array([runs[seed][column] - rivals[seed][column] for seed in seeds])
    mean = differences.mean() if len(seeds) > 0 else np.nan
    error = differences.std(ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else np.nan
    return mean, error, len(seeds)


def main():
    runs = read_runs(ASSETS)
    widths = sorted({width for _, width, _ in runs})
    sizes = [count_parameters(width) for width in widths]

    page = Figure((11, 5.6), layout="constrained")
    for R, row in zip(REPETITIONS, page.subplots(len(REPETITIONS), len(PANELS))):
        row[0].set_ylabel(f"R = {R}", fontsize=12)
        for ax, (column, rival, title) in zip(row, PANELS):
            ax.axhline(0, color="0.7", lw=1)
            for alpha, color in COLORS.items():
                means, errors = [], []
                for width, size in zip(widths, sizes):
                    pair = runs[R, width, alpha], runs[R, width, rival]
                    mean, error, n_seeds = compare(*pair, column)
                    if n_seeds > 0:
                        print(
                            f"{column}, R = {R}, {size:,} parameters: alpha = {alpha} minus "
                            f"{rival} {mean:+.3f} ± {error:.3f} ({n_seeds} seeds)"
                        )
                    means.append(mean)
                    errors.append(error)
                ax.errorbar(sizes, means, errors, fmt="o-", color=color, capsize=2, ms=4)
                measured = [point for point in zip(sizes, means) if not np.isnan(point[1])]
                ax.annotate(f"  α = {alpha}", measured[-1], color=color, va="center")
            ax.set(xscale="log", xlim=(sizes[0] * 0.7, sizes[-1] * 4))
            ax.set_xticks(sizes, [f"{size / 1000:.0f}k" for size in sizes])
            ax.minorticks_off()
            ax.spines[["top", "right"]].set_visible(False)
            if R == REPETITIONS[0]:
                ax.set_title(title, fontsize=10)
    page.supxlabel("parameters without embeddings", fontsize=10)
    page.savefig(ASSETS / "ladder.png", dpi=160)


if __name__ == "__main__":
    main()
