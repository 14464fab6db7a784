"""
Which alpha is best for R repetitions? Train a grid of runs, fit the paper's Gaussian process to it, draw its figures.

    python sweep.py run --repetitions 8,16,32,64 --alphas 0,1/8,1/2,7/8,1 --config config/tiny.py --seeds 1,2 --jobs 2
    python sweep.py fit --results out/sweep/results.jsonl --target val_ar --json fit.json
    python sweep.py plot --results out/sweep/results.jsonl --out assets
`run` hands flags that it does not know (--max_steps=300) to train.py; after a stop the same command goes on. A line of
results is a run: repetitions, alpha and any numbers, of which val_* should be low, all others high.
"""
import argparse
import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import die, suggest


def height(alpha):
    """log2 of the odds AR : MD. A step halves one share, as a step of log2 R halves the data; 1/64 keeps 0, 1 finite."""
    return np.log2((np.array(alpha, float) + 1 / 64) / (1 - np.array(alpha, float) + 1 / 64))


def read(path):
    """The runs of a results file, with the place of each on the map; alpha may be 0.875 or "7/8"."""
    runs = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for n, line in enumerate(runs):
        try:
            R, alpha = (Fraction(str(json.loads(line)[k])).limit_denominator(4096) for k in ("repetitions", "alpha"))
            if R <= 0 or not 0 <= alpha <= 1:
                raise ValueError("out of range")
            runs[n] = json.loads(line) | {"repetitions": R, "alpha": alpha, "place": (np.log2(float(R)), height(alpha))}
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            die(f"{path}, line {n + 1} is no run with repetitions and alpha ({type(error).__name__}: {error})")
    return runs


def train(args, settings, R, alpha, seed):
    """Train and evaluate a run, in processes of their own, then write its line of the results."""
    folder = args.results.parent / f"R{R}_a{str(alpha).replace('/', '_')}_s{seed}"
    commands = [["train.py", args.config, *settings, f"--repetitions={R}", f"--alpha={alpha}", f"--seed={seed}",
                 f"--out_dir={folder}", f"--resume={(folder / 'ckpt.pt').exists()}"],
                ["eval.py", f"--ckpt={folder}", f"--json={folder}/eval.json", *args.eval.split()]]
    for script, *flags in commands if args.eval else commands[:1]:
        command = [sys.executable, Path(__file__).parent / script, *flags]
        child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if child.returncode:
            raise ChildProcessError(f"{folder}: {['killed', *child.stdout.splitlines()][-1].removeprefix('error: ')}")
    records = [r for r in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if "val_ar" in r]
    line = {"repetitions": R, "alpha": float(alpha), "seed": seed} | {k: records[-1][k] for k in ("val_ar", "val_md", "overfit")}
    if args.eval:
        report = json.loads((folder / "eval.json").read_text())
        score = report["average"] or {k: v["normalized"] for k, v in report["tasks"]["heldout"].items()}
        line |= {f"score_{k}": 100 * score[k] for k in ("ar", "prefix", "pll") if k in score}
    line["curve"] = [[r["tokens"], round(r["val_ar"], 4), round(r["val_md"], 4)] for r in records]
    with open(args.results, "a") as f:  # one write: the whole line or nothing
        f.write(json.dumps(line) + "\n")


def fit(runs, target, Rs, n=65):
    """The paper's model of a column: R^2, kernel, heights (n,), the mean and the chance to be the best (len(Rs), n)."""
    names = sorted({k for r in runs for k, v in r.items() if type(v) in (int, float)})
    x, y = (np.array([r[k] for r in runs if target in r], float) for k in ("place", target))
    if target not in names or len(y) < 5 or len(set(x[:, 1])) < 2:
        die(f"a fit needs 5 runs and 2 alphas with the number '{target}'" + (f": there are {len(y)} runs" if target in names else suggest(target, names)))
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels
    kernel = kernels.ConstantKernel() * kernels.Matern([1, 1], (0.2, 100), nu=1.5) + kernels.WhiteKernel(0.1, (1e-5, 1))
    gp = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=8, random_state=0)
    warnings.simplefilter("ignore")  # scikit-learn names every parameter that ends at its bound
    center, scale, heights = x.mean(0), x.std(0) + 1e-9, np.linspace(x[:, 1].min(), x[:, 1].max(), n)
    r2 = gp.fit((x - center) / scale, y).score((x - center) / scale, y)
    kernel, gp.kernel_ = gp.kernel_, gp.kernel_.k1  # from here on the surface itself, without the noise of a run
    points = [(np.stack((np.full(n, np.log2(float(R))), heights), 1) - center) / scale for R in Rs]
    samples = [gp.sample_y(p, 4000) * (-1 if target.startswith("val") else 1) for p in points]  # joint over alpha
    chances = [np.bincount(s.argmax(0), minlength=n) / s.shape[1] for s in samples]
    return r2, kernel, heights, np.array([gp.predict(p) for p in points]), np.array(chances)


def plot(runs, targets, out):
    """PNGs, as far as the results go: maps of the fits; held-out curves, low alpha blue, high alpha red."""
    from matplotlib import colormaps, figure
    (Rs, xs), (alphas, ys) = (zip(*sorted({(r[k], r["place"][i]) for r in runs})) for i, k in enumerate(("repetitions", "alpha")))
    for k in targets if len(Rs) > 1 else []:
        page = figure.Figure((9.6, 4), layout="constrained")
        r2, _, heights, mean, chance = fit(runs, k, 2 ** np.linspace(xs[0], xs[-1], 33))
        for ax, z, colors, title in zip(page.subplots(1, 2), (mean, chance), ("viridis_r" if k.startswith("val") else "viridis", "Greys"),
                                        (f"{k}, fitted (R² {r2:.3f}; crosses: overfitted)", f"{k}: chance to be the best alpha")):
            page.colorbar(ax.contourf(np.linspace(xs[0], xs[-1], 33), heights, z.T, 20, cmap=colors), ax=ax)
            ax.set(xlabel="repetitions R", ylabel="alpha, the share of AR", title=title)
            ax.set_xticks(xs, Rs)
            ax.set_yticks(ys, alphas)
            for r in runs:
                ax.plot(*r["place"], "kx" if r.get("overfit") else "ko", mfc="none", clip_on=False)
        page.savefig(out / f"map_{k}.png", dpi=80)
    page = figure.Figure((1.5 + 3 * len(Rs), 6), layout="constrained")
    axes = page.subplots(2, len(Rs), squeeze=False, sharey="row")
    for (i, name), (j, R), alpha in product(enumerate(("AR", "MD")), enumerate(Rs), alphas):
        seeds = np.array([r["curve"][1:] for r in runs if "curve" in r and (r["repetitions"], r["alpha"]) == (R, alpha)])
        if len(seeds) and alpha != i:  # an objective that was not trained is not shown
            tokens, losses, color = seeds[0, :, 0] / 1e6, seeds[..., 1 + i], colormaps["coolwarm"](height(alpha) / 12 + 0.5)
            axes[i, j].plot(tokens, losses.mean(0), color=color, label=f"alpha {alpha}")
            axes[i, j].fill_between(tokens, losses.min(0), losses.max(0), color=color, alpha=0.3)
            axes[i, j].legend()
        axes[i, j].set(title=f"R = {R}", xlabel="tokens seen, millions", ylabel=f"held-out {name} loss, nats/token")
    page.savefig(out / "curves.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("command", choices=["run", "fit", "plot"])
    for flag, default, text in (
            ("results", Path("out/sweep/results.jsonl"), "runs are kept beside it"), ("config", "config/tiny.py", "of all runs"),
            ("repetitions", "8,16,32,64", "of the grid"), ("alphas", "0,1/8,1/2,7/8,1", "of the grid"), ("seeds", "1", "of the grid"),
            ("jobs", 1, "runs at a time"), ("eval", "", "flags for eval.py after each run: '--tasks heldout --modes ar,prefix'"),
            ("target", "val_ar,val_md", "columns to fit"), ("json", Path(os.devnull), "file for the last fit"), ("out", Path("assets"), "folder of figures")):
        parser.add_argument("--" + flag, default=default, type=type(default), help=f"{text} (default: {default})")
    args, settings = parser.parse_known_args()
    runs, targets = read(args.results), args.target.split(",")
    if args.command != "run" and (settings or not runs):
        die(f"{args.command} has no flag {settings[0]}" if settings else f"no runs in {args.results}")
    if args.command == "run":
        try:
            lists = [[kind(x) for x in text.split(",")] for kind, text in ((int, args.repetitions), (Fraction, args.alphas), (int, args.seeds))]
        except (ValueError, ZeroDivisionError) as error:
            die(f"--repetitions, --alphas and --seeds take numbers with commas between them: {error}")
        todo = [run for run in product(*lists) if run not in {(r["repetitions"], r["alpha"], r.get("seed")) for r in runs}]
        args.results.parent.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))
        with ThreadPoolExecutor(args.jobs) as pool:  # a run that fails cancels those that have not begun
            list(tqdm(pool.map(lambda run: train(args, settings, *run), todo), "runs", len(todo)))
    elif args.command == "plot":
        args.out.mkdir(parents=True, exist_ok=True)
        plot(runs, targets, args.out)
    for target in targets if args.command == "fit" else []:
        Rs, optimal = sorted({r["repetitions"] for r in runs}), []
        r2, kernel, heights, _, chances = fit(runs, target, Rs)
        print(f"{target}: R^2 {r2:.4f}, kernel {kernel}\n   R   alpha      90%      alpha*R  paper's rule")
        for R, chance in zip(map(float, Rs), chances):
            order = np.argsort(-chance, kind="stable")  # the smallest set of alphas with a chance of 90%
            odds = 2 ** heights[order[:1 + np.searchsorted(np.cumsum(chance[order]), 0.9)]]
            alphas = (odds * 65 / 64 - 1 / 64) / (1 + odds)
            optimal.append({"repetitions": R, "alpha": alphas[0], "low": alphas.min(), "high": alphas.max()})
            print(f"{R:4g}   {alphas[0]:.3f}  {alphas.min():.3f}-{alphas.max():.3f} {R * alphas[0]:8.1f}   {min(63 / 64, 16 / R):.3f}")
        args.json.write_text(json.dumps({"target": target, "r2": r2, "kernel": str(kernel), "optimal": optimal}, indent=1))
