"""tasks.py: the strings of the nine tasks, their files, and where these come from."""

import csv
import http.server
import io
import json
import os
import shutil
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

import tasks
from conftest import run
from tasks import TASKS, read_task

WORDS = (
    "rain sun moon tree river stone bird fish cloud sand wood fire ice wind leaf root star hill "
    "lake road door lamp cup hat coat"
).split()


# ---- small files in the layouts of the releases --------------------------------------------------
def make_choices(texts, labels="ABCDE"):
    return [{"text": text, "label": label} for text, label in zip(texts, labels)]


def make_record(task, i):
    """Return the i-th record of a made-up release file; all of them differ."""
    w = [WORDS[(i * 7 + j * 3 + j * j) % len(WORDS)] for j in range(8)]
    if task == "blimp":
        return {
            "sentence_good": f"The {w[0]} is {w[1]}.",
            "sentence_bad": f"The {w[0]} are {w[2]}.",
        }
    if task == "hellaswag":
        endings = [f"goes {w[3]}.", f"is a {w[4]}  now. [title] {w[5]}", f"[step] {w[6]} {w[7]}"]
        return {
            "activity_label": w[0],
            "ctx_a": f"A {w[1]} falls.",
            "ctx_b": f"the {w[2]}",
            "label": i % 4,
            "endings": [*endings, w[5]],
        }
    if task == "mmlu":
        return [f" What is a {w[0]}? ", w[1], w[2] + " ", "the " + w[3], w[4], "ABCD"[i % 4]]
    if task == "piqa":
        return {
            "goal": f"get a {w[0]}",
            "sol1": f"Use the {w[1]} ",
            "sol2": f"Use the  {w[2]} {w[3]}",
        }
    if task == "socialiqa":
        answers = {"answerA": w[2], "answerB": w[3], "answerC": w[2]}
        return {"context": f"{w[0]} met {w[1]}.", "question": "Why?", **answers}
    choices = make_choices([w[1], w[2], w[1] + " " + w[3], w[4]])
    question = {"stem": f"Where is the {w[0]}?", "choices": choices}
    return {"question": question, "answerKey": "ABCD"[i % 4]}


def write_tasks(folder, n=3):
    """Write all tasks, with n records in each of their files."""
    for name, task in TASKS.items():
        (folder / name).mkdir(parents=True)
        pattern = Path(task.files).name.replace("[a-z]*", "*")
        for k in range(task.n_files):
            records = [make_record(name, n * k + i) for i in range(n)]
            path = folder / name / pattern.replace("*", f"sub_{k:02}")
            with open(path, "w", newline="") as file:
                if name == "mmlu":
                    csv.writer(file).writerows(records)
                else:
                    file.writelines(json.dumps(record) + "\n" for record in records)
        if task.labels:
            first = 1 if name == "socialiqa" else 0
            labels = "".join(f"{first + i % 2}\n" for i in range(n))
            (folder / name / task.labels).write_text(labels)
    return folder


@pytest.fixture(scope="session")
def task_files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("raw") / "tasks")


# ---- strings -------------------------------------------------------------------------------------
ARC = {"stem": "Why?", "choices": make_choices(["x", "y", "z"], "123")}
FIVE = {"stem": "Two  spaces", "choices": make_choices(list("vwxyz"))}
FIVE_STRINGS = "Question: Two  spaces\nAnswer:", [" v", " w", " x", " y", " z"]
SWAG = {
    "activity_label": "Cooking",
    "ctx_a": "A man cooks. [title] Then he rests",
    "ctx_b": "the man",
    "label": "2",
    "endings": [
        "eats. [title] Done. [step] He sleeps .",
        "[substeps] Take  it.",
        "goes [a] b",
        "x.",
    ],
}
SWAG_ENDINGS = [" eats. Done. He sleeps .", "  Take it.", " goes b", " x."]
SUBJECT_LINE = "The following are multiple choice questions (with answers) about high school x.\n\n"
SIQA = {"context": "A met B.", "question": "Why?", "answerA": "a", "answerB": "b", "answerC": "c"}


@pytest.mark.parametrize(
    "name, record, tag, expected",
    [
        (
            "arc_easy",
            {"question": ARC, "answerKey": "3"},
            None,
            ("Question: Why?\nAnswer:", [" x", " y", " z"], 2),
        ),
        ("arc_challenge", {"question": FIVE, "answerKey": "E"}, None, (*FIVE_STRINGS, 4)),
        ("commonsenseqa", {"question": FIVE, "answerKey": "A"}, None, (*FIVE_STRINGS, 0)),
        (
            "openbookqa",
            {"question": ARC, "answerKey": "1 "},
            None,
            ("Question: Why?\nAnswer:", [" x", " y", " z"], 0),
        ),
        (
            "blimp",
            {"sentence_good": "It is.", "sentence_bad": "It are."},
            "subtask",
            ("", ["It is.", "It are."], 0),
        ),
        (
            "hellaswag",
            SWAG,
            None,
            ("Cooking: A man cooks. Then he rests The man", SWAG_ENDINGS, 2),
        ),
        (
            "hellaswag",
            {**SWAG, "ctx_a": "One. [header] Two.", "ctx_b": ""},
            None,
            ("Cooking: One. Two.", SWAG_ENDINGS, 2),
        ),
        (
            "mmlu",
            [" Is it\nso? \n", "yes ", " no", "a, b", "4", "D"],
            "high_school_x",
            (
                SUBJECT_LINE + "Question: Is it\nso?\nAnswer:",
                [" yes ", "  no", " a, b", " 4"],
                3,
            ),
        ),
        (
            "piqa",
            {"goal": "open it", "sol1": "pull  it ", "sol2": "push"},
            "1",
            ("Goal: open it\nAnswer:", [" pull  it ", " push"], 1),
        ),
        ("socialiqa", SIQA, "3", ("Question: A met B. Why?\nAnswer:", [" a", " b", " c"], 2)),
    ],
)
def test_strings_are_those_of_olmes(name, record, tag, expected):
    assert tasks.render(name, record, tag) == expected


def test_the_tasks_are_those_of_the_paper():
    sizes = [task.n_documents for task in TASKS.values()]
    assert sizes == [2376, 1172, 67000, 1221, 10042, 14042, 500, 1838, 1954]
    by_norm = {norm: set() for norm in ("raw", "char", "pmi")}
    for name, task in TASKS.items():
        by_norm[task.norm].add(name)
    assert by_norm["pmi"] == {"arc_challenge", "commonsenseqa", "openbookqa"}
    assert by_norm["raw"] == {"blimp"}


# ---- files ---------------------------------------------------------------------------------------
def test_documents_are_numbered_over_all_files_whatever_the_limit(task_files):
    documents = read_task("mmlu", task_files, 2)
    assert [d.number for d in documents[:4]] == [0, 1, 3, 4]
    assert len(documents) == 2 * 57
    assert [d.subtask for d in documents[:4]] == ["sub_00", "sub_00", "sub_01", "sub_01"]
    assert "about sub 00.\n" in documents[0].context
    assert documents[2].completions[0] == " " + make_record("mmlu", 3)[1]


def test_only_tasks_of_several_files_have_subtasks(task_files):
    assert len({d.subtask for d in read_task("blimp", task_files, 1)}) == 67
    assert [d.subtask for d in read_task("piqa", task_files, 2)] == [None, None]


def test_labels_come_from_their_own_file(task_files):
    assert [d.gold for d in read_task("socialiqa", task_files, 3)] == [0, 1, 0]


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def cut(name, n_bytes):
    return lambda folder: os.truncate(folder / name, os.path.getsize(folder / name) - n_bytes)


def replace_line(name, number, text):
    def change(folder):
        lines = (folder / name).read_text().splitlines()
        lines[number] = text
        (folder / name).write_text("\n".join(lines) + "\n")

    return change


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("piqa", remove("valid.jsonl"), "0 files valid.jsonl"),
        ("piqa", remove("valid-labels.lst"), "valid-labels.lst"),
        ("piqa", write("valid-labels.lst", "0\n"), "record 2 is wrong"),
        (
            "piqa",
            write("valid-labels.lst", "0\n2\n0\n"),
            "record 2 is wrong.*no choice 2, counting from 0, in",
        ),
        ("piqa", cut("valid.jsonl", 30), "record 3 is wrong"),
        ("piqa", write("valid.jsonl", ""), "0 records"),
        ("blimp", remove("sub_05.jsonl"), "66 files"),
        ("arc_easy", replace_line("ARC-Easy-Test.jsonl", 1, "[]"), "record 2 is wrong"),
        (
            "arc_easy",
            replace_line("ARC-Easy-Test.jsonl", 2, json.dumps({"question": ARC, "answerKey": "F"})),
            "record 3 is wrong",
        ),
        (
            "hellaswag",
            replace_line("hellaswag_val.jsonl", 0, json.dumps({**SWAG, "endings": ["a", " [b] "]})),
            "record 1 is wrong.*empty completion",
        ),
        (
            "mmlu",
            replace_line("sub_03_test.csv", 1, "question,a,b,c,A"),
            "sub_03_test.csv, record 2 is wrong",
        ),
        (
            "mmlu",
            replace_line("sub_03_test.csv", 1, "question,a,b,c,d,"),
            "sub_03_test.csv, record 2 is wrong",
        ),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(name, change, message, task_files, tmp_path):
    shutil.copytree(task_files / name, tmp_path / name)
    assert read_task(name, tmp_path, 2)
    change(tmp_path / name)
    with pytest.raises(SystemExit, match=message) as error:
        read_task(name, tmp_path, 2)
    assert "\n" not in str(error.value)


def test_a_task_that_is_not_there_is_to_be_downloaded_not_removed(tmp_path):
    with pytest.raises(SystemExit, match="no folder .*piqa: .*prepare.py --tasks") as error:
        read_task("piqa", tmp_path)
    assert "remove" not in str(error.value)


@pytest.mark.parametrize("limit", [0, 151, 1000, 10**6])
def test_a_cut_file_is_refused_unless_the_limit_asks_for_no_more(limit, tmp_path):
    (tmp_path / "hellaswag").mkdir()
    lines = [json.dumps(make_record("hellaswag", i)) + "\n" for i in range(150)]
    (tmp_path / "hellaswag" / "hellaswag_val.jsonl").write_text("".join(lines))
    assert len(read_task("hellaswag", tmp_path, 150)) == 150
    with pytest.raises(SystemExit, match="150 records in 1 files hellaswag_val.jsonl, not 10,042"):
        read_task("hellaswag", tmp_path, limit)


@pytest.mark.parametrize("limit", [0, 2, 4, 5, 10**6])
def test_a_whole_release_is_read_whatever_the_limit(limit, tmp_path, monkeypatch):
    """Its files may have fewer records than the limit, as many of MMLU's do."""
    whole = TASKS["mmlu"]._replace(n_files=2, n_documents=2 + 5)
    monkeypatch.setitem(TASKS, "mmlu", whole)
    (tmp_path / "mmlu").mkdir()
    for name, n in (("a", 2), ("b", 5)):
        with open(tmp_path / "mmlu" / f"{name}_test.csv", "w", newline="") as file:
            csv.writer(file).writerows(make_record("mmlu", i) for i in range(n))
    n_taken = min(2, limit or 2) + min(5, limit or 5)
    assert len(read_task("mmlu", tmp_path, limit)) == n_taken


# ---- downloading ---------------------------------------------------------------------------------
def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members):
    """Pack members (name, type, content), with exactly the given names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "/etc/passwd", len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def broken(content):
    """Change a byte in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


BLIMP = b'{"sentence_good": "It is.", "sentence_bad": "It are."}\n'
MMLU = b"What?,a,b,c,d,B\n"
PIQA = b'{"goal": "g", "sol1": "a", "sol2": "b"}\n'
FILE = tarfile.REGTYPE

# What a web server offers: members that are wanted, others, and names that lead elsewhere.
SITE = {
    "/BLiMP.zip": zipped(
        {
            "x/a.jsonl": BLIMP,
            "__MACOSX/x/._a.jsonl": b"junk",
            "../../b.jsonl": BLIMP,
            "x/README": b"no",
        }
    ),
    "/data.tar": tarred(
        [
            ("data/test/a_test.csv", FILE, MMLU),
            ("/data/test/b_test.csv", FILE, MMLU),
            ("data/aux/mc_test.csv", FILE, b"no"),
            ("data/test/c_test.csv", tarfile.SYMTYPE, b""),
            ("data/test/d_test.csv", tarfile.LNKTYPE, b""),
            ("data/test", tarfile.DIRTYPE, b""),
        ]
    ),
    "/valid.jsonl": PIQA,
    "/valid-labels.lst": b"1\n",
}


@pytest.fixture
def site(monkeypatch):
    """Serve three tasks, with one or two records each, on this machine; return {path: content}."""
    files = dict(SITE, asked=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            files["asked"].append(self.path)
            self.send_response(200 if self.path in files else 404)
            self.end_headers()
            self.wfile.write(files.get(self.path, b""))

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    few = {}
    for name, n in (("blimp", 2), ("mmlu", 2), ("piqa", 1)):
        urls = []
        for url in TASKS[name].urls:
            urls.append(f"http://127.0.0.1:{server.server_port}/{Path(url).name}")
        few[name] = TASKS[name]._replace(n_documents=n, n_files=n, urls=tuple(urls))
    monkeypatch.setattr(tasks, "TASKS", few)
    yield files
    server.shutdown()
    server.server_close()


def test_only_what_is_wanted_is_kept_and_only_in_our_folders(site, tmp_path):
    out = tmp_path / "deep" / "out"
    tasks.download_tasks(out)
    found = {str(p.relative_to(out)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {
        "blimp/a.jsonl": BLIMP,
        "blimp/b.jsonl": BLIMP,
        "mmlu/a_test.csv": MMLU,
        "mmlu/b_test.csv": MMLU,
        "piqa/valid.jsonl": PIQA,
        "piqa/valid-labels.lst": b"1\n",
    }


def test_a_second_download_asks_for_nothing(site, tmp_path):
    tasks.download_tasks(tmp_path)
    assert site["asked"] == ["/BLiMP.zip", "/data.tar", "/valid.jsonl", "/valid-labels.lst"]
    tasks.download_tasks(tmp_path)
    assert len(site["asked"]) == 4


@pytest.mark.parametrize(
    "path, content, message",
    [
        ("/data.tar", None, "cannot get http://.*/data.tar: HTTP Error 404.*into .*mmlu by hand"),
        ("/data.tar", b"<html>", "cannot get http://.*data.tar: "),
        ("/data.tar", tarred([("test/a_test.csv", FILE, MMLU)]), "mmlu: 1 records in 1 files"),
        (
            "/data.tar",
            tarred([("test/a_test.csv", FILE, MMLU * 99)])[:1500],
            "cannot get http://.*data.tar: ",
        ),
        ("/BLiMP.zip", broken(zipped({"a.jsonl": BLIMP})), "cannot get http://.*BLiMP.zip: "),
        (
            "/BLiMP.zip",
            zipped({"a.jsonl": BLIMP, "b.jsonl": b"[" * 2**25}),
            "b.jsonl, record 1 is wrong",
        ),
        (
            "/BLiMP.zip",
            zipped({f"a{i}.jsonl": b"" for i in range(200)}),
            "blimp: 0 records in 200 files",
        ),
        ("/valid-labels.lst", b"", "record 1 is wrong"),
    ],
)
def test_a_bad_release_is_one_line_and_leaves_nothing(site, tmp_path, path, content, message):
    """A missing, damaged or hostile release; tasks that were finished before it stay."""
    site[path] = content
    if content is None:
        del site[path]
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{message}[^\n]*$"):
        tasks.download_tasks(tmp_path)
    n_before = ["/BLiMP.zip", "/data.tar", "/valid-labels.lst"].index(path)
    assert sorted(os.listdir(tmp_path)) == ["blimp", "mmlu"][:n_before]


def test_without_a_network_a_user_is_told_what_to_do_by_hand(tmp_path):
    nowhere = "http://127.0.0.1:9"
    proxies = {"https_proxy": nowhere, "HTTPS_PROXY": nowhere}
    output = run("prepare.py", "--tasks", "--out", "out", cwd=tmp_path, code=1, **proxies)
    line = output.splitlines()[-1]
    assert line.startswith("error: cannot get https://") and "by hand" in line
    assert not os.listdir(tmp_path / "out")


# Members of the official archives, as they are named there.
OFFICIAL = {
    "ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Test.jsonl": "arc_easy",
    "ARC-V1-Feb2018-2/ARC-Challenge/ARC-Challenge-Test.jsonl": "arc_challenge",
    "ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Dev.jsonl": None,
    "data/passive_1.jsonl": "blimp",
    "__MACOSX/data/._passive_1.jsonl": None,
    "dev_rand_split.jsonl": "commonsenseqa",
    "hellaswag_val.jsonl": "hellaswag",
    "OpenBookQA-V1-Sep2018/Data/Main/test.jsonl": "openbookqa",
    "OpenBookQA-V1-Sep2018/Data/Additional/test_complete.jsonl": None,
    "socialiqa-train-dev/dev.jsonl": "socialiqa",
    "socialiqa-train-dev/dev-labels.lst": "socialiqa",
    "socialiqa-train-dev/train.jsonl": None,
    "data/test/anatomy_test.csv": "mmlu",
    "data/val/anatomy_val.csv": None,
    "data/auxiliary_train/mc_test.csv": None,
    "valid.jsonl": "piqa",
    "valid-labels.lst": "piqa",
}


@pytest.mark.parametrize("name", TASKS)
def test_of_the_official_archives_each_task_takes_its_own_files(name, tmp_path):
    archive = tmp_path / "all.zip"
    archive.write_bytes(zipped({member: b"" for member in OFFICIAL}))
    (tmp_path / name).mkdir()
    tasks.extract(archive, TASKS[name], tmp_path / name)
    wanted = {Path(member).name for member, task in OFFICIAL.items() if task == name}
    taken = set(os.listdir(tmp_path / name))
    if name == "blimp":  # its archive holds nothing else, so any name will do
        assert wanted <= taken and "._passive_1.jsonl" not in taken
    else:
        assert taken == wanted
