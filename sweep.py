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

import numpy as np
from tqdm import tqdm

from configurator import die, suggest


def read(path):
    with open(path, encoding="utf-8") as f:
        runs = f.read().splitlines()
    for n, line in enumerate(runs):
        try:
            runs[n] = run = json.loads(line)
            run |= {k: Fraction(str(run[k])).limit_denominator(4096) for k in ("repetitions", "alpha")}  # 0.875 or "7/8"
            assert run["repetitions"] > 0 and 0 <= run["alpha"] <= 1, "out of range"
            run |= {"prefix_minus_ar": run["score_prefix"] - run["score_ar"]} if {"score_prefix", "score_ar"} <= {*run} else {}
        except (ValueError, KeyError, TypeError, ArithmeticError, AssertionError) as error:
            die(f"{path}, line {n + 1} is no run with repetitions and alpha ({type(error).__name__}: {error})")
    return runs


def train(args, settings, R, alpha, seed):
    """Train and evaluate a run, in processes of their own, then write its line of the results."""
    folder = os.path.join(os.path.dirname(args.results), f"R{R}_a{str(alpha).replace('/', '_')}_s{seed}")
    commands = [["train.py", args.config, *settings, f"--repetitions={R}", f"--alpha={alpha}", f"--seed={seed}",
                 f"--out_dir={folder}", f"--resume={os.path.exists(folder + '/ckpt.pt')}"]]
    commands += [["eval.py", "--ckpt", folder, "--json", folder + "/eval.json", *args.eval.split()]] * bool(args.eval)
    for script, *flags in commands:
        command = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), script), *flags]
        child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if child.returncode:
            raise ChildProcessError(f"{folder}: {['killed', *child.stdout.splitlines()][-1].removeprefix('error: ')}")
    with open(folder + "/log.jsonl") as f:
        records = [r for r in map(json.loads, f) if "val_ar" in r]
    line = {"repetitions": R, "alpha": float(alpha), "seed": seed} | {k: records[-1][k] for k in ("val_ar", "val_md", "overfit")}
    if args.eval:
        with open(folder + "/eval.json") as f:
            report = json.load(f)
        scores = report["average"] or {k: v["normalized"] for k, v in report["tasks"]["heldout"].items()}
        line |= {f"score_{k}": 100 * scores[k] for k in ("ar", "prefix", "pll") if k in scores}
    line["curve"] = [[r["tokens"], round(r["val_ar"], 4), round(r["val_md"], 4)] for r in records]
    with open(args.results, "a") as f:  # one write: the whole line or nothing
        f.write(json.dumps(line) + "\n")


def height(alpha):
    """log2 of the odds AR : MD. A step halves one share, as a step of log2 R halves the data; 1/64 keeps 0, 1 finite."""
    return np.log2((np.array(alpha, float) + 1 / 64) / (1 - np.array(alpha, float) + 1 / 64))


def fit(runs, target, Rs, n=65):
    """The paper's model of a column: R^2, kernel, alphas (n,), the mean and the chance to be the best alpha (len(Rs), n)."""
    names = sorted({k for r in runs for k, v in r.items() if type(v) in (int, float)})
    runs, known = [r for r in runs if target in r], {r["alpha"] for r in runs if target in r}
    if target not in names or len(runs) < 5 or len(known) < 2:
        why = suggest(target, names) if target not in names else f": {len(runs)} runs with {len(known)} alpha have it"
        die(f"a fit needs 5 runs and 2 alphas with the number '{target}'{why}")
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels
    x = np.array([(np.log2(float(r["repetitions"])), height(r["alpha"])) for r in runs])
    y, center, scale = np.array([r[target] for r in runs], float), x.mean(0), x.std(0) + 1e-9
    kernel = kernels.ConstantKernel() * kernels.Matern([1, 1], (0.2, 100), nu=1.5) + kernels.WhiteKernel(0.1, (1e-5, 1))
    warnings.simplefilter("ignore")  # scikit-learn names every parameter that ends at its bound
    gp = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=8, random_state=0).fit((x - center) / scale, y)
    r2, kernel, gp.kernel_ = gp.score((x - center) / scale, y), gp.kernel_, gp.kernel_.k1  # from here on without the noise
    heights = np.linspace(x[:, 1].min(), x[:, 1].max(), n)
    points = [(np.stack((np.full(n, np.log2(float(R))), heights), 1) - center) / scale for R in Rs]
    best = [gp.sample_y(p, 2000).argmin(0) if target.startswith("val") else gp.sample_y(p, 2000).argmax(0) for p in points]
    chances = np.array([np.bincount(b, minlength=n) / len(b) for b in best])
    return r2, kernel, (2 ** heights * 65 - 1) / 64 / (1 + 2 ** heights), np.array([gp.predict(p) for p in points]), chances


def plot(runs, targets, out):
    """Maps of the fits and curves over training, as PNG, as far as the results have them."""
    from matplotlib import colormaps, figure
    Rs, alphas = (sorted({r[k] for r in runs}) for k in ("repetitions", "alpha"))
    for name, columns in (("map", targets), ("prefix", ["score_prefix", "prefix_minus_ar"])):
        if len(Rs) > 1 and all(any(k in r for r in runs) for k in columns):
            page, fine = figure.Figure((4.8 * len(columns), 7), layout="constrained"), np.geomspace(*np.array(Rs[::len(Rs) - 1], float), 33)
            for k, (top, bottom) in zip(columns, page.subplots(2, len(columns), squeeze=False).T):
                r2, _, grid, mean, chance = fit(runs, k, fine)
                for ax, z, colors, title in ((top, mean, "viridis_r" if k.startswith("val") else "viridis", f"{k} (R² {r2:.3f})"),
                                             (bottom, chance / chance.max(1, keepdims=True), "Greys", f"{k}: where the best alpha lies")):
                    page.colorbar(ax.contourf(np.log2(fine), height(grid), z.T, 20, cmap=colors), ax=ax)
                    ax.set(xlabel="repetitions R", ylabel="alpha", title=title)
                    ax.set_xticks(np.log2(np.array(Rs, float)), Rs)
                    ax.set_yticks(height(alphas), alphas)
                for r in runs:  # crosses are overfitted
                    top.plot(np.log2(float(r["repetitions"])), height(r["alpha"]), "kx" if r.get("overfit") else "ko", mfc="none", clip_on=False)
            page.savefig(f"{out}/{name}.png", dpi=80)
    if all("curve" in r for r in runs):
        page = figure.Figure((1.5 + 3 * len(Rs), 6), layout="constrained")
        axes = page.subplots(2, len(Rs), squeeze=False, sharey="row")
        for (i, name), (j, R), alpha in product(enumerate(("AR", "MD")), enumerate(Rs), alphas):
            seeds = np.array([r["curve"][1:] for r in runs if (r["repetitions"], r["alpha"]) == (R, alpha)])  # (seeds, times, 3)
            if len(seeds) and alpha != i:  # an objective that was not trained is not shown
                style = dict(color=colormaps["coolwarm"](height(alpha) / 12 + 0.5), label=f"alpha {alpha}")
                axes[i, j].plot(seeds[0, :, 0] / 1e6, seeds[..., 1 + i].mean(0), **style)
                axes[i, j].fill_between(seeds[0, :, 0] / 1e6, seeds[..., 1 + i].min(0), seeds[..., 1 + i].max(0), alpha=0.3, color=style["color"])
            axes[i, j].set(title=f"R = {R}", xlabel="tokens seen, millions", ylabel=f"held-out {name} loss, nats/token")
            axes[i, -1].legend()
        page.savefig(f"{out}/curves.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("command", choices=["run", "fit", "plot"])
    for flag, default, text in (
            ("results", "out/sweep/results.jsonl", "runs are kept beside it"), ("config", "config/tiny.py", "of all runs"),
            ("repetitions", "8,16,32,64", "to run"), ("alphas", "0,1/8,1/2,7/8,1", "to run"), ("seeds", "1", "to run"),
            ("jobs", 1, "runs at a time"), ("eval", "", "flags of eval.py, as '--tasks heldout --modes ar,prefix'"),
            ("target", "val_ar,val_md", "columns"), ("json", "", "file for the fit"), ("out", "assets", "for figures")):
        parser.add_argument("--" + flag, default=default, type=type(default), help=f"{text} ({default})")
    args, settings = parser.parse_known_args()
    runs = read(args.results) if args.command != "run" or os.path.exists(args.results) else []
    if args.command == "run":
        try:
            lists = ([kind(x) for x in getattr(args, flag).split(",")]
                     for flag, kind in (("repetitions", int), ("alphas", Fraction), ("seeds", int)))
            todo = [run for run in product(*lists) if run not in {(r["repetitions"], r["alpha"], r.get("seed")) for r in runs}]
        except (ValueError, ZeroDivisionError) as error:
            die(f"--repetitions, --alphas and --seeds take numbers with commas between them: {error}")
        os.makedirs(os.path.dirname(args.results) or ".", exist_ok=True)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))
        with ThreadPoolExecutor(args.jobs) as pool:  # a run that fails cancels those that have not begun
            list(tqdm(pool.map(lambda run: train(args, settings, *run), todo), "runs", len(todo)))
    elif settings or not runs:
        die(f"{args.command} has no flag {settings[0]}" if settings else f"{args.results} is empty")
    elif args.command == "fit":
        Rs, report = sorted({r["repetitions"] for r in runs}), {}
        for target in args.target.split(","):
            r2, kernel, alphas, _, chances = fit(runs, target, Rs)
            print(f"{target}: R^2 {r2:.4f}, kernel {kernel}\n   R   alpha      90%      alpha*R  paper's rule")
            report = {"target": target, "r2": r2, "kernel": str(kernel), "optimal": []}
            for R, chance in zip(map(float, Rs), chances):
                order = np.argsort(-chance, kind="stable")  # of the smallest set of alphas with a chance of 90%
                likely = alphas[order[:1 + np.searchsorted(np.cumsum(chance[order]), 0.9)]]
                report["optimal"].append(dict(repetitions=R, alpha=likely[0], low=likely.min(), high=likely.max()))
                print(f"{R:4g}   {likely[0]:.3f}  {likely.min():.3f}-{likely.max():.3f} {R * likely[0]:8.1f}   {min(63 / 64, 16 / R):.3f}")
        if args.json:
            with open(args.json, "w") as f:
                json.dump(report, f, indent=1)
    else:
        os.makedirs(args.out, exist_ok=True)
        plot(runs, args.target.split(","), args.out)
