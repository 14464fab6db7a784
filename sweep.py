"""
Which alpha is best for R repetitions? Train a grid of runs, fit the paper's Gaussian process to it, draw its figures.

    python sweep.py run --repetitions 8,16,32,64 --alphas 0,1/8,1/2,7/8,1 --config config/tiny.py --seeds 1,2 --jobs 2
    python sweep.py fit --results out/sweep/results.jsonl --target val_ar --json fit.json
    python sweep.py plot --results out/sweep/results.jsonl --out assets
`run` hands unknown flags (--max_steps=300) to train.py, --eval '--tasks heldout' to eval.py; repeated, it goes on. A
line of results is a run: repetitions, alpha and any numbers, of which val_* should be low, all others high.
"""

import concurrent.futures, json, os, subprocess, sys, warnings
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm
from configurator import die, flags, suggest


def height(alpha):
    """log2 of the odds of AR: a step halves a share, as a step of log2 R halves the data; 1/64 keeps 0, 1 finite."""
    return np.log2((np.array(alpha, float) + 1 / 64) / (1 - np.array(alpha, float) + 1 / 64))


def read(path):
    runs = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for n, line in enumerate(runs):
        try:  # alpha may be 0.875 or "7/8"
            R, alpha = (
                Fraction(str(json.loads(line)[k])).limit_denominator(4096)
                for k in ("repetitions", "alpha")
            )
            assert R > 0 and 0 <= alpha <= 1, "a number is out of range"
            runs[n] = json.loads(line) | {
                "repetitions": R,
                "alpha": alpha,
                "place": (np.log2(float(R)), height(alpha)),
            }
        except (ValueError, KeyError, TypeError, ZeroDivisionError, AssertionError) as error:
            die(
                f"{path}, line {n + 1} is no run with repetitions and alpha ({type(error).__name__}: {error})"
            )
    return runs


def train(args, settings, R, alpha, seed):
    """Train and evaluate a run, in processes of their own, then write its line of the results."""
    folder = args.results.parent / f"R{R}_a{str(alpha).replace('/', '_')}_s{seed}"
    run = (
        f"--repetitions={R}",
        f"--alpha={alpha}",
        f"--seed={seed}",
        f"--resume={(folder / 'ckpt.pt').exists()}",
    )
    commands = [
        ["train.py", args.config, *settings, *run, f"--out_dir={folder}"],
        [
            "eval.py",
            *args.eval.split(),
            f"--ckpt={folder}",
            f"--json={folder}/eval.json",
            f"--dump={folder}/eval.jsonl",
        ],
    ]
    for script, *flags in commands if args.eval else commands[:1]:
        child = subprocess.run(
            [sys.executable, Path(__file__).parent / script, *flags], capture_output=True, text=True
        )
        if child.returncode:
            raise ChildProcessError(
                f"{folder}: {['killed', *child.stderr.splitlines()][-1].removeprefix('error: ')}"
            )
    records = [r for r in map(json.loads, open(folder / "log.jsonl")) if "val_ar" in r]
    line = {"repetitions": int(R), "alpha": float(alpha), "seed": int(seed)}
    line |= {k: records[-1][k] for k in ("val_ar", "val_md", "overfit")}
    if args.eval:
        # the paper's average in percent; of `heldout` alone, the log-likelihood of a right completion in nats
        scores = {k: 100 * v for k, v in json.load(open(folder / "eval.json"))["average"].items()}
        right = [
            r for r in map(json.loads, open(folder / "eval.jsonl")) if r["choice"] == r["gold"]
        ]
        scores = scores or {
            k: sum(r[k] for r in right) / len(right) for k in ("ar", "prefix") if k in right[0]
        }
        scores["prefix_minus_ar"] = scores.get("prefix", 0) - scores.get("ar", 0)
        line |= {
            f"score_{k}": scores[k]
            for k in ("ar", "prefix", "prefix_minus_ar", "pll")
            if k in scores
        }
    line["curve"] = [[r["tokens"], round(r["val_ar"], 4), round(r["val_md"], 4)] for r in records]
    with open(args.results, "a") as f:  # in one write: the whole line or nothing
        f.write(json.dumps(line) + "\n")


def fit(runs, target, xs, n=65):
    """The paper's model of a column: R^2, kernel, n heights; at each log2 R and height the mean, the chance to win."""
    names, runs = (
        {k for r in runs for k in r},
        [r for r in runs if type(r.get(target)) in (int, float)],
    )
    if len(runs) < 5 or len({r["alpha"] for r in runs}) < 2:
        here = f"; {len(runs)} runs have it" if target in names else suggest(target, sorted(names))
        die(f"a fit needs 5 runs and 2 alphas with a number '{target}'{here}")
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    warnings.simplefilter("ignore")  # scikit-learn names every parameter that ends at its bound
    kernel = kernels.ConstantKernel() * kernels.Matern(
        [1, 1], (0.2, 100), nu=1.5
    ) + kernels.WhiteKernel(0.1, (1e-5, 1))
    gp = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=8, random_state=0)
    x, y = np.array([r["place"] for r in runs]), np.array([r[target] for r in runs])
    center, scale, heights = (
        x.mean(0),
        x.std(0) + 1e-9,
        np.linspace(x[:, 1].min(), x[:, 1].max(), n),
    )
    r2 = gp.fit((x - center) / scale, y).score((x - center) / scale, y)
    kernel, gp.kernel_ = (
        gp.kernel_,
        gp.kernel_.k1,
    )  # from here on the surface itself, without the noise of a run
    points = [(np.stack((np.full(n, log_R), heights), 1) - center) / scale for log_R in xs]
    samples = [
        gp.sample_y(p, 4000) * (-1 if target.startswith("val") else 1) for p in points
    ]  # joint over alpha
    chances = np.array([np.bincount(sample.argmax(0), minlength=n) / 4000 for sample in samples])
    return r2, kernel, heights, np.array([gp.predict(p) for p in points]), chances


def plot(runs, targets, out):
    """PNGs: a map of each target, crosses overfitted; held-out losses over training, low alpha blue, high alpha red."""
    from matplotlib import colormaps, figure

    Rs, alphas = (sorted({r[k] for r in runs}) for k in ("repetitions", "alpha"))
    ticks = np.log2(np.array(Rs, float))
    for target in targets if len(Rs) > 1 else []:
        page, xs = (
            figure.Figure((10, 4), layout="constrained"),
            np.linspace(ticks[0], ticks[-1], 33),
        )
        r2, _, heights, mean, chance = fit(runs, target, xs)
        colors = "viridis_r" if target.startswith("val") else "viridis"
        for ax, z, colors, label in zip(
            page.subplots(1, 2),
            (mean, chance),
            (colors, "Greys"),
            (f"{target} (R² {r2:.3f})", f"chance of the best alpha, by {target}"),
        ):
            page.colorbar(ax.contourf(xs, heights, z.T, 20, cmap=colors), ax=ax, label=label)
            ax.set(
                xticks=ticks,
                xticklabels=Rs,
                yticks=height(alphas),
                yticklabels=alphas,
                xlabel="repetitions R",
                ylabel="alpha, the share of AR",
            )
            for r in runs:
                ax.plot(*r["place"], "kx" if r.get("overfit") else "ko", mfc="none", clip_on=False)
        page.savefig(out / f"map_{target}.png", dpi=80)
    axes = (page := figure.Figure((9, 1 + 2.5 * len(Rs)), layout="constrained")).subplots(
        len(Rs), 2, squeeze=False
    )
    for r, (i, name) in product(sorted(runs, key=lambda r: r["alpha"]), enumerate(("AR", "MD"))):
        ax, curve = axes[Rs.index(r["repetitions"]), i], np.array(r.get("curve", []))[1:]
        if len(curve) and r["alpha"] != i:  # an objective that was not trained is not shown
            label, color = f"alpha {r['alpha']}", colormaps["turbo"](r["place"][1] / 14 + 0.5)
            label = None if label in ax.get_legend_handles_labels()[1] else label  # of another seed
            ax.plot(curve[:, 0] / 1e6, curve[:, 1 + i], color=color, label=label)
            ax.set(
                title=f"R = {r['repetitions']}",
                xlabel="million tokens",
                ylabel=f"held-out {name} loss, nats/token",
            )
            ax.legend()
    page.savefig(out / "curves.png", dpi=70)


if __name__ == "__main__":
    args, others = flags(
        __doc__,
        True,
        results=Path("out/sweep/results.jsonl"),
        repetitions="8,16,32,64",
        alphas="0,1/8,1/2,7/8,1",
        seeds="1",
        jobs=1,
        config="config/tiny.py",
        eval="",
        target="val_ar,val_md",
        out="assets",
        json=os.devnull,
    )
    (command, *settings), runs = others or [""], read(args.results)
    if command not in ("run", "fit", "plot"):
        die(f"no command '{command}'{suggest(command, ['run', 'fit', 'plot'])}")
    if command == "run":
        try:
            grid = [
                *product(
                    *(
                        map(Fraction, text.split(","))
                        for text in (args.repetitions, args.alphas, args.seeds)
                    )
                )
            ]
        except (ValueError, ZeroDivisionError) as error:
            die(
                f"--repetitions, --alphas and --seeds take numbers with commas between them: {error}"
            )
        todo = [
            run
            for run in grid
            if run not in {(r["repetitions"], r["alpha"], r.get("seed")) for r in runs}
        ]
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // max(1, args.jobs))))
        with concurrent.futures.ThreadPoolExecutor(
            max(1, args.jobs)
        ) as pool:  # a failure or Ctrl-C cancels the rest
            list(tqdm(pool.map(lambda run: train(args, settings, *run), todo), "runs", len(todo)))
    elif settings or not runs:
        die(f"{command} has no flag {settings[0]}" if settings else f"no runs in {args.results}")
    elif command == "plot":
        os.makedirs(args.out, exist_ok=True)
        plot(runs, args.target.split(","), Path(args.out))
    for target in args.target.split(",") if command == "fit" else []:
        Rs = sorted({float(r["repetitions"]) for r in runs})
        r2, kernel, heights, _, chances = fit(runs, target, np.log2(Rs))
        print(
            f"{target}: R^2 {r2:.4f}, kernel {kernel}\n   R   alpha      90%      alpha*R  paper's rule"
        )
        report = {"target": target, "r2": r2, "kernel": str(kernel), "optimal": []}
        for R, chance in zip(Rs, chances):
            order = np.argsort(
                -chance, kind="stable"
            )  # the smallest set of alphas that holds 90%, the likeliest first
            odds = 2 ** heights[order[: 1 + np.searchsorted(np.cumsum(chance[order]), 0.9)]]
            a = (odds * 65 / 64 - 1 / 64) / (1 + odds)
            report["optimal"].append(
                {"repetitions": R, "alpha": a[0], "low": a.min(), "high": a.max()}
            )
            print(
                f"{R:4g}   {a[0]:.3f}  {a.min():.3f}-{a.max():.3f} {R * a[0]:8.1f}   {min(63 / 64, 16 / R):.3f}"
            )
        Path(args.json).write_text(json.dumps(report, indent=1))
