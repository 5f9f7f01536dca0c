# SPDX-License-Identifier: MIT OR Apache-2.0
"""The examples that need no GPU, and the documents that show them."""

import json
import os

import pytest
from support import run

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.environ.get("GIN_PY_EXAMPLES", os.path.join(HERE, "..", "..", "..", "examples", "python"))
SAID = "['hello from rank 1', 'hello from rank 0']\n"


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def test_the_first_program_runs():
    assert run(read(FOLDER, "hello_put.py")) == SAID


def test_the_notebook_is_that_program_and_runs():
    cells = [cell for cell in json.loads(read(FOLDER, "hello_put.ipynb"))["cells"] if cell["cell_type"] == "code"]
    code = "\n\n\n".join("".join(cell["source"]) for cell in cells)
    assert run(code) == SAID
    # The program has two lines more at its head.
    assert read(FOLDER, "hello_put.py").endswith(code + "\n")


@pytest.mark.parametrize("name, more", [("ep.py", ""), ("experts.py", ", True")])
def test_tokens_go_to_experts_and_back(name, more):
    said = f"[(None, [1.0, 10.0, 11.0]{more}), (None, [2.0, 20.0, 22.0]{more})]\n"
    assert run(read(FOLDER, name)) == said


@pytest.mark.parametrize("name", ["hello_put.py", "ep.py"])
def test_the_documents_show_these_programs(name):
    path = os.path.join(HERE, "..", "..", "..", "docs")
    if not os.path.isdir(path):
        pytest.skip("the documents are not here")
    shown = read(FOLDER, name).split('"""\n\n', 1)[1]
    assert f"```python\n{shown}```\n" in read(path, "python.md")
