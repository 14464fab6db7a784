"""
Find the best alpha for R repetitions: train a grid of runs, compare them, draw the paper's maps.

    python sweep.py run --config config/parity.py --repetitions 4,16,64 --alphas 0,1/2,15/16,1 \\
        --seeds 1,2,3 --jobs 2 --eval "--tasks heldout" --results out/parity/results.jsonl
    python sweep.py table --results out/parity/results.jsonl   # means over seeds, differences
    python sweep.py fit --results out/parity/results.jsonl     # the best alpha for each R
    python sweep.py plot --results out/parity/results.jsonl    # map.png, curves_R4.png, ...
    python sweep.py plot --results out/demo/log.jsonl          # curves.png of one run

Settings for train.py follow a lone --, as in `sweep.py run ... -- --weight_decay=1.0`. The same
command continues a sweep that was stopped, and only evaluates runs that are trained already.

A line of the results is a run: repetitions, alpha, seed, and the columns that were measured.
val_* are held-out losses. acc_MODE is the accuracy on the task heldout in percent, logp_MODE the
log-likelihood of its true completions in nats per token; of other tasks, acc_TASK_MODE and
logp_TASK_MODE. average_MODE is the paper's score in percent, *_minus_ar a paired difference, *_se
a standard error. A loss should be low, everything else high.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import product
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

from errors import die, report, suggest, write_atomically

if __name__ == "__main__":
    sys.excepthook = report  # before the large imports: a missing package is one line too
    sys.stdout.reconfigure(errors="replace")  # some terminals cannot print ±

import numpy as np
from tqdm import tqdm

# What tables and maps show by default, if it was measured: column -> title.
TITLES = {
    "average_ar": "AR score, %",
    "average_pll": "PLL score, %",
    "average_prefix_minus_ar": "prefix − AR, points",
    "acc_ar": "AR accuracy, %",
    "acc_pll": "PLL accuracy, %",
    "acc_prefix_minus_ar": "prefix − AR, points",
    "val_ar": "held-out AR loss",
    "val_md": "held-out MD loss",
    "logp_pll6": "log-likelihood by PLL",
}


class Run(NamedTuple):
    """One line of a results file."""

    repetitions: int
    alpha: Fraction
    seed: int
    settings: str  # config file and settings of train.py
    eval: str  # flags of eval.py
    overfit: bool
    curve: np.ndarray  # (validations, 3): tokens, val_ar, val_md
    columns: dict[str, float]  # everything else that is a number


class Surface(NamedTuple):
    """What a Gaussian process says about a column; arrays are (values of R, values of alpha)."""

    r2: float
    kernel: str
    log_odds: np.ndarray  # (values of alpha,)
    mean: np.ndarray
    best: np.ndarray  # probability that this alpha is the best for this R
    positive: np.ndarray  # probability that the column is above 0


class Line(NamedTuple):
    """A line of a figure; several curves are seeds, drawn thin around their mean."""

    objective: str
    label: str
    color: tuple
    style: str
    curves: list[np.ndarray]  # each (n, 2): tokens, loss


def log_odds(alpha):
    """Return log2 of the odds of AR; 1/64 keeps 0 and 1 finite.

    A step halves the share of an objective, as a step of log2 R halves the data.
    """
    alpha = np.asarray(alpha, dtype=float)
    return np.log2((alpha + 1 / 64) / (1 - alpha + 1 / 64))


def alpha_at(log_odds):
    """Return the alpha that has these log-odds."""
    odds = 2.0**log_odds
    return (odds * (1 + 1 / 64) - 1 / 64) / (1 + odds)


def recommended_alpha(R):
    """Return the paper's Remarks 1 and 2 as a rule: little MD, at most 16 repetitions of AR."""
    return np.minimum(63 / 64, 16 / R)


def is_loss(column):
    """Say whether low values of a column are good."""
    return column.startswith("val_")


# ---- results files -------------------------------------------------------------------------------
def read_records(path):
    """Return the objects in a file of JSON lines."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            die(f"{path}, line {number} is not a JSON object: {error}")
    return records


def read_runs(path):
    """Return the runs of a results file; of a run that was measured again, the last line."""
    runs = {}
    for number, record in enumerate(read_records(path), start=1):
        try:
            run = Run(
                repetitions=int(str(record.pop("repetitions"))),
                alpha=Fraction(str(record.pop("alpha"))),  # "7/8" or 0.875
                seed=int(record.pop("seed", -number)),  # without seeds, every line is another run
                settings=str(record.pop("settings", "")),
                eval=str(record.pop("eval", "")),
                overfit=bool(record.pop("overfit", False)),
                curve=np.array(record.pop("curve", []), dtype=float).reshape(-1, 3),
                columns={name: x for name, x in record.items() if type(x) in (int, float)},
            )
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            die(f"{path}, line {number} is not a run: {type(error).__name__} {error}")
        if run.repetitions < 1 or not 0 <= run.alpha <= 1:
            die(f"{path}, line {number}: repetitions start at 1, alpha lies from 0 to 1")
        runs[run.settings, run.repetitions, run.alpha, run.seed] = run
    return list(runs.values())


def select_runs(args):
    """Return the runs, and the columns of them, that the command line asks for."""
    runs = read_runs(args.results)
    if args.repetitions:
        runs = [run for run in runs if run.repetitions in args.repetitions]
    if args.alphas:
        runs = [run for run in runs if run.alpha in args.alphas]
    if not runs:
        die(f"{args.results} has no such runs")

    measured = sorted({column for run in runs for column in run.columns})
    columns = args.target or [column for column in TITLES if column in measured]
    if not columns:
        die(f"choose what to show with --target: {', '.join(measured)}")
    for column in columns:
        if column not in measured:
            die(f"{args.results} has no column '{column}'{suggest(column, measured)}")
    return runs, columns


def group_by(runs, *fields):
    """Return {values of these fields: the runs that have them}, sorted."""
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(getattr(run, field) for field in fields)].append(run)
    return dict(sorted(groups.items()))


# ---- run: train and evaluate a grid --------------------------------------------------------------
def run_grid(args):
    """Train and evaluate the runs that the results do not have yet."""
    if not (args.repetitions and args.alphas):
        die("which runs? Give --repetitions, such as 4,16,64, and --alphas, such as 0,1/2,1")
    settings = " ".join([args.config, *args.train_flags])
    known = {}
    if args.results.exists():
        for run in read_runs(args.results):
            known[run.repetitions, run.alpha, run.seed] = run

    # What is known of each run beforehand: all runs of a seed, then all of the next.
    entries = []
    for seed, R, alpha in product(args.seeds, args.repetitions, args.alphas):
        run = known.get((R, alpha, seed))
        if run and run.settings not in ("", settings):  # "": written by hand
            die(f"{args.results} has runs of '{run.settings}': choose another folder")
        if not run or args.eval not in ("", run.eval):
            entry = {"repetitions": R, "alpha": str(alpha), "seed": seed, "settings": settings}
            entries.append(entry)

    n_jobs = max(1, args.jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // n_jobs)))
    try:
        asyncio.run(run_all(args, entries, n_jobs))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


async def run_all(args, entries, n_jobs):
    """Train and evaluate runs, n_jobs at a time; append each to the results as it ends.

    When this task fails or is cancelled, asyncio.run cancels the others and waits for them.
    """
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(me.cancel))

    loop.set_default_executor(ThreadPoolExecutor(n_jobs))  # a thread waits for each script
    slots = asyncio.Semaphore(n_jobs)
    tasks = [asyncio.create_task(run_one(args, entry, slots)) for entry in entries]
    try:
        for finished in tqdm(asyncio.as_completed(tasks), desc="runs", total=len(tasks)):
            entry = await finished
            append_line(args.results, json.dumps(entry))
    except asyncio.CancelledError:
        print("\nstopping; runs save first, and the same command continues them", file=sys.stderr)
        raise


def append_line(path, line):
    """Append a line to a file: all of it, or on a full disk nothing."""
    content = line.encode() + b"\n"
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        if file.write(content) < len(content):
            file.truncate(end)
            raise OSError(f"could not write to {path}: is the disk full?")


async def run_one(args, entry, slots):
    """Train and evaluate a run; return its entry with what was measured.

    train.py ends at once if the run is finished, and refuses one that had other settings.
    """
    name = "R{repetitions}_a{alpha}_s{seed}".format(**entry).replace("/", "_")
    folder = args.results.parent / name
    log = folder / "log.jsonl"
    async with slots:
        flags = [f"--{setting}={entry[setting]}" for setting in ("repetitions", "alpha", "seed")]
        flags += [f"--out_dir={folder}", f"--resume={any(folder.glob('ckpt*.pt'))}"]
        await call(folder, "train.py", args.config, *args.train_flags, *flags)
        if args.eval:
            flags = [f"--ckpt={folder}", f"--json={folder / 'eval.json'}"]
            await call(folder, "eval.py", *shlex.split(args.eval), *flags)

    records = [record for record in read_records(log) if "val_ar" in record]
    entry["overfit"] = records[-1]["overfit"]
    for column in ("val_ar", "val_md"):
        entry[column] = records[-1][column]
        entry[f"{column}_best"] = min(record[column] for record in records)
    if args.eval:
        entry["eval"] = args.eval
        entry |= read_scores(folder / "eval.json")
    entry["curve"] = [[r["tokens"], round(r["val_ar"], 4), round(r["val_md"], 4)] for r in records]
    return entry


async def call(folder, script, *flags):
    """Run a script of this project. If the sweep is stopped, the script saves and ends too."""
    command = [sys.executable, Path(__file__).with_name(script), *flags]
    # In a session of its own: Ctrl-C reaches the sweep alone, which passes on one signal. The pipes
    # matter too: if the sweep is killed, the script ends at its next line.
    child = Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    try:
        _, errors = await asyncio.to_thread(child.communicate)
    except asyncio.CancelledError:
        child.terminate()  # asyncio.run waits for the thread, and so for the end of the script
        raise
    if child.returncode != 0:
        reasons = errors.splitlines() or [f"{script} was killed"]
        raise ChildProcessError(f"{folder}: {reasons[-1].removeprefix('error: ')}")


def read_scores(path):
    """Return as columns what eval.py has measured: all of it, and nothing else."""
    results = json.loads(path.read_text(encoding="utf-8"))
    columns = {}
    for task, modes in results["tasks"].items():
        for mode, result in modes.items():
            name = mode if task == "heldout" else f"{task}_{mode}"
            columns |= name_columns(name, result)
            if "minus_ar" in result:  # paired by eval.py, question by question
                columns |= name_columns(f"{name}_minus_ar", result["minus_ar"])

    average = results["average"]
    for mode, score in average.items():
        columns[f"average_{mode}"] = 100 * score
        if mode != "ar" and "ar" in average:
            columns[f"average_{mode}_minus_ar"] = 100 * (score - average["ar"])
    return columns


def name_columns(name, result):
    """Return accuracy and log-likelihood as columns; of a single question there is no error."""
    columns = {f"acc_{name}": 100 * result["accuracy"], f"logp_{name}": result["nats_per_token"]}
    if result["stderr"] is not None:
        columns[f"acc_{name}_se"] = 100 * result["stderr"]
        columns[f"logp_{name}_se"] = result["nats_per_token_stderr"]
    return columns


# ---- table: means over seeds, differences between alphas -----------------------------------------
def print_table(args):
    """Print markdown: the mean of each cell over its seeds, and each alpha against another."""
    runs, columns = select_runs(args)
    for (settings,), group in group_by(runs, "settings").items():
        cells = group_by(group, "repetitions", "alpha")
        print(f"\n{settings}\n\nMean over seeds ± standard deviation:\n")
        print_rows(cells, columns)
        print(f"\nDifference from alpha = {args.against}, paired by seed, ± standard error:\n")
        print_rows(cells, columns, args.against)


def print_rows(cells, columns, against=None):
    """Print a row for each cell; with `against`, of its differences from that alpha."""
    print("| R | alpha | seeds |", " | ".join(columns), "|")
    print("|---|---|---|" + "---|" * len(columns))
    for (R, alpha), cell in cells.items():
        n_seeds = 0
        texts = []
        for column in columns:
            values = values_by_seed(cell, column)
            if against is not None:
                rivals = values_by_seed(cells.get((R, against), []), column)
                both = [seed for seed in values if seed in rivals]
                values = {seed: values[seed] - rivals[seed] for seed in both}
            n_seeds = max(n_seeds, len(values))
            texts.append(format_mean(column, list(values.values()), against is not None))
        if n_seeds > 0 and alpha != against:
            print(f"| {R} | {alpha} | {n_seeds} |", " | ".join(texts), "|")


def values_by_seed(cell, column):
    """Return {seed: value of the column}."""
    return {run.seed: run.columns[column] for run in cell if column in run.columns}


def format_mean(column, values, of_the_mean):
    """Return the mean ± the values' standard deviation, or the standard error of the mean."""
    if not values:
        return ""
    digits = 3 if column.startswith(("val_", "logp_")) else 1
    if "_minus_" in column:
        digits += 1  # differences are small
    text = f"{np.mean(values):.{digits}f}"
    if len(values) > 1:
        deviation = np.std(values, ddof=1)
        if of_the_mean:
            deviation /= len(values) ** 0.5
        text += f" ± {deviation:.{digits}f}"
    return text


# ---- fit: the paper's Gaussian process, Section 5.2 ----------------------------------------------
def print_fit(args):
    """Print which alpha is most likely the best for each R, and how sure that is."""
    runs, columns = select_runs(args)
    Rs = sorted({run.repetitions for run in runs})
    fits = {}
    for column in columns:
        surface = fit_surface(runs, column, np.log2(Rs))
        print(f"{column}: R^2 {surface.r2:.4f}, kernel {surface.kernel}")
        print("   R   alpha      90%      alpha*R  paper's rule")
        optimal = []
        for R, probability in zip(Rs, surface.best):
            # The smallest set of alphas that has 90% of the probability, the likeliest first.
            order = np.argsort(-probability, kind="stable")
            n_needed = 1 + np.searchsorted(np.cumsum(probability[order]), 0.9)
            alphas = alpha_at(surface.log_odds[order[:n_needed]])
            best, low, high = alphas[0], alphas.min(), alphas.max()
            rule = recommended_alpha(R)
            print(f"{R:4}   {best:.3f}  {low:.3f}-{high:.3f} {R * best:8.1f}   {rule:.3f}")
            optimal.append({"repetitions": R, "alpha": best, "low": low, "high": high})
        fits[column] = {"r2": surface.r2, "kernel": surface.kernel, "optimal": optimal}
    if args.json:
        write_atomically(args.json, json.dumps(fits, indent=1))


def fit_surface(runs, column, log_R, n_alphas=65, n_samples=5000):
    """Fit a column over (log2 R, log-odds of alpha), standardized; return it at these log2 R."""
    runs = [run for run in runs if column in run.columns]
    if column.startswith("val_md"):
        # AR alone has never seen a mask: its MD loss is off the scale and would bend the surface.
        runs = [run for run in runs if run.alpha < 1]
    if len(runs) < 5 or len({run.alpha for run in runs}) < 2:
        die(f"a fit of '{column}' needs 5 runs and 2 alphas; {len(runs)} runs have it")

    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    # A constant times an anisotropic Matern kernel, plus the noise of single runs.
    kernel = kernels.ConstantKernel() * kernels.Matern([1, 1], (0.2, 100), nu=1.5)
    kernel += kernels.WhiteKernel(0.1, (1e-5, 1))
    gp = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=8, random_state=0)

    places = np.array([(np.log2(run.repetitions), log_odds(run.alpha)) for run in runs])
    values = np.array([run.columns[column] for run in runs])
    center = places.mean(axis=0)
    scale = places.std(axis=0) + 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn names every parameter that ends at its bound
        gp.fit((places - center) / scale, values)
    r2 = gp.score((places - center) / scale, values)
    kernel = gp.kernel_
    gp.kernel_ = kernel.k1  # from here on the surface itself, without the noise of a run

    heights = np.linspace(places[:, 1].min(), places[:, 1].max(), n_alphas)
    mean, best, positive = [], [], []
    for x in log_R:
        points = np.stack((np.full(n_alphas, x), heights), axis=1)
        points = (points - center) / scale
        samples = gp.sample_y(points, n_samples)  # (alphas, samples): each is a curve over alpha
        winners = samples.argmin(axis=0) if is_loss(column) else samples.argmax(axis=0)
        mean.append(gp.predict(points))
        best.append(np.bincount(winners, minlength=n_alphas) / n_samples)
        positive.append((samples > 0).mean(axis=1))
    return Surface(r2, str(kernel), heights, np.array(mean), np.array(best), np.array(positive))


# ---- plot: losses over training ------------------------------------------------------------------
def draw_figures(args):
    """Draw the maps and the curves of a results file, or the curves of one run's log."""
    folder = args.out or args.results.parent
    records = read_records(args.results)
    if records and "step" in records[0]:
        title = args.results.resolve().parent.name
        save_page(draw_lines(title, lines_of_log(records)), folder / "curves.png")
        return

    runs, columns = select_runs(args)
    for (R,), group in group_by(runs, "repetitions").items():
        lines = lines_of_runs(group)
        if lines:
            save_page(draw_lines(f"R = {R}", lines), folder / f"curves_R{R}.png")
    if len({run.repetitions for run in runs}) > 1:
        save_page(draw_maps(runs, columns), folder / "map.png")


def save_page(page, path):
    """Write a PNG under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    page.savefig(temporary, dpi=160, format="png")
    temporary.replace(path)
    print(path)


def color_of(alpha):
    """Return the color of an alpha, as in the paper's Figure 1: MD red, AR blue, both purple."""
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list("alpha", ["#d62728", "#8e44ad", "#1f5fd6"])
    return scale(0.5 + log_odds(alpha) / (2 * log_odds(1)))


def lines_of_log(records):
    """Return the training and held-out losses of one run."""
    lines = []
    for objective, alpha in (("ar", 1), ("md", 0)):
        for kind, label, style in (("train", "training", ":"), ("val", "held-out", "-")):
            column = f"{kind}_{objective}"
            curve = [(r["tokens"], r[column]) for r in records if r["step"] > 0 and column in r]
            if curve:
                lines.append(Line(objective, label, color_of(alpha), style, [np.array(curve)]))
    return lines


def lines_of_runs(runs):
    """Return the held-out losses of each alpha, for the objectives that it trains."""
    lines = []
    for (alpha,), group in group_by(runs, "alpha").items():
        label = {0: "MD alone", 1: "AR alone"}.get(alpha, f"α = {alpha}")
        for objective, share, index in (("ar", alpha, 1), ("md", 1 - alpha, 2)):
            # without the first validation, before any training
            curves = [run.curve[1:, [0, index]] for run in group if len(run.curve) > 1]
            if curves and share > 0:
                lines.append(Line(objective, label, color_of(alpha), "-", curves))
    return lines


def draw_lines(title, lines):
    """Draw losses over training, one panel for each objective, every line named at its end."""
    from matplotlib.figure import Figure

    page = Figure((8, 3.6), layout="constrained")
    page.suptitle(title)
    for objective, ax in zip(("ar", "md"), page.subplots(1, 2)):
        ends = []
        top = -np.inf
        for line in lines:
            if line.objective != objective:
                continue
            length = min(len(curve) for curve in line.curves)
            mean = np.mean([curve[:length] for curve in line.curves], axis=0)
            ax.plot(mean[:, 0] / 1e6, mean[:, 1], line.style, color=line.color, lw=1.8)
            ends.append((*mean[-1], line))
            for curve in line.curves:
                if len(line.curves) > 1:
                    ax.plot(curve[:, 0] / 1e6, curve[:, 1], color=line.color, lw=0.6, alpha=0.6)
                top = max(top, curve[length // 8 :, 1].max())  # the first descent may leave it
        ax.set(xlabel="million tokens", title=f"{objective.upper()} loss, nats per token")
        ax.spines[["top", "right"]].set_visible(False)
        if ends:
            low = ax.get_ylim()[0]
            ax.set_ylim(low, top + 0.05 * (top - low))
            label_ends(ax, ends)
    return page


def label_ends(ax, ends):
    """Write the labels to the right of the panel: at the ends of their lines, or above others."""
    low, high = ax.get_ylim()
    height = -1
    for tokens, loss, line in sorted(ends, key=lambda end: end[1]):
        height = max((loss - low) / (high - low), height + 0.065)
        style = {"arrowstyle": "-", "color": line.color, "lw": 0.6, "relpos": (0, 0.5)}
        text = ax.annotate(line.label, (tokens / 1e6, loss), (1.08, height), arrowprops=style)
        text.set(anncoords="axes fraction", color=line.color, va="center")


# ---- plot: maps over R and alpha -----------------------------------------------------------------
def draw_maps(runs, columns):
    """Draw columns over R and alpha, as in the paper's Figures 4 and 5, three side by side.

    Crosses are overfitted runs, circles all others.
    """
    from matplotlib.figure import Figure

    cells = group_by(runs, "repetitions", "alpha")
    Rs = sorted({R for R, _ in cells})
    alphas = sorted({alpha for _, alpha in cells})
    log_R = np.linspace(np.log2(Rs[0]), np.log2(Rs[-1]), num=33)

    n_bands = -(-len(columns) // 3)
    width = min(3, len(columns))
    page = Figure((3.5 * width, 6 * n_bands), layout="constrained")
    panels = page.subplots(2 * n_bands, width, squeeze=False)
    for ax in panels.flat:
        ax.set_axis_off()
    for i, column in enumerate(columns):
        band, place = divmod(i, 3)
        upper, lower = panels[2 * band : 2 * band + 2, place]
        surface = fit_surface(runs, column, log_R)
        draw_mean(upper, column, log_R, surface)
        draw_probability(lower, column, log_R, surface)
        for ax in (upper, lower):
            ax.set_axis_on()
            ax.set_xticks(np.log2(Rs), Rs)
            ax.set_yticks([log_odds(alpha) for alpha in alphas], alphas)
            ax.set_ylim(log_odds(alphas[0]), log_odds(alphas[-1]))
            for (R, alpha), cell in cells.items():
                overfitted = np.mean([run.overfit for run in cell]) >= 0.5
                marker = "kx" if overfitted else "ko"
                ax.plot(np.log2(R), log_odds(alpha), marker, mfc="none", ms=4, clip_on=False)
            if place == 0:
                ax.set_ylabel("α")
        lower.set_xlabel("repetitions R")
    return page


def draw_mean(ax, column, log_R, surface):
    """Draw the fitted surface; bright is good, and of a difference, red is positive."""
    from matplotlib.colors import CenteredNorm

    norm = None
    colors = "viridis_r" if is_loss(column) else "viridis"
    if "_minus_" in column:
        norm = CenteredNorm()
        colors = "RdBu_r"
    grid = (log_R, surface.log_odds, surface.mean.T)
    filled = ax.contourf(*grid, levels=14, alpha=0.8, cmap=colors, norm=norm)
    lines = ax.contour(*grid, levels=filled.levels[::2], colors="k", linewidths=0.4)
    ax.clabel(lines, fontsize=8)
    # A single count of masks, such as pll6, has the title of pll.
    title = TITLES.get(column) or TITLES.get(column.rstrip("123456"), column)
    ax.set_title(f"{title}  (R² {surface.r2:.2f})", fontsize=11)


def draw_probability(ax, column, log_R, surface):
    """Draw where the best alpha lies for each R; of a difference, where it is positive."""
    probability = surface.positive
    title = "probability that it is positive"
    if "_minus_" not in column:
        probability = surface.best / surface.best.max(axis=1, keepdims=True)
        title = "best α (dashed: min(63/64, 16/R))"
        ax.plot(log_R, log_odds(recommended_alpha(2**log_R)), "k--", lw=1.2)
    levels = np.linspace(0, 1, 11)
    ax.contourf(log_R, surface.log_odds, probability.T, levels=levels, cmap="Purples")
    ax.set_title(title, fontsize=11)


# ---- the command line ----------------------------------------------------------------------------
def list_of(kind):
    """Return a function that reads values of this kind, with commas between them."""

    def read(text):
        try:
            return [kind(part) for part in text.split(",")]
        except (ValueError, ZeroDivisionError) as error:
            die(f"'{text}' should be numbers with commas between them: {error}")

    return read


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=formatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="run | table | fit | plot")

    grid = argparse.ArgumentParser(add_help=False)  # flags of every command
    add = grid.add_argument
    add("--results", type=Path, default="out/sweep/results.jsonl", help="a line for each run")
    add("--repetitions", type=list_of(int), help="such as 4,16,64")
    add("--alphas", type=list_of(Fraction), help="such as 0,1/2,63/64,1")
    target = argparse.ArgumentParser(add_help=False, parents=[grid])
    target.add_argument("--target", type=list_of(str), help="columns, such as val_ar,acc_pll")

    run = commands.add_parser("run", parents=[grid], help="train and evaluate a grid")
    run.set_defaults(function=run_grid)
    run.add_argument("--config", required=True, help="config file of all runs")
    run.add_argument("--seeds", type=list_of(int), default=[1], help="such as 1,2,3 (1)")
    run.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    run.add_argument("--eval", default="", help='flags for eval.py, such as "--tasks heldout"')
    run.add_argument("train_flags", nargs="*", metavar="-- --key=value", help="for train.py")

    table = commands.add_parser("table", parents=[target], help="compare over seeds, in markdown")
    table.set_defaults(function=print_table)
    table.add_argument("--against", type=Fraction, default=1, help="alpha to compare with (1)")

    fit = commands.add_parser("fit", parents=[target], help="find the best alpha for each R")
    fit.set_defaults(function=print_fit)
    fit.add_argument("--json", help="also write all fits to this file")

    plot = commands.add_parser("plot", parents=[target], help="draw maps and curves")
    plot.set_defaults(function=draw_figures)
    plot.add_argument("--out", type=Path, help="folder for the figures (that of the results)")

    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
