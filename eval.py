"""
Score a checkpoint, zero-shot, on the paper's nine tasks and on held-out text.

    python eval.py --ckpt out/run                       # ar, prefix, pll with 1 and with 6 masks
    python eval.py --ckpt out/run --tasks arc_easy,piqa --limit 100 --json result.json
    python eval.py --ckpt out/run --pll 1,2,3,4,5,6     # also the paper's table of combinations
    python eval.py --dump strings.jsonl                 # every string as rendered; no model needed
    torchrun --nproc_per_node=8 eval.py --ckpt out/run  # the same numbers, sooner

A mode is a way to compute log p(completion | context). All modes use the same weights:

    ar      causal attention
    prefix  a bidirectional context, then a causal completion
    pll     pseudo log-likelihood: bidirectional; mask each token in turn, and the n - 1 after it
    chain   the same, but all later tokens are masked too: a likelihood, by the chain rule
    mc      Monte Carlo estimate of the masked-diffusion bound on log p

The tasks are the folders in --data or, if there are none, `heldout`: find the true continuation of
a held-out passage among four. The same command resumes an interrupted evaluation,
task by task, from eval-HASH.json beside the checkpoint.
"""

import hashlib
import itertools
import json
import re
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from errors import die, report, suggest, write_atomically

if __name__ == "__main__":
    sys.excepthook = report  # before the large imports, to report a missing package in one line too
    sys.stdout.reconfigure(errors="replace")  # some terminals cannot print ±

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.random import default_rng
from tqdm import tqdm

from checkpoint import check_tokenizer, find_checkpoint, load_model
from configurator import make_parser
from data import fingerprint, open_corpus
from device import join_ranks, sum_over_ranks
from model import make_mask
from tasks import TASKS, Document, Task, read_task

ALL_TASKS = TASKS | {"heldout": Task("raw", chance=1 / 4, n_documents=1000)}
MODES = ["ar", "prefix", "pll", "chain", "mc"]
UNCONDITIONAL = "Answer:"  # the context of PMI's second term

MAX_TOKENS = {"cpu": 2**9, "cuda": 2**14}  # tokens in a batch
MAX_PADDING = 0.05  # share of a row that may be padding
MAX_BRANCHES = 8  # completions in one Row; thousands may share a context, as in BLiMP
MAX_LOGITS = 2**11  # predictions whose logits exist at once
CHUNK = 512  # items whose rows are planned together, to bound the memory


class Item(NamedTuple):
    """One number to find: log p(completion | context). The context begins with <s>."""

    context: tuple[int, ...]
    completion: tuple[int, ...]


class Question(NamedTuple):
    """A document, and an item for each of its completions."""

    document: Document
    given: list[Item]  # given the document's context
    unconditional: list[Item]  # given "Answer:" instead, for PMI
    is_cut: bool = False  # whether the context has lost its beginning


class Row(NamedTuple):
    """One input to the model: a trunk, and branches that continue it, blind to one another."""

    trunk: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...]
    prefix: int  # how many leading tokens are seen from everywhere: see make_mask


class Read(NamedTuple):
    """Add weight * log p(target) to the item's score. The state at `place` predicts the target."""

    place: int
    target: int
    item: Item
    weight: float = 1.0


# ---- documents become questions ------------------------------------------------------------------
def make_questions(task, documents, trained):
    """Return a question for each document of a task."""
    questions = []
    for document in documents:
        given, is_cut = encode_items(document.context, document.completions, trained)
        unconditional = []
        if task.norm == "pmi":
            unconditional, _ = encode_items(UNCONDITIONAL, document.completions, trained)
        questions.append(Question(document, given, unconditional, is_cut))
    return questions


def encode_items(context, completions, trained):
    """Return an item for each completion of a context, and whether the context was cut.

    Context and completion are encoded together, as one text, and split where the context alone
    ends. Where they exceed the training window, the context loses its beginning; a completion
    is never cut.
    """
    texts = [context, *(context + completion for completion in completions)]
    encodings = trained.tokenizer.encode_batch(texts, add_special_tokens=False)
    alone, *joint = [encoding.ids for encoding in encodings]
    border = len(alone)
    for ids in joint:
        if ids[:border] != alone or len(ids) == border:
            die(
                f"after {context!r} this tokenizer merges context and completion into one token, "
                "or gives the completion no token: choose other --tasks"
            )

    excess = 1 + max(len(ids) for ids in joint) - trained.settings.seq_len  # 1 is for <s>
    start = min(max(excess, 0), border)
    kept = (trained.special.bos, *alone[start:])
    return [Item(kept, tuple(ids[border:])) for ids in joint], start > 0


def open_heldout(trained):
    """Return the held-out tokens of a model's data, and where their documents start."""
    s = trained.settings
    is_imported = "data" not in trained.checkpoint
    if is_imported and not Path(s.data_dir).exists():
        die("an imported model has no held-out text: get the tasks with python prepare.py --tasks")
    corpus = open_corpus(s.data_dir)
    check_tokenizer(trained.checkpoint, corpus)
    if not is_imported and trained.checkpoint["data"] != corpus.files:
        die(f"{s.data_dir} is not what this checkpoint was trained on: choose other --tasks")
    return corpus.val


def heldout_questions(trained, n_questions, n_context=0, n_completion=0, stride=0):
    """Return questions about held-out passages: the true continuation against three others.

    The others continue other passages, and all have n_completion tokens. The order of the passages
    is fixed: models that were trained on the same data get the same questions. Passages do not
    overlap, unless the stride from one to the next is shorter than they are.
    """
    s = trained.settings
    tokens, starts = open_heldout(trained)
    n_completion = n_completion or max(1, min(32, s.seq_len // 4))
    n_context = n_context or 2 * n_completion
    length = n_context + n_completion

    places = []  # where passages start
    for start, end in itertools.pairwise(starts.tolist()):
        # A document's first token is <s>.
        places += range(start + 1, end - length + 1, stride or length)
    if len(places) < 4 or length >= s.seq_len:
        die(
            f"{s.data_dir} has {len(places)} held-out passages of {length} tokens, and the window "
            f"of this model has {s.seq_len}: shorten --context {n_context} or "
            f"--completion {n_completion}, or choose other --tasks"
        )
    places = default_rng(0).permutation(places)

    def passage(number):
        start = places[number % len(places)]
        return tuple(tokens[start : start + length].tolist())

    questions = []
    for number in range(min(n_questions, len(places))):
        context = passage(number)[:n_context]
        completions = [passage(number + i)[n_context:] for i in range(4)]
        gold = number % 4
        completions.insert(gold, completions.pop(0))
        text = trained.tokenizer.decode(context)
        texts = trained.tokenizer.decode_batch(completions)
        items = [Item((trained.special.bos, *context), completion) for completion in completions]
        questions.append(Question(Document(None, number, text, texts, gold), items, []))
    return questions


# ---- modes: items become rows, each with what is to be read from it ------------------------------
def make_modes(asked, mask_counts, n_draws, mask):
    """Return {name: function}. A function yields rows and their reads, given sorted items."""
    modes = {
        "ar": partial(causal_rows, bidirectional_context=False),
        "prefix": partial(causal_rows, bidirectional_context=True),
        **{f"pll{n}": partial(pll_rows, n_masks=n, mask=mask) for n in mask_counts},
        "chain": partial(pll_rows, n_masks=sys.maxsize, mask=mask),
        "mc": partial(mc_rows, n_draws=n_draws, mask=mask),
    }
    return {name: modes[name] for name in modes if name.rstrip("0123456789") in asked}


def group_by_context(items):
    """Yield lists of items that share a context, at most MAX_BRANCHES in each."""
    for _, group in itertools.groupby(items, key=lambda item: item.context):
        group = list(group)
        for first in range(0, len(group), MAX_BRANCHES):
            yield group[first : first + MAX_BRANCHES]


def causal_rows(items, bidirectional_context):
    """Eq. 2: log p(w | c) = sum_i log p(w_i | c, w_<i). Completions of one context share a row."""
    for group in group_by_context(items):
        c = group[0].context
        branches = tuple(item.completion[:-1] for item in group)  # the last token predicts nothing
        reads = []
        start = len(c)  # where the next branch starts
        for item, branch in zip(group, branches):
            # The context predicts the first token, and each token in the branch predicts the next.
            places = [len(c) - 1, *range(start, start + len(branch))]
            reads += [Read(place, target, item) for place, target in zip(places, item.completion)]
            start += len(branch)
        # A lone <s> is the same in both directions: then ar and prefix share their row.
        prefix = len(c) if bidirectional_context and len(c) > 1 else 0
        yield Row(c, branches, prefix), reads


def pll_rows(items, n_masks, mask):
    """Pseudo log-likelihood: sum_i log p(w_i | c, w_<i, n masks, w_>=i+n), a row for each i."""
    for item in items:
        c, w = item
        for i in range(len(w)):
            n = min(n_masks, len(w) - i)
            tokens = c + w[:i] + (mask,) * n + w[i + n :]
            yield Row(tokens, (), len(tokens)), [Read(len(c) + i - 1, w[i], item)]


def mc_rows(items, n_draws, mask):
    """Minus Eq. 4, by Monte Carlo: int_0^1 E[1/t * sum of log p(w_i) over the masked i] dt.

    As in training (see md_example), this is the mean of L/k * sum of log p over k masked tokens out
    of L, where k is uniform on 1..L. The draws of k lie on one jittered grid.
    """
    for item in items:
        c, w = item
        L = len(w)
        generator = default_rng(w)  # the same masks in both contexts of PMI
        for u in (np.arange(n_draws) + generator.random()) / n_draws:
            k = min(1 + int(u * L), L)
            wt = list(w)
            reads = []
            for i in generator.permutation(L)[:k].tolist():
                wt[i] = mask
                reads.append(Read(len(c) + i - 1, w[i], item, weight=L / k / n_draws))
            yield Row(c + tuple(wt), (), len(c) + L), reads


# ---- computing -----------------------------------------------------------------------------------
def distinct_items(questions):
    """Return the distinct items of all questions, sorted by length, equal contexts side by side."""
    items = set()
    for question in questions:
        items.update(question.given, question.unconditional)
    return sorted(items, key=lambda x: (len(x.context), x.context, len(x.completion), x.completion))


def score(model, items, modes, rank=0, world=1):
    """Return {mode: log-likelihood of each item}.

    Equal rows are computed once, whichever items and modes they belong to. Sums are integers in
    units of 2^-32 nats: they are exact, hence the same on any number of ranks.
    """
    max_tokens = MAX_TOKENS.get(model.embed.weight.device.type, MAX_TOKENS["cpu"])
    totals = {mode: dict.fromkeys(items, 0) for mode in modes}
    quiet = True if rank > 0 else None  # None: quiet without a terminal
    for first in tqdm(range(0, len(items), CHUNK), disable=quiet):
        wanted = defaultdict(list)  # {row: [(mode, read), ...]}
        for mode, make_rows in modes.items():
            for row, reads in make_rows(items[first : first + CHUNK]):
                wanted[row] += [(mode, read) for read in reads]

        # Chunks start with different ranks, so that all ranks get about the same number of batches.
        for number, rows in enumerate(make_batches(wanted, max_tokens), start=first // CHUNK):
            if number % world == rank:
                add_log_probabilities(totals, model, rows, wanted)

    table = torch.tensor([list(totals[mode].values()) for mode in modes])
    nats = sum_over_ranks(table).double() / 2**32
    return dict(zip(modes, nats.tolist()))


def length(row):
    """Return the number of tokens in a row."""
    return len(row.trunk) + sum(len(branch) for branch in row.branches)


def make_batches(rows, max_tokens):
    """Yield lists of rows that have almost the same length, the longest first."""
    batch = []
    for row in sorted(rows, key=length, reverse=True):
        longest = length(batch[0]) if batch else length(row)
        is_full = (len(batch) + 1) * longest > max_tokens
        is_short = length(row) < (1 - MAX_PADDING) * longest
        if batch and (is_full or is_short):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def add_log_probabilities(totals, model, rows, wanted):
    """Run the model on a batch of rows, and add what is read from them to totals[mode][item]."""
    uses, places, targets = [], [], []
    for b, row in enumerate(rows):
        for mode, read in wanted[row]:
            uses.append((mode, read))
            places.append((b, read.place))
            targets.append(read.target)

    device = model.embed.weight.device
    tokens, segments, positions, prefix = [tensor.to(device) for tensor in pad_batch(rows)]
    mask = None  # every position sees every other, as in most batches of pll: faster than a mask
    if any(row.prefix < tokens.shape[1] for row in rows):
        # It is dense, because FlexAttention would be compiled anew for each batch shape.
        mask = make_mask(segments, positions, prefix)
    h = model.hidden(tokens, mask, positions)
    row_index, place = torch.tensor(places, device=device).T
    states = h[row_index, place]
    targets = torch.tensor(targets, device=device)
    losses = []
    for x, target in zip(states.split(MAX_LOGITS), targets.split(MAX_LOGITS)):
        losses.append(F.cross_entropy(model.head(x).float(), target, reduction="none"))
    losses = torch.cat(losses).cpu()  # the only wait for the GPU
    if not losses.isfinite().all():
        die("this model's predictions are not finite: its training has diverged")
    for (mode, read), loss in zip(uses, losses.tolist()):
        totals[mode][read.item] += round(-loss * read.weight * 2**32)


def pad_batch(rows):
    """Return tokens, segments, positions, all (B, T), and prefix (B,), as make_mask takes them.

    The trunk is segment 0, which all others see. Each branch is a segment of its own, with
    positions that follow the trunk's. Padding is a segment too, -1, which nothing else sees.
    """
    shape = len(rows), length(rows[0])
    tokens = np.zeros(shape, dtype=np.int64)  # numpy: torch is slow at many small assignments
    segments = np.full(shape, -1)
    positions = np.zeros(shape, dtype=np.int64)
    for b, row in enumerate(rows):
        end = 0
        for segment, part in enumerate((row.trunk, *row.branches)):
            start, end = end, end + len(part)
            position = len(row.trunk) if segment > 0 else 0
            tokens[b, start:end] = part
            segments[b, start:end] = segment
            positions[b, start:end] = np.arange(position, position + len(part))
    prefix = np.array([row.prefix for row in rows])
    return [torch.from_numpy(array) for array in (tokens, segments, positions, prefix)]


# ---- judging -------------------------------------------------------------------------------------
def choice_scores(task, question, log_p):
    """Return the score of each choice; the highest one is the model's answer."""
    scores = np.array([log_p[item] for item in question.given])
    if task.norm == "char":
        scores /= [len(completion) for completion in question.document.completions]
    elif task.norm == "pmi":  # log of p(w | c) / p(w | "Answer:")
        scores -= [log_p[item] for item in question.unconditional]
    return scores


def judge(task, questions, log_p):
    """Return the points of each question, and the nats per token of its right completion.

    A right answer is worth 1 point, or 1/m if m choices share the highest score. (If the first of
    them won, a model that scores all sentences the same would solve BLiMP.)
    """
    points, nats = [], []
    for question in questions:
        gold = question.document.gold
        scores = choice_scores(task, question, log_p)
        best = np.flatnonzero(scores == scores.max())
        points.append(1 / len(best) if gold in best else 0.0)
        item = question.given[gold]
        nats.append(log_p[item] / len(item.completion))
    return np.array(points), np.array(nats)


def group_by_subtask(values, questions):
    """Return {subtask: its values}."""
    groups = defaultdict(list)
    for value, question in zip(values.tolist(), questions):
        groups[question.document.subtask].append(value)
    return groups


def mean_and_error(values, questions):
    """Return the mean over subtasks, which all have the same weight, and its standard error.

    The error uses the unbiased variance. It is None if any subtask has only one question.
    """
    groups = group_by_subtask(values, questions).values()
    mean = np.mean([np.mean(group) for group in groups])
    if min(len(group) for group in groups) == 1:
        return float(mean), None
    variances = [np.var(group, ddof=1) / len(group) for group in groups]
    return float(mean), float(sum(variances) ** 0.5 / len(groups))


def summarize(points, nats, questions):
    """Return the means and errors of what judge returns, or of differences between two modes."""
    result = {}
    result["accuracy"], result["stderr"] = mean_and_error(points, questions)
    result["nats_per_token"], result["nats_per_token_stderr"] = mean_and_error(nats, questions)
    return result


def evaluate_task(task, questions, log_p):
    """Return the results of a task, {mode: {name: value}}, given {mode: {item: log p}}.

    If ar is among the modes, the others are also compared with it, question by question, so that
    the errors of these differences are much smaller than those of the two means.
    """
    results = {}
    for mode in log_p:
        points, nats = judge(task, questions, log_p[mode])
        result = summarize(points, nats, questions)
        result["normalized"] = (result["accuracy"] - task.chance) / (1 - task.chance)
        result["n"] = len(questions)
        result["ties"] = sum(0 < point < 1 for point in points.tolist())
        if task.n_files > 1:
            groups = group_by_subtask(points, questions)
            result["subtasks"] = {name: float(np.mean(group)) for name, group in groups.items()}
        if mode == "ar":
            ar_points, ar_nats = points, nats
        elif "ar" in log_p:
            result["minus_ar"] = summarize(points - ar_points, nats - ar_nats, questions)
        results[mode] = result
    return results


def best_pll(results, mask_counts):
    """Return the result with the best number of masks for a task, chosen as in the paper."""
    modes = [f"pll{n}" for n in mask_counts]
    best = max(modes, key=lambda mode: results[mode]["accuracy"])
    return {**results[best], "best": best}


def average(results, *modes):
    """Return the mean normalized score over the paper's tasks, each with the best of these modes.

    heldout counts only if it is the only task.
    """
    names = [name for name in results if name in TASKS] or ["heldout"]
    best = [max(results[name][mode]["normalized"] for mode in modes) for name in names]
    return float(np.mean(best))


def combine_pll(results, mask_counts):
    """Return {"1-n": average} for the better of 1 and n masks, as in the paper's appendix."""
    return {f"1-{n}": average(results, "pll1", f"pll{n}") for n in mask_counts[1:]}


# ---- output --------------------------------------------------------------------------------------
def with_error(value, error, scale=1, digits=1):
    """Format a number, and its standard error if it has one."""
    text = f"{scale * value:.{digits}f}"
    if error is not None:
        text += f" ±{scale * error:.{digits}f}"
    return text


def print_table(title, rows):
    """Print {row: {column: text}}; a cell that is missing stays empty."""
    columns = list(dict.fromkeys(itertools.chain(*rows.values())))
    lines = [[title, *columns]]
    for name, row in rows.items():
        lines.append([name, *(row.get(column, "") for column in columns)])
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    print()


def print_tasks(results, averages):
    """Print accuracies, and the paper's normalized scores, in which chance is 0."""
    accuracies, scores = {}, {}
    for name, by_mode in results.items():
        accuracies[name], scores[name] = {}, {}
        for mode, result in by_mode.items():
            accuracies[name]["n"] = str(result["n"])
            accuracies[name][mode] = with_error(result["accuracy"], result["stderr"], 100)
            scores[name][mode] = f"{100 * result['normalized']:.1f}"
    if averages:
        n_tasks = len(TASKS.keys() & results.keys())
        row = {mode: f"{100 * value:.1f}" for mode, value in averages.items()}
        scores[f"average of {n_tasks}"] = row
    print_table("accuracy, %", accuracies)
    print_table("normalized, %", scores)


def print_likelihoods(results):
    """Print the log-likelihoods of heldout, and how each mode differs from ar."""
    rows = {}
    for mode, result in results.items():
        nats, error = result["nats_per_token"], result["nats_per_token_stderr"]
        rows[mode] = {"nats/token": with_error(nats, error, digits=3)}
        if "minus_ar" in result:
            minus = result["minus_ar"]
            nats, error = minus["nats_per_token"], minus["nats_per_token_stderr"]
            rows[mode]["minus ar: points"] = with_error(minus["accuracy"], minus["stderr"], 100)
            rows[mode]["minus ar: nats/token"] = with_error(nats, error, digits=4)
    print_table("heldout", rows)


def print_report(report):
    """Print the tables of a report, and what to know about them."""
    results = report["tasks"]
    print_tasks(results, report["average"])
    if "heldout" in results:
        print_likelihoods(results["heldout"])
    combinations = report["combinations"]
    if len(combinations) > 1:
        row = {name: f"{100 * value:.1f}" for name, value in combinations.items()}
        print_table("pll, better of two mask counts", {"average, normalized": row})

    modes = next(iter(results.values()))
    if "pll" in modes:
        print("pll uses the best number of masks for each task, chosen on the test score")
    for mode in modes:
        n_ties = sum(by_mode[mode]["ties"] for by_mode in results.values())
        if n_ties > 0:
            print(f"{n_ties} ties in {mode}, each worth a share of a point")
    if report["contexts_cut"] > 0:
        print(f"{report['contexts_cut']} contexts were too long and were cut at the beginning")


def dump(path, questions, log_p):
    """Write a line of JSON for each choice of each document: its strings and log-likelihoods."""
    lines = []
    for name in questions:
        for question in questions[name]:
            for choice in range(len(question.document.completions)):
                line = dump_choice(name, question, choice, log_p.get(name, {}))
                lines.append(json.dumps(line) + "\n")
    write_atomically(path, "".join(lines))


def dump_choice(name, question, choice, log_p):
    document = question.document
    line = {
        "task": name,
        "subtask": document.subtask,
        "doc": document.number,
        "choice": choice,
        "context": document.context,
        "completion": document.completions[choice],
        "uncond_context": UNCONDITIONAL if ALL_TASKS[name].norm == "pmi" else None,
        "gold": document.gold,
    }
    for mode, values in log_p.items():
        line["tokens"] = len(question.given[choice].completion)
        line[mode] = values[question.given[choice]]
        if question.unconditional:
            line[f"{mode}_uncond"] = values[question.unconditional[choice]]
    return line


# ---- the command line ----------------------------------------------------------------------------
def parse_arguments():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--ckpt", default="", help="a checkpoint, or a run directory (for its newest checkpoint)")
    add("--data", default="data/tasks", help="the folder with the tasks (data/tasks)")
    add("--tasks", default="", help=f"some of {','.join(ALL_TASKS)}")
    add("--modes", default="ar,prefix,pll", help=f"some of {','.join(MODES)} (ar,prefix,pll)")
    add("--pll", default="1,6", help="numbers of masks for mode pll (1,6)")
    add("--mc", type=int, default=0, help="add mode mc with this many draws (256 with --modes mc)")
    add("--limit", type=int, default=0, help="documents per subtask (all; 1000 for heldout)")
    add("--context", type=int, default=0, help="heldout: tokens in a context (twice a completion)")
    add("--completion", type=int, default=0, help="heldout: tokens in a completion (up to 32)")
    add("--stride", type=int, default=0, help="heldout: tokens between passage starts (length)")
    add("--json", default="", help="a file to write the results to")
    add("--dump", default="", help="a file to write every string and log-likelihood to")
    args = parser.parse_args()

    present = [name for name in TASKS if Path(args.data, name).is_dir()] or ["heldout"]
    args.tasks = split_names("task", args.tasks or ",".join(present), ALL_TASKS)
    if args.mc > 0:
        args.modes += ",mc"
    args.modes = split_names("mode", args.modes, MODES)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", args.pll):
        die("--pll takes numbers of masks, such as 1,6")
    args.pll = sorted({int(n) for n in args.pll.split(",")})
    if min(args.mc, args.limit, args.context, args.completion, args.stride) < 0:
        die("--mc, --limit, --context, --completion and --stride must be at least 0")
    args.mc = args.mc or 256
    if not args.ckpt and not args.dump:
        die("which model? Name a run or a checkpoint, as in: python eval.py --ckpt out/demo")
    if not args.ckpt and "heldout" in args.tasks:
        die("heldout needs --ckpt; the other tasks need: python prepare.py --tasks")
    if args.ckpt:
        args.ckpt = str(find_checkpoint(args.ckpt))  # once: the run may save another one meanwhile
    for path in filter(None, (args.json, args.dump)):
        check_writable(path)
    return args


def split_names(kind, text, known):
    """Return the names in a list such as "ar,pll", each once, in the order of `known`."""
    names = text.split(",")
    for name in names:
        if name not in known:
            die(f"no {kind} named '{name}'{suggest(name, list(known))}")
    return [name for name in known if name in names]


def check_writable(path):
    """Refuse an output that cannot be written: now, not after the work is done."""
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        die(f"cannot write {path}: {error}")
    if Path(path).is_dir():
        die(f"cannot write {path}: it is a folder, not a file")


# ---- the script, in three steps: questions, scores, report ---------------------------------------
def ask(name, args, trained):
    """Return the questions of a task. Without a model they have strings only."""
    if name == "heldout":
        n = args.limit or ALL_TASKS[name].n_documents
        return heldout_questions(trained, n, args.context, args.completion, args.stride)
    documents = read_task(name, args.data, args.limit)
    if trained is None:
        return [Question(document, [], []) for document in documents]
    return make_questions(TASKS[name], documents, trained)


def score_tasks(args, questions, trained, rank, world):
    """Return {task: {mode: {item: log p}}}, computing what an earlier run has not kept."""
    modes = make_modes(args.modes, args.pll, args.mc, trained.special.mask)
    file = find_saved_scores(args, questions, trained.model)
    message = [load_scores(file)]
    if world > 1:
        dist.broadcast_object_list(message)  # all ranks use what the first one found
    saved = message[0]  # {task: {mode: [log p of each item]}}
    log_p = {}
    for name in questions:
        items = distinct_items(questions[name])
        if name not in saved:
            saved[name] = score(trained.model, items, modes, rank, world)
            if rank == 0:
                keep_scores(file, saved)
        log_p[name] = {mode: dict(zip(items, saved[name][mode])) for mode in modes}
    return log_p


def find_saved_scores(args, questions, model):
    """Return the file that keeps the scores of finished tasks.

    Its name is a hash of everything that determines a score, so that no other evaluation reads it.
    """
    checkpoint = Path(args.ckpt)
    code = sorted(Path(__file__).parent.glob("*.py"))
    files = [fingerprint(file) for file in (checkpoint, *code)]
    machine = torch.__version__, model.embed.weight.device.type, model.dtype
    key = files, machine, args.tasks, args.modes, args.pll, args.mc
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8)
    for question in itertools.chain(*questions.values()):
        digest.update(repr(question).encode())
    return checkpoint.with_name(f"eval-{digest.hexdigest()}.json")


def keep_scores(file, scores):
    """Keep scores for another run, if this folder can be written to: it may not be ours."""
    content = json.dumps(scores)
    checksum = hashlib.blake2b(content.encode()).hexdigest()
    try:
        write_atomically(file, f"{checksum}\n{content}")
    except OSError as error:
        print(f"cannot save scores; this evaluation cannot be resumed: {error}", file=sys.stderr)


def load_scores(file):
    """Return the scores that an earlier run of this command has kept, or {} if there are none."""
    if not file.exists():
        return {}
    checksum, _, content = file.read_bytes().partition(b"\n")
    if checksum != hashlib.blake2b(content).hexdigest().encode():
        print(f"{file} is damaged: scoring again", file=sys.stderr)
        return {}
    return json.loads(content)


def make_report(args, step, questions, log_p):
    """Return what --json writes: the results of every task and mode, and their averages."""
    results = {}
    for name in questions:
        results[name] = evaluate_task(ALL_TASKS[name], questions[name], log_p[name])
    combinations, averages = {}, {}
    if "pll" in args.modes and len(args.pll) > 1:
        for by_mode in results.values():
            by_mode["pll"] = best_pll(by_mode, args.pll)
        if args.pll[0] == 1:
            combinations = combine_pll(results, args.pll)
    if args.tasks != ["heldout"]:
        averages = {mode: average(results, mode) for mode in results[args.tasks[0]]}
    return {
        "flags": vars(args),
        "step": step,
        "tasks": results,
        "average": averages,
        "combinations": combinations,
        "contexts_cut": sum(q.is_cut for q in itertools.chain(*questions.values())),
    }


def main():
    args = parse_arguments()
    trained = load_model(args.ckpt) if args.ckpt else None
    questions = {name: ask(name, args, trained) for name in args.tasks}
    if trained is None:
        dump(args.dump, questions, {})
        return

    rank, world = join_ranks(trained.model.embed.weight.device.type)
    log_p = score_tasks(args, questions, trained, rank, world)
    if rank > 0:
        return

    report = make_report(args, trained.checkpoint["step"], questions, log_p)
    print_report(report)
    if args.json:
        write_atomically(args.json, json.dumps(report, indent=1))
    if args.dump:
        dump(args.dump, questions, log_p)


if __name__ == "__main__":
    main()
