# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes the outcome of each test to the file in GIN_PY_RESULTS, for the Rust test that runs this suite."""

import importlib.util
import json
import os


def pytest_collection_modifyitems(items):
    """Lets one test stand for all tests of torch, or of Triton, where there is none."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            of_it = [item for item in items if item.path.name.startswith(f"test_{name}")]
            items[:] = [item for item in items if item not in of_it[1:]]


def pytest_runtest_logreport(report):
    path = os.environ.get("GIN_PY_RESULTS")
    # A test that passes reports its call; one that fails or is skipped may report its setup or its end instead.
    if path is None or (report.when != "call" and report.outcome == "passed"):
        return
    text = ""
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        text = reason.removeprefix("Skipped: ")
    elif report.outcome == "failed":
        text = report.longreprtext
    with open(path, "a", encoding="utf-8") as out:
        out.write(json.dumps([report.nodeid, report.outcome, text]) + "\n")
