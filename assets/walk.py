"""
Draw BLiMP accuracy and held-out losses over the words read, for AR alone, MD alone and the mix.

    python assets/walk.py        # writes assets/walk.png, prints the accuracies

assets/walk.jsonl has what eval.py wrote about every milestone; assets/walk_losses.jsonl has the
losses of the runs. NOTES.md has the commands that made them.
"""

import json
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

ASSETS = Path(__file__).parent
RUNS = {  # alpha: the name of the run, its color
    "1": ("AR alone", "#1f5fd6"),
    "1/2": ("both, α = 1/2", "#8e44ad"),
    "0": ("MD alone", "#d62728"),
}
MODES = {"ar": "BLiMP as a causal model (ar), %", "pll1": "BLiMP bidirectionally (pll1), %"}
LOSSES = {1: "AR loss, nats per token", 2: "MD loss, nats per token"}  # by column of a curve
TOKENS_PER_STEP = 8192
WORDS_PER_TOKEN = 10_500_782 / 25_200_538  # from meta.json


def read_lines(name):
    return [json.loads(line) for line in (ASSETS / name).read_text().splitlines()]


def read_scores():
    """Return {(alpha, mode): [(words read, accuracy in %, standard error)]}."""
    scores = defaultdict(list)
    for report in read_lines("walk.jsonl"):
        alpha = Path(report["flags"]["ckpt"]).parent.name[1:].replace("_", "/")  # from a1_2
        words = report["step"] * TOKENS_PER_STEP * WORDS_PER_TOKEN
        for mode in MODES:
            result = report["tasks"]["blimp"][mode]
            scores[alpha, mode].append((words, 100 * result["accuracy"], 100 * result["stderr"]))
    return {key: sorted(points) for key, points in scores.items()}


def main():
    scores = read_scores()
    curves = {run["alpha"]: run["curve"] for run in read_lines("walk_losses.jsonl")}
    page = Figure((9, 6), layout="constrained")
    panels = page.subplots(2, 2, sharex=True)
    for ax, (mode, title) in zip(panels[0], MODES.items()):
        ax.set_title(title, fontsize=10)
        ax.set_ylim(48, 57)
        ax.axhline(50, color="0.7", lw=1)
        for alpha, (name, color) in RUNS.items():
            words, means, errors = zip(*scores[alpha, mode])
            print(f"{name}, {mode}:", ", ".join(f"{w:,.0f} {a:.1f}" for w, a in zip(words, means)))
            millions = [count / 1e6 for count in words]
            ax.errorbar(millions, means, errors, fmt="o-", color=color, capsize=2, ms=4, label=name)
    for ax, (column, title) in zip(panels[1], LOSSES.items()):
        ax.set_title(title, fontsize=10)
        ax.set_ylim(4, 7.5)
        ax.set_xlabel("million words read")
        for alpha, (_, color) in RUNS.items():
            millions = [point[0] * WORDS_PER_TOKEN / 1e6 for point in curves[alpha]]
            ax.plot(millions, [point[column] for point in curves[alpha]], color=color)
    for ax in panels.flat:
        ax.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, fontsize=9)
    page.savefig(ASSETS / "walk.png", dpi=110)


if __name__ == "__main__":
    main()
