"""
Find the best alpha for R repetitions: train a grid of runs, compare them, draw the paper's maps.

    python sweep.py run --config config/parity.py --repetitions 4,16,64 --alphas 0,1/2,15/16,1 \\
        --seeds 1,2,3 --jobs 2 --eval "--tasks heldout" --results out/parity
    python sweep.py table --results out/parity     # means over seeds, differences
    python sweep.py fit --results out/parity       # the best alpha for each R
    python sweep.py plot --results out/parity      # map.png, curves_R4.png, ...
    python sweep.py plot --results out/demo        # curves.png of a single run
    python sweep.py collect --results out/parity > parity.jsonl

A sweep is a folder of runs. `run` trains and evaluates each in a folder of its own, such as
R16_a15_16_s1. Settings for train.py follow a lone --: `sweep.py run ... -- --weight_decay=1.0`.
Ctrl-C stops the runs under way, which save first; the same command continues them.

The other commands read the finished runs in a folder, or a file in which each line is a run:
`collect` prints such lines, and {"repetitions": 16, "alpha": "1/4", "val_ar": 4.39} is one. val_*
are held-out losses. acc_MODE is the accuracy on heldout in percent, logp_MODE the
log-likelihood of its true completions in nats per token; other tasks have acc_TASK_MODE and
logp_TASK_MODE. average_MODE is the paper's score in percent, *_minus_ar a paired difference, *_se
a standard error. A loss should be low, everything else high.

A seed chooses the text too, and so shifts all of its runs. `table` compares runs of the same seed.
`fit` and the maps first move every seed to the level of the one that has the most runs, by the
median difference over the cells (R, alpha) that both have.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import NamedTuple

from errors import die, report, suggest

if __name__ == "__main__":
    sys.excepthook = report  # before the large imports, to report a missing package in one line too
    sys.stdout.reconfigure(errors="replace")  # some terminals cannot print ±

import numpy as np
from tqdm import tqdm

from configurator import FREE_ON_RESUME, Settings, make_parser, parse_alpha

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

# What tells the runs of a sweep apart.
GRID = ["repetitions", "alpha", "seed"]
# What does not matter when runs are compared.
IGNORED = {*GRID, *FREE_ON_RESUME} - {"data_dir", "init_from"}


class Run(NamedTuple):
    """A finished run, as in a line of a results file."""

    repetitions: float
    alpha: Fraction
    seed: int  # below 0: unknown
    settings: str  # all other settings, as flags of train.py
    overfit: bool
    curve: np.ndarray  # (validations, 3): tokens, val_ar, val_md
    columns: dict[str, float]  # everything else that is a number


class Surface(NamedTuple):
    """What a Gaussian process says about a column; arrays are (values of R, values of alpha)."""

    r2: float
    noise: float  # standard deviation of the runs around the surface
    shifts: dict[int, float]  # what was taken out: how far each seed lies above the reference
    log_odds: np.ndarray  # (values of alpha,)
    mean: np.ndarray
    optimum: np.ndarray  # (values of R,): the log-odds at which the mean is best
    best: np.ndarray  # probability that this alpha is the best for this R


class Line(NamedTuple):
    """A line in a figure; several curves mean several seeds, drawn thin around their mean."""

    objective: str
    label: str
    color: tuple
    style: str
    is_trained: bool  # if not, the limits of the panel ignore it
    curves: list[np.ndarray]  # each (n, 2): tokens, loss


def log_odds(alpha):
    """Return log2 of the odds of AR; 1/64 keeps 0 and 1 finite.

    A step of 1 halves the share of an objective, as a step of 1 in log2 R halves the data.
    """
    alpha = np.asarray(alpha, dtype=float)
    return np.log2((alpha + 1 / 64) / (1 - alpha + 1 / 64))


def alpha_at(log_odds):
    """Return the alpha that has these log-odds."""
    odds = 2.0**log_odds
    return (odds * (1 + 1 / 64) - 1 / 64) / (1 + odds)


def papers_rule(R):
    """Return the paper's Remarks 1 and 2 as a rule: little MD, at most 16 repetitions of AR."""
    return np.minimum(63 / 64, 16 / R)


def is_loss(column):
    """Return whether low values of a column are good."""
    return column.startswith("val_")


def unit_of(settings):
    """Return what a token is: with 272 ids, 16 of them special, it is a byte."""
    return "byte" if "--vocab_size=272" in settings.split() else "token"


# ---- run: train and evaluate a grid --------------------------------------------------------------
def run_grid(args):
    """Train and evaluate every cell of the grid, --jobs at a time."""
    if not (args.config and args.repetitions and args.alphas):
        die("which runs? Name them, as in --config FILE --repetitions 4,16,64 --alphas 0,1/2,1")
    refuse_flags(args.train_flags, ["--repetitions", "--alpha", "--seed", "--out_dir", "--resume"])
    refuse_flags(args.eval, ["--ckpt", "--json"])
    n_jobs = max(1, args.jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // n_jobs)))
    cells = list(dict.fromkeys(product(args.seeds or [1], args.repetitions, args.alphas)))
    remaining = iter(cells)  # shared by all threads; it ends when `cells` is cleared
    bar = tqdm(total=len(cells), desc="runs")

    def work():
        for cell in remaining:
            try:
                run_one(args, *cell)
            except ChildProcessError:
                cells.clear()
                bar.set_description("a run failed; waiting for the others")
                raise
            bar.update()

    # Ctrl-C reaches the scripts too: they are in the same process group.
    with bar, ThreadPoolExecutor(n_jobs) as pool:
        workers = [pool.submit(work) for _ in range(n_jobs)]
        try:
            for worker in as_completed(workers):
                worker.result()
        except KeyboardInterrupt:
            cells.clear()
            bar.write("stopping: the runs under way save first; the same command continues them")
            raise


def refuse_flags(flags, own):
    """Refuse flags that the sweep itself passes to a script."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name in own:
            die(f"the sweep chooses {name} for every run: leave out {flag}")


def run_one(args, seed, R, alpha):
    """Train a run, then evaluate it; both scripts continue where they stopped.

    train.py ends at once if the run is finished, and refuses one with different settings.
    """
    folder = args.results / f"R{R}_a{alpha}_s{seed}".replace("/", "_")
    flags = [f"--repetitions={R}", f"--alpha={alpha}", f"--seed={seed}", f"--out_dir={folder}"]
    call(folder, "train.py", args.config, *args.train_flags, *flags, "--resume")
    if args.eval:
        call(folder, "eval.py", *args.eval, f"--ckpt={folder}", f"--json={folder / 'eval.json'}")


def call(folder, script, *flags):
    """Run a script of this project; if it fails, raise its last line."""
    command = [sys.executable, Path(__file__).with_name(script), *flags]
    child = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if child.returncode in (128 + signal.SIGINT, -signal.SIGINT):  # it may have seen Ctrl-C first
        raise KeyboardInterrupt
    if child.returncode != 0:
        lines = child.stderr.decode(errors="replace").splitlines()
        reason = lines[-1] if lines else f"{script} ended with status {child.returncode}"
        raise ChildProcessError(f"{folder}: {reason.removeprefix('error: ')}")


# ---- reading runs: folders, or a file with a line for each ---------------------------------------
@contextmanager
def reading(what):
    """Turn any error that damaged content raises into one line."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        die(f"cannot read {what}: {type(error).__name__}: {error}")


def parse(text):
    """Return a JSON object in which all numbers are finite."""
    content = dict(json.loads(text))
    json.dumps(content, allow_nan=False)
    return content


def read_records(path):
    """Return the objects in a file of JSON lines."""
    records = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            with reading(f"{path}, line {number}"):
                records.append(parse(line))
    return records


def is_log(records):
    """Return whether these are the records of one run; older versions did not write settings."""
    return bool(records) and (type(records[0].get("settings")) is dict or "tokens" in records[0])


def read_results(path):
    """Return {where it was found: a finished run, as a line of a results file}."""
    if not path.exists():
        die(f"{path} does not exist: --results takes a folder of runs or a file from `collect`")
    lines = {}
    for file in sorted(path.rglob("log.jsonl")) if path.is_dir() else [path]:
        records = read_records(file)
        if not is_log(records):
            lines |= {f"{file}, line {i}": record for i, record in enumerate(records, start=1)}
        elif "done" in records[-1]:
            with reading(f"the run in {file.parent}"):
                lines[file.parent] = summarize(records, file.with_name("eval.json"))
    return lines


def summarize(records, scores):
    """Return a finished run as a line: its settings, its losses, its scores if there are any."""
    settings = records[0]["settings"]
    line = {name: settings[name] for name in GRID}
    line["settings"] = to_flags(settings)
    line["overfit"] = records[-1]["overfit"]
    validations = [record for record in records if "val_ar" in record]
    for column in ("val_ar", "val_md"):
        line[column] = validations[-1][column]
        line[f"{column}_best"] = min(record[column] for record in validations)
    if scores.exists():
        line |= read_scores(scores)
    names = ("tokens", "val_ar", "val_md")
    line["curve"] = [[round(record[name], 4) for name in names] for record in validations]
    return line


def to_flags(settings):
    """Return the settings that tell runs apart, as flags, leaving out defaults."""
    defaults = vars(Settings())
    flags = []
    for name, value in settings.items():
        if name not in IGNORED and value != defaults.get(name):
            flags.append(f"--{name}={value}")
    return " ".join(flags)


def read_scores(path):
    """Return everything that eval.py measured, and nothing else, as columns."""
    results = parse(path.read_text(encoding="utf-8"))
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
    """Return accuracy and log-likelihood as columns; a single question has no error."""
    columns = {f"acc_{name}": 100 * result["accuracy"], f"logp_{name}": result["nats_per_token"]}
    if result["stderr"] is not None:
        columns[f"acc_{name}_se"] = 100 * result["stderr"]
        columns[f"logp_{name}_se"] = result["nats_per_token_stderr"]
    return columns


def read_runs(path):
    """Return the runs in a folder or a file; if a run is there twice, the last one counts."""
    runs = {}
    for number, (where, line) in enumerate(read_results(path).items(), start=1):
        with reading(where):
            run = Run(
                repetitions=float(line.pop("repetitions")),
                alpha=parse_alpha(str(line.pop("alpha"))),  # "7/8" or 0.875
                seed=int(line.pop("seed", -number)),  # without seeds, every line is a separate run
                settings=str(line.pop("settings", "")),
                overfit=bool(line.pop("overfit", False)),
                curve=np.array(line.pop("curve", []), dtype=float).reshape(-1, 3),
                columns={name: float(x) for name, x in line.items() if type(x) in (int, float)},
            )
        if not (0 < run.repetitions < np.inf and 0 <= run.alpha <= 1):
            die(f"{where}: repetitions must be above 0, and alpha from 0 to 1")
        runs[run.settings, run.repetitions, run.alpha, run.seed] = run
    return list(runs.values())


def select_runs(args):
    """Return the runs and the columns that the command line asks for."""
    runs = read_runs(args.results)
    chosen = {"repetitions": args.repetitions, "alpha": args.alphas, "seed": args.seeds}
    for field, values in chosen.items():
        runs = [run for run in runs if not values or getattr(run, field) in values]
    if not runs:
        die(f"{args.results} has no such runs, or they are not finished")

    measured = sorted({column for run in runs for column in run.columns})
    columns = args.target or [column for column in TITLES if column in measured]
    if not columns:
        die(f"choose what to show with --target: {', '.join(measured)}")
    for column in columns:
        if column not in measured:
            die(f"{args.results} has no column '{column}'{suggest(column, measured)}")
    return runs, columns


def check_alike(runs, results):
    """Refuse to fit or draw runs together if they differ in more than R, alpha and seed."""
    flags = [set(run.settings.split()) for run in runs]
    differing = set.union(*flags) - set.intersection(*flags)
    if len(group_by(runs, "repetitions", "settings")) == len(group_by(runs, "repetitions")):
        # With max_steps = 0, the number of steps follows from R.
        differing = {flag for flag in differing if not flag.startswith("--max_steps=")}
    if differing:
        names = " ".join(sorted(differing))
        die(f"{results} has runs with and without {names}: only R, alpha and seed may differ")


def print_lines(args):
    """Print the finished runs as lines of a results file."""
    for line in read_results(args.results).values():
        print(json.dumps(line))


def group_by(runs, *fields):
    """Return {values of these fields: the runs that have them}, sorted."""
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(getattr(run, field) for field in fields)].append(run)
    return dict(sorted(groups.items()))


# ---- table: means over seeds, differences between alphas -----------------------------------------
def print_table(args):
    """Print markdown: the mean of each cell over its seeds, and each alpha against another."""
    runs, columns = select_runs(args)
    for (settings,), group in group_by(runs, "settings").items():
        cells = group_by(group, "repetitions", "alpha")
        print(f"\n{settings}\n\nMean over seeds ± standard deviation:\n")
        print_rows(cells, columns)
        measured = {alpha for _, alpha in cells}
        for alpha in args.against:
            if alpha in measured:
                print(f"\nDifference from alpha = {alpha}, paired by seed, ± standard error:\n")
                print_rows(cells, columns, alpha)


def print_rows(cells, columns, against=None):
    """Print a row for each cell; with `against`, its differences from that alpha."""
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
            print(f"| {R:.4g} | {alpha} | {n_seeds} |", " | ".join(texts), "|")


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
    """Print the best alpha of the fitted surface for each R, and a 90% interval for it."""
    runs, columns = select_runs(args)
    check_alike(runs, args.results)
    Rs = sorted({run.repetitions for run in runs})
    for column in columns:
        surface = fit_surface(runs, column, np.log2(Rs))
        print(f"{column}: R^2 {surface.r2:.4f}")
        if len(surface.shifts) > 1:
            shifts = [f"seed {seed} {shift:+.3f}" for seed, shift in surface.shifts.items()]
            print(f"   differences between seeds, removed: {', '.join(shifts)}")
        print("   R   alpha      90%      alpha*R  paper's rule")
        for R, best, probability in zip(Rs, alpha_at(surface.optimum), surface.best):
            quantiles = np.searchsorted(np.cumsum(probability), [0.05, 0.95])
            low, high = alpha_at(surface.log_odds[quantiles])
            rule = papers_rule(R)
            print(f"{R:4.4g}   {best:.3f}  {low:.3f}-{high:.3f} {R * best:8.1f}   {rule:.3f}")


def fit_surface(runs, column, log_R, n_alphas=129, n_samples=5000):
    """Fit a column over (log2 R, log-odds of alpha), standardized; return it at these log2 R."""
    runs = [run for run in runs if column in run.columns]
    if re.match(r"val_md|logp_(\w+_)?(pll|chain|mc)", column):
        # AR alone has never seen a mask: in nats it is off the scale and would bend the surface.
        runs = [run for run in runs if run.alpha < 1]
    n_alphas_run = len({run.alpha for run in runs})
    if len(runs) < 5 or n_alphas_run < 2:
        die(f"a fit of '{column}' needs 5 runs and 2 alphas; got {len(runs)} and {n_alphas_run}")

    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    # A constant times an anisotropic Matern kernel, plus the noise of single runs.
    kernel = kernels.ConstantKernel() * kernels.Matern([1, 1], (0.2, 100), nu=1.5)
    kernel += kernels.WhiteKernel(0.1, (1e-5, 1))
    gp = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=8, random_state=0)

    shifts = seed_shifts(runs, column)
    values = np.array([run.columns[column] - shifts.get(run.seed, 0.0) for run in runs])
    places = np.array([(np.log2(run.repetitions), log_odds(run.alpha)) for run in runs])
    center = places.mean(axis=0)
    scale = places.std(axis=0) + 1e-9
    standardized = (places - center) / scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of parameters that end at their bounds
        gp.fit(standardized, values)
    r2 = gp.score(standardized, values)
    noise = np.std(values - gp.predict(standardized))
    gp.kernel_ = gp.kernel_.k1  # from here on the surface itself, without the noise of a run

    heights = np.linspace(places[:, 1].min(), places[:, 1].max(), n_alphas)
    find_best = np.argmin if is_loss(column) else np.argmax
    mean, best = [], []
    for x in log_R:
        points = np.stack((np.full(n_alphas, x), heights), axis=1)
        points = (points - center) / scale
        samples = gp.sample_y(points, n_samples)  # (alphas, samples): each is a curve over alpha
        mean.append(gp.predict(points))
        best.append(np.bincount(find_best(samples, axis=0), minlength=n_alphas) / n_samples)
    optimum = heights[find_best(mean, axis=1)]
    return Surface(r2, noise, shifts, heights, np.array(mean), optimum, np.array(best))


def seed_shifts(runs, column):
    """Return {seed: how far it lies above the reference, the seed that has the most runs}.

    This is the median difference over the cells that both have; a mean would follow the few runs
    that overfit, or that never trained this objective. A seed without such cells is not shifted,
    nor is a paired difference, in which the text cancels.
    """
    cells_of = defaultdict(dict)
    for run in runs:
        if run.seed >= 0 and "_minus_" not in column:
            cells_of[run.seed][run.repetitions, run.alpha] = run.columns[column]
    reference = max(cells_of.values(), key=len, default={})
    shifts = {}
    for seed, cells in sorted(cells_of.items()):
        differences = [cells[cell] - reference[cell] for cell in cells if cell in reference]
        if differences:
            shifts[seed] = np.median(differences)
    return shifts


# ---- plot: losses over training ------------------------------------------------------------------
def draw_figures(args):
    """Draw the maps and the curves of a results file, or the curves of one run's log."""
    is_folder = args.results.is_dir()
    folder = args.out or (args.results if is_folder else args.results.parent)
    log = args.results / "log.jsonl" if is_folder else args.results
    records = read_records(log) if log.exists() else []
    if is_log(records):
        unit = unit_of(to_flags(records[0].get("settings", {})))
        title = log.resolve().parent.name
        save_page(draw_lines(title, lines_of_log(records), unit), folder / "curves.png")
        return

    runs, columns = select_runs(args)
    check_alike(runs, args.results)
    unit = unit_of(runs[0].settings)
    for (R,), group in group_by(runs, "repetitions").items():
        lines = lines_of_runs(group)
        if lines:
            page = draw_lines(f"repetitions R = {R:.4g}", lines, unit)
            save_page(page, folder / f"curves_R{R:.4g}.png")
    if len({run.repetitions for run in runs}) > 1:
        save_page(draw_maps(runs, columns, unit), folder / "map.png")


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
    records = [record for record in records if record.get("step", 0) > 0]
    lines = []
    for objective, alpha in (("ar", 1), ("md", 0)):
        color = color_of(alpha)
        for kind, label, style in (("train", "training", ":"), ("val", "held-out", "-")):
            column = f"{kind}_{objective}"
            curve = [(record["tokens"], record[column]) for record in records if column in record]
            if curve:
                lines.append(Line(objective, label, color, style, True, [np.array(curve)]))
    return lines


def lines_of_runs(runs):
    """Return the held-out losses of each alpha."""
    lines = []
    for (alpha,), group in group_by(runs, "alpha").items():
        label = {0: "MD alone", 1: "AR alone"}.get(alpha, f"α = {alpha}")
        # leave out the first validation, before any training
        curves = [run.curve[1:] for run in group if len(run.curve) > 1]
        for objective, share, index in (("ar", alpha, 1), ("md", 1 - alpha, 2)):
            losses = [curve[:, [0, index]] for curve in curves]
            if losses:
                lines.append(Line(objective, label, color_of(alpha), "-", share > 0, losses))
    return lines


def draw_lines(title, lines, unit):
    """Draw losses over training, one panel for each objective, every line named at its end."""
    from matplotlib.figure import Figure

    page = Figure((8, 3.6), layout="constrained")
    page.suptitle(title)
    for objective, ax in zip(("ar", "md"), page.subplots(1, 2)):
        ends = []
        low, high = np.inf, -np.inf
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
                if line.is_trained:
                    low = min(low, curve[:, 1].min())
                    settled = curve[length // 8 :, 1]  # the first descent may leave the panel
                    high = max(high, settled.max())
        ax.set(xlabel=f"million {unit}s", title=f"{objective.upper()} loss, nats per {unit}")
        ax.spines[["top", "right"]].set_visible(False)
        if low < high:
            ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        label_ends(ax, ends)
    return page


def label_ends(ax, ends):
    """Write labels to the right of the panel: at the ends of their lines, or above other labels.

    A line that ends above the panel is named at the top, with the loss at which it ends.
    """
    low, high = ax.get_ylim()
    height = -1
    for tokens, loss, line in sorted(ends, key=lambda end: end[1]):
        height = max(min((loss - low) / (high - low), 1), height + 0.065)
        if loss > high:
            text = ax.text(1.02, height, f"↑ {line.label}: {loss:.1f}", transform=ax.transAxes)
        else:
            style = {"arrowstyle": "-", "color": line.color, "lw": 0.6, "relpos": (0, 0.5)}
            text = ax.annotate(line.label, (tokens / 1e6, loss), (1.08, height), arrowprops=style)
            text.set_anncoords("axes fraction")
        text.set(color=line.color, va="center")


# ---- plot: maps over R and alpha -----------------------------------------------------------------
def draw_maps(runs, columns, unit):
    """Draw columns over R and alpha, at most three in a row, as in the paper's Figures 4 and 5."""
    from matplotlib.figure import Figure

    cells = group_by(runs, "repetitions", "alpha")
    Rs = sorted({R for R, _ in cells})
    alphas = sorted({alpha for _, alpha in cells})
    log_R = np.linspace(np.log2(Rs[0]), np.log2(Rs[-1]), num=33)

    n_bands = -(-len(columns) // 3)
    width = -(-len(columns) // n_bands)
    page = Figure((3.8 * width, 5.6 * n_bands + 0.4), layout="constrained")
    panels = page.subplots(2 * n_bands, width, squeeze=False)
    for ax in panels.flat:
        ax.set_axis_off()
    for i, column in enumerate(columns):
        band, place = divmod(i, width)
        upper, lower = panels[2 * band : 2 * band + 2, place]
        surface = fit_surface(runs, column, log_R)
        draw_mean(upper, column, log_R, surface, unit)
        if "_minus_" not in column:
            draw_best(lower, log_R, surface)
    for ax in panels.flat:
        if ax.collections:
            ax.set_axis_on()
            ax.set_xticks(np.log2(Rs), [f"{R:.4g}" for R in Rs])
            ax.set_yticks([log_odds(alpha) for alpha in alphas], alphas)
            ax.set(xlabel="repetitions R", ylabel="α", ylim=log_odds([alphas[0], alphas[-1]]))
            mark_cells(ax, cells)
    lines = {line.get_label(): line for ax in panels.flat for line in ax.lines}
    n_columns = min(2 * width, 4)
    page.legend(handles=lines.values(), loc="outside lower center", ncols=n_columns, frameon=False)
    return page


def draw_mean(ax, column, log_R, surface, unit):
    """Draw the fitted surface; bright is good; in a difference, red is positive."""
    from matplotlib.ticker import MaxNLocator

    mean = surface.mean
    if "_minus_" in column:
        high = max(2 * surface.noise, abs(mean).max())  # pale where it is less than the noise
        low = -high
        colors, beyond = "RdBu_r", "neither"
    elif is_loss(column):
        low, high = mean.min(), np.quantile(mean, 0.9)  # the worst tenth shares a color
        colors, beyond = "viridis_r", "max"
    else:
        low, high = np.quantile(mean, 0.1), mean.max()
        colors, beyond = "viridis", "min"
    levels = MaxNLocator(12).tick_values(low, high)
    grid = (log_R, surface.log_odds, mean.T)
    filled = ax.contourf(*grid, levels, cmap=colors, extend=beyond)
    ax.figure.colorbar(filled, ax=ax)
    # A single count of masks, such as pll6, has the title of pll.
    title = TITLES.get(column) or TITLES.get(column.rstrip("123456"), column)
    if column.startswith(("val_", "logp_")):
        title += f", nats per {unit}"
    ax.set_title(title, fontsize=11)


def draw_best(ax, log_R, surface):
    """Draw where the best alpha lies for each R; darker is likelier."""
    density = surface.best / surface.best.max(axis=1, keepdims=True)
    ax.contourf(log_R, surface.log_odds, density.T, np.linspace(0.05, 1, 11), cmap="Purples")
    ax.plot(log_R, surface.optimum, "C1-", lw=1.5, label="best α of the fit")
    rule = log_odds(papers_rule(2**log_R))
    ax.plot(log_R, rule, "k--", lw=1.2, label="α = min(63/64, 16/R)")
    ax.set_title("where the best α lies", fontsize=11)


def mark_cells(ax, cells):
    """Mark where there are runs, and where at least half of the seeds overfit."""
    places = {"runs": [], "overfitted": []}
    for (R, alpha), cell in cells.items():
        overfits = np.mean([run.overfit for run in cell]) >= 0.5
        places["overfitted" if overfits else "runs"].append((np.log2(R), log_odds(alpha)))
    for (label, points), marker in zip(places.items(), ("ko", "kx")):
        if points:
            ax.plot(*zip(*points), marker, mfc="none", ms=4, clip_on=False, label=label)


# ---- the command line ----------------------------------------------------------------------------
def list_of(kind):
    """Return a function that reads comma-separated values of this kind."""

    def read(text):
        try:
            return [kind(part) for part in text.split(",")]
        except (ValueError, ZeroDivisionError) as error:
            die(f"'{text}' should be comma-separated numbers: {error}")

    return read


def main():
    commands = {"run": run_grid, "table": print_table, "fit": print_fit}
    commands |= {"plot": draw_figures, "collect": print_lines}
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("command", choices=commands)
    add("--results", type=Path, default="out/sweep", help="folder of runs, or file (out/sweep)")
    add("--repetitions", type=list_of(int), help="such as 4,16,64")
    add("--alphas", type=list_of(Fraction), help="such as 0,1/2,63/64,1")
    add("--seeds", type=list_of(int), help="such as 1,2,3 (run: 1)")
    add("--config", help="run: config file for all runs")
    add("--jobs", type=int, default=1, help="run: how many at the same time (1)")
    add("--eval", type=shlex.split, default=[], help='run: flags for eval.py: --eval="--limit 8"')
    add("--target", type=list_of(str), help="columns to show, such as val_ar,acc_pll")
    add("--against", type=list_of(Fraction), default=[1], help="table: alphas to compare with (1)")
    add("--out", type=Path, help="plot: folder for the figures (next to the results)")

    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.train_flags = sys.argv[end + 1 :]
    commands[args.command](args)


if __name__ == "__main__":
    main()
