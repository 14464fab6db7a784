"""The README tells the truth about the files: what it names exists, what it shows can be run."""

import ast
import os
import re
import shlex

import pytest

from conftest import ROOT

SCRIPTS = ["assets/parity.sh", "assets/pieces.sh", "assets/walk.sh"]


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


def names_in(script):
    """Return the functions, methods, classes and constants that a script defines."""
    names = set()
    for node in ast.walk(ast.parse(read(script))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def paper_map():
    """Return (file, [names]) for every place that the table points to."""
    section = read("README.md").split("## Paper map")[1].split("\n## ")[0]
    places = []
    for cell in re.findall(r"`([\w/]+\.py)(?:: ([\w, ]+))?`", section):
        file, names = cell
        places.append((file, names.split(", ") if names else []))
    return places


def test_the_paper_map_points_to_what_exists():
    places = paper_map()
    assert len(places) > 20
    for file, names in places:
        assert set(names) <= names_in(file), file


def test_the_sections_of_train_that_the_map_quotes_exist():
    section = read("README.md").split("## Paper map")[1].split("\n## ")[0]
    quoted = re.findall(r'`train.py`, "([\w ]+)"', section)
    assert quoted
    for title in quoted:
        assert f"# ---- {title}" in read("train.py")


@pytest.mark.parametrize("document", ["README.md", "NOTES.md"])
def test_every_file_that_is_named_or_linked_exists(document):
    text = read(document)
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    scripts = re.findall(r"`((?:tests/|config/)?\w+\.py)`", text)
    assets = re.findall(r"`(assets/[\w.]+)`", text)
    for name in {*linked, *scripts, *assets}:
        assert os.path.exists(os.path.join(ROOT, name)), name


@pytest.mark.parametrize("document", ["README.md", "NOTES.md", *SCRIPTS])
def test_commands_name_scripts_and_flags_that_exist(document):
    """Every --flag of a shown command occurs in its script, or is a setting of train.py."""
    text = read(document).replace("\\\n", " ")  # a command may continue on the next line
    start = "    .*(?:python|torchrun)" if document.endswith(".md") else " *python"
    commands = re.findall(rf"^{start} .*\.py.*$", text, re.M)
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        scripts = [word for word in words if word.endswith(".py")]
        for script in scripts:
            assert os.path.exists(os.path.join(ROOT, script)), command
        known = "".join(read(script) for script in scripts) + read("configurator.py")
        for word in words[words.index(scripts[0]) :]:
            flag = re.match(r"--(\w+)", word)
            assert not flag or flag[1] in known, command
