"""Update the counts of docs/testing.md, between its two markers.

    python tools/testing_page.py            # print them
    python tools/testing_page.py --write

Counts come from the sources, from pytest's collection, and from committed results.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- counts: tools/testing_page.py --write -->\n", "<!-- end of counts -->\n"
FOLDERS = ("tests/unit", "tests/torch_cpu", "tests/cuda")


def count_lines(folder: str, *endings: str) -> int:
    paths = [path for ending in endings for path in (ROOT / folder).rglob(f"*{ending}")]
    return sum(path.read_bytes().count(b"\n") for path in paths)


def count_tests(*options: str) -> dict[str, int]:
    """Count the tests that pytest collects, by folder."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, "tests"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = [line for line in process.stdout.splitlines() if "::" in line]
    return {folder: sum(name.startswith(folder) for name in names) for folder in FOLDERS}


def parse_tests() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "tests").rglob("*.py"))]


def count_assertions(modules: Iterable[ast.Module]) -> int:
    """Count ``assert`` statements and ``pytest.raises``."""
    nodes = [node for module in modules for node in ast.walk(module)]
    raises = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "raises"]
    return sum(isinstance(node, ast.Assert) for node in nodes) + len(raises)


def count_properties(modules: Iterable[ast.Module]) -> int:
    """Count test functions with arguments drawn by Hypothesis."""
    functions = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    return sum(any(ast.unparse(decorator).startswith("given(") for decorator in f.decorator_list) for f in functions)


def count_recorded_pairs() -> int:
    files = (ROOT / "tests" / "record").glob("*.json")
    return sum(len(json.loads(path.read_text(encoding="utf-8"))["pairs"]) for path in files)


def read_counts(name: str) -> dict[str, int]:
    """Return the counts of a committed result; empty without the file."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["counts"] if path.exists() else {}


def counts() -> list[tuple[str, str]]:
    brief, exhaustive = count_tests(), count_tests("--exhaustive")
    modules = parse_tests()
    python, native = count_lines("src", ".py"), count_lines("src", ".cpp", ".h")
    tests = count_lines("tests", ".py", ".cpp", ".h")
    mutants, faults = read_counts("mutants"), read_counts("faults")
    rows = [
        ("Lines of the library", f"{python:,} of Python, {native:,} of C++"),
        ("Lines of tests", f"{tests:,}: {tests / (python + native):.2f} for each line of the library"),
        ("Tests that each change waits for (`make test`)", f"{sum(brief.values()):,}"),
        ("Tests in all (`make test-all`)", f"{sum(exhaustive.values()):,}"),
        *((f"… in `{folder}`", f"{brief[folder]:,} of {exhaustive[folder]:,}") for folder in FOLDERS),
        ("Assertions and expected errors in their sources", f"{count_assertions(modules):,}"),
        ("Properties that Hypothesis tries to refute", f"{count_properties(modules):,}"),
        ("Pairs of model and budget on record (`make record`)", f"{count_recorded_pairs():,}"),
    ]
    if mutants:
        rows.append(("Mutants that the tests kill (`make mutants`)", f"{mutants['killed']} of {mutants['mutants']}"))
    if faults:
        rows.append(("Runs with an injected fault", f"{faults['runs']:,}, of which {faults['failures']} went wrong"))
    return rows


def table() -> str:
    rows = "".join(f"| {label} | {count} |\n" for label, count in counts())
    return f"\n| | |\n|---|---:|\n{rows}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the page")
    new_table = table()
    if not parser.parse_args().write:
        print(new_table)
        return
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + new_table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
