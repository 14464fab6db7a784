"""
Zero-shot multiple choice on the paper's nine tasks: one checkpoint, four ways to score a completion.

    python eval.py --ckpt out/run                             # ar, prefix, pll with 1 and with 6 masks
    python eval.py --ckpt out/run --tasks arc_easy,piqa --modes pll,mc --pll 1,2,3,4,5,6 --limit 100 --json result.json
    python eval.py --dump strings.jsonl                       # every string as rendered, no model needed
    torchrun --nproc_per_node=8 eval.py --ckpt out/run        # the same numbers, sooner

Tasks: the folders in --data, or, if there are none, `heldout`, made of the validation split; --limit documents of each
subtask. Modes: ar (causal), prefix (bidirectional context), pll (pseudo log-likelihood, n masks), mc (Monte Carlo, --mc
draws or 256). After an interruption the same command goes on, from eval-HASH.json beside CKPT.
"""

import collections, csv, hashlib, itertools, json, os, pathlib, re, sys

import numpy as np
import torch
from tqdm import tqdm
from configurator import die, flags, suggest
from data import default_rng, fingerprint, open_data
from model import BOS, MASK, load_model, make_mask

TOKENS, PADDING = 2**14 if torch.cuda.is_available() else 2**9, 0.03  # of a batch, at most
PACK, CHUNK = 8, 2**16  # completions in a row, rows planned at a time
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

# ---- the tasks: n documents in n_files raw release files; chance is the paper's random baseline ----------------------
Task = collections.namedtuple("Task", "score chance n n_files file labels", defaults=("",))
TASKS = {
    "arc_easy": Task("char", 1 / 4, 2376, 1, "ARC-Easy-Test.jsonl"),
    "arc_challenge": Task("pmi", 1 / 4, 1172, 1, "ARC-Challenge-Test.jsonl"),
    "blimp": Task("raw", 1 / 2, 67000, 67, "*.jsonl"),
    "commonsenseqa": Task("pmi", 1 / 5, 1221, 1, "dev_rand_split.jsonl"),
    "hellaswag": Task("char", 1 / 4, 10042, 1, "hellaswag_val.jsonl"),
    "mmlu": Task("char", 1 / 4, 14042, 57, "*_test.csv"),
    "openbookqa": Task("pmi", 1 / 4, 500, 1, "test.jsonl"),
    "piqa": Task("char", 1 / 2, 1838, 1, "valid.jsonl", "valid-labels.lst"),
    "socialiqa": Task("char", 1 / 3, 1954, 1, "dev.jsonl", "dev-labels.lst"),
    "heldout": Task("raw", 1 / 4, 200, 0, ""),
}  # at most n; not one of the nine
Document = collections.namedtuple(
    "Document", "subtask doc context completions gold tokens", defaults=(None,)
)


def render(task, r, tag):
    """A record -> context, completions, index of the right one: as OLMES has them. `tag`: the subtask or the label."""
    if task == "blimp":  # as a training document begins, right after <s>
        return "", [r["sentence_good"], r["sentence_bad"]], 0
    if task == "hellaswag":
        texts = [f"{r['activity_label']}: {r['ctx_a']} {r['ctx_b'].capitalize()}", *r["endings"]]
        texts = [
            re.sub(r"\[.*?\]", "", re.sub(r"\.? \[title\]", ". ", x.strip())).replace("  ", " ")
            for x in texts
        ]
        return texts[0], [" " + x for x in texts[1:]], int(r["label"])
    if task == "mmlu":
        text, a, b, c, d, key = r
        line = f"The following are multiple choice questions (with answers) about {tag.replace('_', ' ')}."
        return (
            f"{line}\n\nQuestion: {text.strip()}\nAnswer:",
            [" " + x for x in (a, b, c, d)],
            list("ABCD").index(key),
        )
    if task == "piqa":
        return f"Goal: {r['goal']}\nAnswer:", [" " + r["sol1"], " " + r["sol2"]], int(tag)
    if task == "socialiqa":
        context = f"Question: {r['context']} {r['question']}\nAnswer:"
        return context, [" " + r["answer" + x] for x in "ABC"], int(tag) - 1
    labels, texts = zip(
        *((x["label"], " " + x["text"]) for x in r["question"]["choices"])
    )  # 3 to 5, letters or digits
    return (
        f"Question: {r['question']['stem']}\nAnswer:",
        texts,
        labels.index(r["answerKey"].strip()),
    )


def read_task(name, folder, limit):
    """The documents of a task, the first `limit` of each file; numbered over all files: a limit renumbers none."""
    task, folder, documents, n = TASKS[name], pathlib.Path(folder, name), [], 0
    paths, again = (
        sorted(folder.glob(task.file)),
        f"remove {folder} and run: python prepare.py --tasks",
    )
    labels = (
        (folder / task.labels).read_text("utf-8", "replace").split()
        if task.labels and paths
        else []
    )
    for path in paths:
        subtask, first = path.stem.removesuffix("_test") if task.n_files > 1 else None, n
        try:
            with open(path, encoding="utf-8", newline="") as f:
                for record in csv.reader(f) if path.suffix == ".csv" else map(json.loads, f):
                    d = Document(
                        subtask, n, *render(name, record, labels[n] if task.labels else subtask)
                    )
                    if not all(map(str.strip, d.completions)) or d.gold not in range(
                        len(d.completions)
                    ):
                        raise ValueError(
                            f"an empty completion, or none right: number {d.gold} of {d.completions}"
                        )
                    documents += [d] * (not limit or n - first < limit)
                    n += 1
        except Exception as error:  # whatever a wrong record leads to
            die(
                f"{path}, record {n - first + 1} is wrong ({type(error).__name__}: {error}); if it is damaged, {again}"
            )
    if len(paths) != task.n_files or (
        len(documents) < task.n_files * min(limit, 100) if limit else n != task.n
    ):
        die(
            f"{folder}: {n:,} records in {len(paths)} files {task.file}, not {task.n:,} in {task.n_files}; {again}"
        )
    return documents


def heldout(checkpoint, tokenizer, limit):
    """Of passages of held-out documents: the true continuation against three of other passages, all of one length."""
    data, meta = open_data((s := checkpoint["settings"]).data_dir, s.vocab_size)
    (tokens, starts), K = data["val"], max(1, min(32, s.seq_len // 4))
    passages = [
        tokens[i : i + 3 * K].tolist()
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist())
        for i in range(start + 1, end - 3 * K + 1, 3 * K)
    ]
    if checkpoint.get("data", meta["files"]) != meta["files"] or len(passages) < 4:
        die(
            f"{s.data_dir} is not what this checkpoint was trained on, or too short for heldout: choose other --tasks"
        )
    passages = default_rng(0).permutation(passages).tolist()[: TASKS["heldout"].n]
    for n, passage in enumerate(passages[: limit or None]):
        c, ends = (
            passage[: 2 * K],
            [passages[(n + (i - n) % 4) % len(passages)][2 * K :] for i in range(4)],
        )
        yield Document(
            None,
            n,
            tokenizer.decode(c),
            tokenizer.decode_batch(ends),
            n % 4,
            [c, *(c + w for w in ends)],
        )


# ---- what is to be computed: items, then rows and what is read from them ---------------------------------------------
def make_items(documents, tokenizer, window, pmi, counts):
    """Items (context, completion, doc, choice): log p(completion | context) is to be found. One for each choice of each
    document and, with pmi, the same again given `Answer:`. A choice that repeats another one has its number."""
    items = []
    for d, context in [(d, d.context) for d in documents] + [
        (d, "Answer:") for d in documents
    ] * pmi:
        texts = [context + w for w in ("", *d.completions)]
        alone, *joint = d.tokens or (
            x.ids for x in tokenizer.encode_batch(texts, add_special_tokens=False)
        )
        if any(ids[: len(alone)] != alone or ids == alone for ids in joint):
            die(
                f"a token lies across the end of {context!r}, or a completion has none: choose other --tasks"
            )
        start = max(
            0, min(len(alone), max(map(len, joint)) + 1 - window)
        )  # of the context; completions stay whole
        counts["truncated"] += start > 0 and context == d.context
        items += [
            ((BOS, *alone[start:]), tuple(ids[len(alone) :]), d.doc, joint.index(ids))
            for ids in joint
        ]
    return items


# A row is (int32 (T, 3) as bytes: token, segment, position; prefix), as model.make_mask takes them. A read of it is
# (index, target, column, item, weight): scores[column, item] += weight * log p(target). A token is read at its left.
def causal_reads(items, modes):
    """log p(w | c) = sum_i log p(w_i | c, w_<i); in mode prefix the context is bidirectional. Completions of a context
    share a row: the context is segment 0, each of them, without its last token, a segment after it."""
    contexts = {}
    for i, (c, w, _, _) in enumerate(items):
        contexts.setdefault(c, {}).setdefault(w, []).append(i)
    for c, users in contexts.items():
        completions = sorted(users, key=len)
        for first in range(0, len(users), PACK):
            row, reads = [(token, 0, p) for p, token in enumerate(c)], []
            for segment, w in enumerate(completions[first : first + PACK], 1):
                places = len(c) - 1, *range(len(row), len(row) + len(w) - 1)
                reads += [(place, target, i) for place, target in zip(places, w) for i in users[w]]
                row += [(token, segment, p) for p, token in enumerate(w[:-1], len(c))]
            for mode in (mode for mode in modes if mode in ("ar", "prefix")):
                yield (
                    (np.array(row, np.int32).tobytes(), len(c) * (mode == "prefix")),
                    [(place, target, modes.index(mode), i, 1.0) for place, target, i in reads],
                )


def masked_reads(items, modes, N, task):
    """Bidirectional attention, masks in the completion: a column for each pll, N columns from that of mc on."""
    plls = [(column, int(mode[3:])) for column, mode in enumerate(modes) if mode.startswith("pll")]
    for i, (c, w, doc, choice) in enumerate(items):
        x0, L = np.array([(token, 0, p) for p, token in enumerate(c + w)], np.int32), len(w)
        # pll: sum_i log p(w_i | c, w_<i, n masks, w_>=i+n)
        patterns = [
            (range(j, min(j + n, L)), [j], column, 1.0) for column, n in plls for j in range(L)
        ]
        # mc: int_0^1 E[1/t sum of log p(w_i | c, w^t) over masked i] dt = E[L/k sum over k masked], k ~ U{1..L}, N
        # of them from one jittered grid; masks depend on (task, doc, choice): they are the same in both contexts of PMI
        generator = default_rng((1, list(TASKS).index(task), doc, choice))
        for column, u in enumerate((np.arange(N) + generator.random()) / max(N, 1), len(modes) - 1):
            masked = generator.permutation(L)[: min(1 + int(u * L), L)].tolist()
            patterns.append((masked, masked, column, L / len(masked)))
        for masked, read, column, weight in patterns:
            xt = x0.copy()
            xt[[len(c) + j for j in masked], 0] = MASK
            yield (xt.tobytes(), len(xt)), [(len(c) + j - 1, w[j], column, i, weight) for j in read]


# ---- computing it ----------------------------------------------------------------------------------------------------
@torch.inference_mode()
def read_batch(model, rows, reads, scores):
    """One forward pass, with a dense mask (too many lengths to compile one), to the end only where it is read."""
    contents = [
        torch.frombuffer(bytearray(content), dtype=torch.int32).view(-1, 3) for content, _ in rows
    ]
    x = torch.nn.utils.rnn.pad_sequence(
        contents, True, -1
    ).long()  # (B, T, 3); padding is a segment of its own
    device, T = model.embed.weight.device, x.shape[1]
    mask = make_mask(x[..., 1], x[..., 2], torch.tensor([prefix for _, prefix in rows])).to(device)
    place, target, column, item, weight = zip(
        *((b * T + index, *r) for b, rs in enumerate(reads) for index, *r in rs)
    )
    places, back = np.unique(place, return_inverse=True)
    h = model.hidden(
        x[..., 0].clamp(0).to(device), mask, x[..., 2].to(device), None, torch.from_numpy(places)
    )
    logp = torch.log_softmax(model.head(h).float(), -1)[back, target].cpu().double().numpy()
    # in units of 2^-32, whose sums are exact: any number of ranks gives the same
    np.add.at(scores, (column, item), np.round(weight * logp * 2**32) / 2**32)


def score(model, task, modes, items, N, counts):
    """{mode: log-likelihoods of the items}; mc, with N draws, is the last mode. Equal rows of all modes are computed
    once; sorted by length, they form batches with little padding, dealt whole to the ranks."""
    scores, size = (
        np.zeros((len(modes) + max(N - 1, 0), len(items))),
        CHUNK // max(N, 8 * len(modes)),
    )
    bar = tqdm(
        total=len(items),
        desc=f"{task} {'+'.join(modes)}",
        unit_scale=True,
        disable=rank > 0 or None,
    )
    for first in range(0, len(items), size):
        chunk, reads = items[first : first + size], collections.defaultdict(list)
        for row, r in itertools.chain(
            causal_reads(chunk, modes), masked_reads(chunk, modes, N, task)
        ):
            reads[row] += r
        rows = sorted(reads, key=lambda row: -len(row[0]))
        lengths, cuts = [len(content) // 12 for content, _ in rows], [0]
        ends = np.cumsum([0, *lengths]).tolist()
        for i in range(1, len(rows)):
            padded = (i + 1 - cuts[-1]) * lengths[cuts[-1]]
            if padded > TOKENS or ends[i + 1] - ends[cuts[-1]] < (1 - PADDING) * padded:
                cuts.append(i)
        for i, (a, b) in enumerate(zip(cuts, cuts[1:] + [len(rows)])):
            if i % world == rank:
                read_batch(model, rows[a:b], [reads[row] for row in rows[a:b]], scores[:, first:])
            counts.update(
                rows=b - a,
                tokens=ends[b] - ends[a],
                padding=(b - a) * lengths[a] - ends[b] + ends[a],
            )
            bar.update(len(chunk) * (ends[b] - ends[a]) / ends[-1])
    if world > 1:
        torch.distributed.all_reduce(torch.from_numpy(scores))
    values = {mode: column.tolist() for mode, column in zip(modes, scores)}
    if N:  # the error of a mean over a regular grid, from the differences of neighbours: the grid removes the trend
        values["mc"] = scores[-N:].mean(0).tolist()
        values["mc_stderr"] = (
            ((np.diff(scores[-N:], axis=0) ** 2).sum(0) / (2 * max(N - 1, 1) * N)) ** 0.5
        ).tolist()
    return values


def judge(name, documents, values):
    """The accuracy of a mode: the highest score is the choice, the first of equals; subtasks have the same weight."""
    task, hits, ends = (
        TASKS[name],
        collections.defaultdict(list),
        np.cumsum([len(d.completions) for d in documents]),
    )
    for d, (given, *unconditional) in zip(
        documents, np.split(np.reshape(values, (-1, ends[-1])), ends, axis=1)
    ):
        # PMI(w) = sum_i log p(w_i | c, w_<i) / p(w_i | u, w_<i), u = Answer:
        scores = (given - sum(unconditional)) / (
            [len(w) for w in d.completions] if task.score == "char" else 1
        )
        hits[d.subtask].append(np.argmax(scores) == d.gold)
    p, n = (np.array([f(h) for h in hits.values()]) for f in (np.mean, len))
    return {
        "accuracy": p.mean(),
        "normalized": (p.mean() - task.chance) / (1 - task.chance),
        "n": len(documents),
        "stderr": (p * (1 - p) / n).sum() ** 0.5 / len(p),
        "subtasks": dict(zip(hits, p)) if len(p) > 1 else {},
    }


def write(path, lines):
    """To a temporary name, then renamed: there is all of it or nothing."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    pathlib.Path(f"{path}.{rank}").write_text("".join(lines), "utf-8")
    os.replace(f"{path}.{rank}", path)


def dump(documents, values):
    for name in documents:
        choices = [
            (d, choice, w) for d in documents[name] for choice, w in enumerate(d.completions)
        ]
        for i, (d, choice, w) in enumerate(choices):
            line = dict(
                task=name,
                subtask=d.subtask,
                doc=d.doc,
                choice=choice,
                context=d.context,
                completion=w,
                uncond_context="Answer:" if TASKS[name].score == "pmi" else None,
                gold=d.gold,
            )
            for mode, v in values.get(name, {}).items():
                line |= zip((mode, mode + "_uncond"), v[i :: len(choices)])
            yield json.dumps(line) + "\n"


if __name__ == "__main__":
    args = flags(
        __doc__,
        ckpt="",
        data="data/tasks",
        tasks="",
        modes="ar,prefix,pll",
        pll="1,6",
        mc=0,
        limit=0,
        json="",
        dump="",
    )
    tasks = (
        args.tasks or ",".join(t for t in TASKS if os.path.isdir(f"{args.data}/{t}")) or "heldout"
    ).split(",")
    asked = args.modes.split(",") + ["mc"] * (args.mc > 0)
    for kind, names, known in (
        ("mode", asked, ["ar", "prefix", "pll", "mc"]),
        ("task", tasks, list(TASKS)),
    ):
        for name in set(names) - set(known):
            die(f"no {kind} named '{name}'{suggest(name, known)}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", args.pll) or min(args.mc, args.limit) < 0:
        die("--pll takes numbers of masks such as 1,6; --mc and --limit take a number from 0")
    documents = {
        name: read_task(name, args.data, args.limit) for name in tasks if name != "heldout"
    }
    if args.dump and not args.ckpt and "heldout" not in tasks:
        sys.exit(write(args.dump, dump(documents, {})))

    if world > 1:
        torch.distributed.init_process_group("gloo")
    model, tokenizer, checkpoint = load_model(
        args.ckpt or die("give --ckpt, or --dump with tasks in --data")
    )
    documents |= {
        name: list(heldout(checkpoint, tokenizer, args.limit))
        for name in tasks
        if name == "heldout"
    }
    plls = [f"pll{n}" for n in sorted({*map(int, args.pll.split(","))})] * ("pll" in asked)
    modes = [mode for mode in ("ar", "prefix") if mode in asked] + plls + ["mc"] * ("mc" in asked)
    N, window, counts = (
        (args.mc or 256) * ("mc" in asked),
        checkpoint["settings"].seq_len,
        collections.Counter(),
    )

    # what an earlier run of this command has left: same code, checkpoint, strings and flags
    files = sorted(pathlib.Path(args.ckpt).glob("*.pt")) or [pathlib.Path(args.ckpt)]
    key = repr(([fingerprint(file) for file in (__file__, *files)], documents, modes, N)).encode()
    kept = files[0].with_name(f"eval-{hashlib.blake2b(key, digest_size=8).hexdigest()}.json")
    values, results = json.loads(kept.read_text()) if kept.exists() else {}, {}

    for name in documents:
        items = make_items(documents[name], tokenizer, window, TASKS[name].score == "pmi", counts)
        if name not in values:
            values[name] = score(model, name, modes, items, N, counts)
            write(kept, [json.dumps(values)])
        row = results[name] = {
            mode: judge(name, documents[name], values[name][mode]) for mode in modes
        }
        if len(plls) > 1:  # the paper's number
            row["pll"] = max(
                (row[m] | {"chosen": f"{m} on the test score"} for m in plls),
                key=lambda r: r["accuracy"],
            )
    if rank > 0:
        sys.exit()
    print(f"{'accuracy, %':<16}{'n':>6}" + "".join(f"{mode:>14}{'norm.':>7}" for mode in row))
    for name, row in results.items():
        cells = (
            [100 * r[key] for key in ("accuracy", "stderr", "normalized")] for r in row.values()
        )
        print(
            f"{name:<16}{len(documents[name]):>6}",
            *("{:8.1f} ±{:<4.1f}{:7.1f}".format(*x) for x in cells),
            sep="",
        )
    nine = [r for name, r in results.items() if name != "heldout"]
    average = {mode: np.mean([r[mode]["normalized"] for r in nine]) for mode in row if nine}
    if nine:
        print(
            f"{f'average of {len(nine)}':<22}",
            *(f"{100 * x:>21.1f}" for x in average.values()),
            sep="",
        )
    notes = ["pll is the best n of each task, chosen on the test score"] * ("pll" in row)
    notes += [
        f"mc of {name}: ±{np.mean(v['mc_stderr']):.2f} nats" for name, v in values.items() if N
    ]
    share = counts["padding"] / max(1, counts["tokens"])
    print(
        f"padding {share:.1%}; {counts['truncated']} documents cut to {window} tokens",
        *notes,
        sep="; ",
    )
    if args.json:
        report = dict(
            flags=vars(args), step=checkpoint["step"], tasks=results, average=average, counts=counts
        )
        write(args.json, [json.dumps(report, indent=1)])
    if args.dump:
        write(args.dump, dump(documents, values))
