"""
The nine zero-shot tasks of the paper: where their files come from, how a record becomes strings.

`python prepare.py --tasks` downloads them to data/tasks: a folder for each task, which holds the
official release files as they are. The strings are those of OLMES (Gu et al., 2025), in its cloze
form and without examples in the prompt.
"""

import csv
import json
import re
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from errors import die


class Task(NamedTuple):
    """What is known about a task before its files are read."""

    norm: str  # compare choices by log p ("raw"), log p per character ("char"), or PMI ("pmi")
    chance: float  # the paper's random baseline
    n_documents: int
    n_files: int = 0  # if there are several, each is a subtask
    files: str = ""  # a glob of their names in the release; on disk only its last part counts
    labels: str = ""  # a file with a label per line, if the records have none
    urls: tuple[str, ...] = ()  # the official files, or archives that hold them


class Document(NamedTuple):
    """A question of a task: which of the completions continues the context?"""

    subtask: str | None
    number: int  # counts over all files of the task
    context: str
    completions: list[str]
    gold: int  # index of the right completion


AI2 = "https://ai2-public-datasets.s3.amazonaws.com"
ARC = f"{AI2}/arc/ARC-V1-Feb2018.zip"
GITHUB = "https://raw.githubusercontent.com"
PIQA = "https://yonatanbisk.com/piqa/data"

# fmt: off
TASKS = {
    "arc_easy": Task("char", 1 / 4, 2376, 1, "ARC-Easy-Test.jsonl", urls=(ARC,)),
    "arc_challenge": Task("pmi", 1 / 4, 1172, 1, "ARC-Challenge-Test.jsonl", urls=(ARC,)),
    "blimp": Task("raw", 1 / 2, 67000, 67, "[a-z]*.jsonl",
                  urls=(f"{GITHUB}/alexwarstadt/blimp/master/BLiMP.zip",)),
    "commonsenseqa": Task("pmi", 1 / 5, 1221, 1, "dev_rand_split.jsonl",
                          urls=("https://s3.amazonaws.com/commensenseqa/dev_rand_split.jsonl",)),
    "hellaswag": Task("char", 1 / 4, 10042, 1, "hellaswag_val.jsonl",
                      urls=(f"{GITHUB}/rowanz/hellaswag/master/data/hellaswag_val.jsonl",)),
    "mmlu": Task("char", 1 / 4, 14042, 57, "test/*_test.csv",
                 urls=("https://people.eecs.berkeley.edu/~hendrycks/data.tar",)),
    "openbookqa": Task("pmi", 1 / 4, 500, 1, "Main/test.jsonl",
                       urls=(f"{AI2}/open-book-qa/OpenBookQA-V1-Sep2018.zip",)),
    "piqa": Task("char", 1 / 2, 1838, 1, "valid.jsonl", "valid-labels.lst",
                 urls=(f"{PIQA}/valid.jsonl", f"{PIQA}/valid-labels.lst")),
    "socialiqa": Task("char", 1 / 3, 1954, 1, "dev.jsonl", "dev-labels.lst",
                      urls=("https://storage.googleapis.com/ai2-mosaic/public/socialiqa/"
                            "socialiqa-train-dev.zip",)),
}
# fmt: on


# ---- a record becomes strings --------------------------------------------------------------------
def render(name, record, tag):
    """Return the context of a task's record, its completions, and the index of the right one.

    `tag` is what the record does not contain: its subject (MMLU) or its label (PIQA, SocialIQA).
    A completion is one space and the text of the choice, except in BLiMP, which has no context.
    """
    if name == "blimp":
        # Whole sentences right after <s>, as a training document begins.
        return "", [record["sentence_good"], record["sentence_bad"]], 0

    if name == "hellaswag":
        context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
        endings = [" " + clean_hellaswag(ending) for ending in record["endings"]]
        return clean_hellaswag(context), endings, int(record["label"])

    if name == "mmlu":
        question, *choices, key = record
        if len(choices) != 4:
            raise ValueError(f"{len(record)} columns, not 6")
        subject = tag.replace("_", " ")
        context = (
            f"The following are multiple choice questions (with answers) about {subject}.\n\n"
            f"Question: {question.strip()}\nAnswer:"
        )
        return context, [" " + choice for choice in choices], ["A", "B", "C", "D"].index(key)

    if name == "piqa":
        completions = [" " + record["sol1"], " " + record["sol2"]]
        return f"Goal: {record['goal']}\nAnswer:", completions, int(tag)

    if name == "socialiqa":
        context = f"Question: {record['context']} {record['question']}\nAnswer:"
        completions = [" " + record["answer" + letter] for letter in "ABC"]
        return context, completions, int(tag) - 1

    # ARC, CommonsenseQA and OpenBookQA: 3 to 5 choices, labeled with letters or digits
    question = record["question"]
    labels = [choice["label"] for choice in question["choices"]]
    completions = [" " + choice["text"] for choice in question["choices"]]
    gold = labels.index(record["answerKey"].strip())
    return f"Question: {question['stem']}\nAnswer:", completions, gold


def clean_hellaswag(text):
    """Remove WikiHow's markup such as [title] and [step], exactly as OLMES does."""
    text = re.sub(r"\.? \[title\]", ". ", text.strip())
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def read_task(name, data, limit=0):
    """Return the documents of a task in the folder `data`, or the first `limit` of each file.

    All records of the release must be there or, with a limit, at least that many in each file.
    """
    task = TASKS[name]
    folder = Path(data, name)
    if not folder.is_dir():
        die(f"no folder {folder}: get the tasks with `python prepare.py --tasks`, or set --data")
    pattern = Path(task.files).name
    files = []  # the documents in each
    n = 0
    for path in sorted(folder.glob(pattern)):
        files.append(read_documents(name, path, n))
        n += len(files[-1])

    has_all = n == task.n_documents
    has_enough = limit > 0 and all(len(documents) >= limit for documents in files)
    if len(files) != task.n_files or not (has_all or has_enough):
        die(
            f"{folder}: {n:,} records in {len(files)} files {pattern}, not {task.n_documents:,} in "
            f"{task.n_files}; remove {folder} and run: python prepare.py --tasks"
        )
    return [document for documents in files for document in documents[: limit or None]]


def read_documents(name, path, first_number):
    """Return the documents of one release file, numbered from `first_number` on."""
    task = TASKS[name]
    subtask = path.stem.removesuffix("_test") if task.n_files > 1 else None
    documents = []
    try:
        if task.labels:
            labels = path.with_name(task.labels).read_text("utf-8", "replace").split()
        for i, record in enumerate(read_records(path)):
            tag = labels[i] if task.labels else subtask
            document = Document(subtask, first_number + i, *render(name, record, tag))
            check_document(document)
            documents.append(document)
    except Exception as error:  # a damaged record can raise anything
        die(
            f"{path}, record {len(documents) + 1} is wrong ({type(error).__name__}: {error}); "
            f"if the file is damaged, remove {path.parent} and run: python prepare.py --tasks"
        )
    return documents


def read_records(path):
    """Yield the records of a release file: lists from .csv, dictionaries from .jsonl."""
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.reader(file)
        else:
            yield from map(json.loads, file)


def check_document(document):
    """Refuse a document that a damaged record may have produced."""
    if not all(completion.strip() for completion in document.completions):
        raise ValueError(f"an empty completion in {document.completions}")
    if document.gold not in range(len(document.completions)):
        raise ValueError(f"no choice {document.gold}, counting from 0, in {document.completions}")


# ---- downloading ---------------------------------------------------------------------------------
def download_tasks(out):
    """Download every task whose folder is not in `out` yet.

    A folder gets its name only after read_task has counted and checked every record, so that
    an incomplete download never passes.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=out) as temporary:
        for name, task in TASKS.items():
            if (out / name).exists():
                continue
            unfinished = Path(temporary, name)
            unfinished.mkdir()
            for url in task.urls:
                path = Path(temporary, Path(url).name)
                try:
                    if not path.exists():  # ARC is one archive for two tasks
                        download(url, path)
                    extract(path, task, unfinished)
                except Exception as error:  # urllib, zipfile and tarfile raise their own types
                    by_hand = f"you can put its {task.files} into {out / name} by hand"
                    die(f"cannot get {url}: {error}; {by_hand}")
            read_task(name, temporary)
            unfinished.rename(out / name)


def download(url, path):
    """Fetch a file, and show the progress."""
    with urllib.request.urlopen(url, timeout=60) as answer, open(path, "wb") as file:
        size = int(answer.headers.get("Content-Length", 0))
        with tqdm.wrapattr(answer, "read", size, desc=path.name, disable=None) as source:
            shutil.copyfileobj(source, file)


def extract(path, task, folder):
    """Copy the task's files from an archive, or the file itself, into a folder.

    Only the last part of a member's name is used, so that none can lead out of the folder.
    """
    for member, file in open_members(path):
        name = Path(member)
        if name.match(task.files) or (task.labels and name.match(task.labels)):
            (folder / name.name).write_bytes(file.read())


def open_members(path):
    """Yield the name and the open file of each member of an archive, or of the file itself."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name, archive.open(name)
    elif path.suffix == ".tar":
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isfile():
                    yield member.name, archive.extractfile(member)
    else:
        with open(path, "rb") as file:
            yield path.name, file
