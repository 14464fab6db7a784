"""
Draw the accuracy on BLiMP over the words read, for AR alone, MD alone and the mix.

    python assets/walk.py        # writes assets/walk.png, prints the numbers

assets/walk.jsonl has what eval.py wrote about every milestone. NOTES.md has the commands that made
the runs.
"""

import json
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

ASSETS = Path(__file__).parent
RUNS = {  # the folder of a run: its name, its color
    "a1": ("AR alone", "#c0392b"),
    "a1_2": ("both, α = 1/2", "#8e44ad"),
    "a0": ("MD alone", "#2980b9"),
}
MODES = {"ar": "as a causal model (ar)", "pll1": "bidirectionally (pll1)"}
WORDS_PER_STEP = 8192 * 10_500_782 / 25_200_538  # tokens a step, words and tokens in meta.json


def read_scores(file):
    """Return {(run, mode): [(words read, accuracy in %, standard error)]}."""
    scores = defaultdict(list)
    for line in file.read_text().splitlines():
        report = json.loads(line)
        run = Path(report["flags"]["ckpt"]).parent.name
        for mode in MODES:
            result = report["tasks"]["blimp"][mode]
            words = report["step"] * WORDS_PER_STEP
            scores[run, mode].append((words, 100 * result["accuracy"], 100 * result["stderr"]))
    return {key: sorted(points) for key, points in scores.items()}


def main():
    scores = read_scores(ASSETS / "walk.jsonl")
    page = Figure((9, 3.6), layout="constrained")
    for ax, (mode, title) in zip(page.subplots(1, 2, sharey=True), MODES.items()):
        ax.axhline(50, color="0.7", lw=1)
        for run, (name, color) in RUNS.items():
            words, means, errors = zip(*scores[run, mode])
            print(f"{name}, {mode}:", ", ".join(f"{w:,.0f} {a:.1f}" for w, a in zip(words, means)))
            ax.errorbar(words, means, errors, fmt="o-", color=color, capsize=2, ms=4, label=name)
        ax.set_title(f"BLiMP {title}", fontsize=10)
        ax.set(xscale="log", xlabel="words read")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda words, _: f"{words / 1e6:g}M"))
        ax.spines[["top", "right"]].set_visible(False)
    page.axes[0].set_ylabel("accuracy, %")
    page.axes[0].legend(frameon=False)
    page.savefig(ASSETS / "walk.png", dpi=160)


if __name__ == "__main__":
    main()
