"""Count phrases and names that make the source hard to read, and compare the counts with their limits.

    python tools/plain_english.py                         # counts beside the limits; fails where one is exceeded
    python tools/plain_english.py src/outofcore/planning  # every occurrence in a folder or a file
    python tools/plain_english.py --write                 # lower the limits to the counts of now

Prose is docstrings, comments, messages and the paragraphs of pages; code in backticks is left out. Limits are in
`plain_english.json` and may only fall.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tools" / "plain_english.json"
TREES = ("src", "tests", "benchmarks", "tools", "docs")
PAGES = ("README.md", "CONTRIBUTING.md")  # counted with `docs`
MOST_WORDS = 25
MOST_CHARACTERS = 70

# One entry per kind of phrase: each is counted in all prose.
PHRASES = {
    "relative clause as a noun": r"\b(what|whatever|whoever|whose|whichever)\b(?![^.?]*\?)"
    r"|\bthose (that|which|who|whose|of|in|with)\b|\b(the|each|every|any) (one|ones) (that|which|who)\b",
    "a program that tells": r"\b(tell|tells|told|telling|say|says|said|saying|know|knows|knew)\b",
    "particle": r"\b(so many|so much|beside|besides|anew|likewise|by then|altogether|thereby|whence)\b"
    r"|\bas (it is|they are|it stands|they stand)\b|\bas (many|much) as\b|\bonce and for good\b",
    "negated noun": r"\b(nobody|nothing|nowhere|(?-i:none))\b|\bno \w+ but\b",
    "duty": r"\b(has|have|had) to (have )?be(en)?\b|\b(is|are|was|were) to (be|have)\b|\bshall\b",
    "private metaphor": r"\b(lies|lodgings?|strangers?|vacates?|riddles?|stand-ins?|shams?|settled|leanest|tiles?)\b"
    r"|\bin parts\b|\bway (back|forth)\b|\b(calm|disturbed) steps?\b|\b(lie|lay) (at|in|on|where|beyond|outside)\b"
    r"|\b(gives?|takes?) (its|their) (room|place)\b|\bhand(s|ed)? over\b",
}
VALUES = re.compile(
    "_*(found|made|told|said|settled|each|given|most|least|others?|ones?|what|where|how|why|which|ways?|things?|rest|own"
    "|known|kept|left|taken|done|wanted|held|seen|beside|again|away|everything|nothing)"
)
# Functions whose name is a participle without an object; properties are values and may have such names.
PARTICIPLE = re.compile(
    "_*([a-z]+ed|met|told|kept|made|lost|held|seen|given|taken|shown|written|chosen|built|sent|put|drawn|proven)"
)
CLAUSE = re.compile(r"_(that|which|who|whose|whoever|what|whatever|those|nobody|nothing|none)(_|$)")
CODE = re.compile(r"``.*?``|`[^`]*`|https?://\S+|\[\[.*?\]\]")


@dataclass(frozen=True)
class Finding:
    kind: str
    path: str
    line: int
    text: str


@dataclass(frozen=True)
class Passage:
    """Prose that stands in one place; `line` is its first."""

    line: int
    text: str


def parsed(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def documented(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    """Yield the docstrings."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str()) as docstring):
                    yield docstring


def python_prose(source: str, nodes: list[ast.AST]) -> Iterator[Passage]:
    """Yield docstrings, comments, and strings of at least three words."""
    docstrings = list(documented(nodes))
    for node in docstrings:
        yield Passage(node.lineno, node.value)
    ids = {id(node) for node in docstrings}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in strings:
        if id(node) not in ids and node.value.strip().count(" ") >= 2 and "\n" not in node.value.strip():
            yield Passage(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(token.start[0], token.string.lstrip("#: "))


def native_prose(source: str) -> Iterator[Passage]:
    """Yield the comments and the longer strings of C++."""
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"(?:^|\s)///?\s?(.*)", line):
            yield Passage(number, match[1])
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
            if text.count(" ") >= 2:
                yield Passage(number, text)


def page_prose(source: str) -> Iterator[Passage]:
    """Yield the lines of a page outside its blocks of code."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("    "):
            yield Passage(number, line)


def phrases_in(path: str, passages: Iterator[Passage]) -> Iterator[Finding]:
    for passage in passages:
        for offset, line in enumerate(passage.text.splitlines()):
            plain = CODE.sub("", line)
            for kind, pattern in PHRASES.items():
                for match in re.finditer(pattern, plain, re.IGNORECASE):
                    around = plain[max(0, match.start() - 40) : match.end() + 40].strip()
                    yield Finding(kind, path, passage.line + offset, f"{match[0]}: {around}")


def names_in(path: str, nodes: list[ast.AST]) -> Iterator[Finding]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and VALUES.fullmatch(node.id):
            yield Finding("value named by a pronoun or participle", path, node.lineno, node.id)
        if isinstance(node, ast.arg) and VALUES.fullmatch(node.arg):
            yield Finding("value named by a pronoun or participle", path, node.lineno, node.arg)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if "property" not in decorators and "setter" not in decorators and PARTICIPLE.fullmatch(node.name):
                yield Finding("function named by a participle", path, node.lineno, node.name)
            if node.name.startswith("test_"):
                if CLAUSE.search(node.name):
                    yield Finding("test name with a relative clause", path, node.lineno, node.name)
                if len(node.name) > MOST_CHARACTERS:
                    yield Finding("test name too long", path, node.lineno, node.name)


def long_sentences(path: str, docstrings: Iterator[ast.Constant]) -> Iterator[Finding]:
    for node in docstrings:
        for paragraph in re.split(r"\n\s*\n", node.value):
            if ">>>" in paragraph or paragraph.startswith("    "):
                continue
            for sentence in re.split(r"(?<=[.:;])\s+", " ".join(paragraph.split())):
                if len(sentence.split()) > MOST_WORDS:
                    yield Finding("sentence of more than 25 words", path, node.lineno, sentence[:100])


def inspected(path: Path) -> Iterator[Finding]:
    """Yield all findings in one file."""
    name = path.relative_to(ROOT).as_posix()
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        nodes = parsed(source)
        yield from phrases_in(name, python_prose(source, nodes))
        yield from names_in(name, nodes)
        yield from long_sentences(name, documented(nodes))
    elif path.suffix == ".md":
        yield from phrases_in(name, page_prose(source))
    else:
        yield from phrases_in(name, native_prose(source))


def files_below(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    paths = [path for path in folder.rglob("*") if path.suffix in {".py", ".md", ".cpp", ".h"}]
    return sorted(
        path for path in paths if "results" not in path.parts and path.stem.removeprefix("test_") != "plain_english"
    )


def counts_of_source(folder: Path) -> dict[str, int]:
    """Count classes whose name another class of the tree has, and lines of docstrings."""
    paths = [path for path in files_below(folder) if path.suffix == ".py"]
    nodes = [node for path in paths for node in parsed(path.read_text(encoding="utf-8"))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in documented(nodes))
    return {"class name used twice": sum(count - 1 for count in names.values()), "lines of docstrings": lines}


def counts() -> dict[str, dict[str, int]]:
    """Count every kind of finding in every tree."""
    result: dict[str, dict[str, int]] = {}
    for tree in TREES:
        paths = files_below(ROOT / tree) + ([ROOT / page for page in PAGES] if tree == "docs" else [])
        kinds = Counter(finding.kind for path in paths for finding in inspected(path))
        if tree == "src":
            kinds.update(counts_of_source(ROOT / tree))
        result[tree] = dict(sorted(kinds.items()))
    return result


def exceeded(now: dict[str, dict[str, int]], limits: dict[str, dict[str, int]]) -> list[str]:
    """Return one line for each count above its limit."""
    return [
        f"{tree}: {kind}: {count}, limit {limits.get(tree, {}).get(kind, 0)}"
        for tree, kinds in now.items()
        for kind, count in kinds.items()
        if count > limits.get(tree, {}).get(kind, 0)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files to list occurrences of")
    parser.add_argument("--write", action="store_true", help="lower the limits to the counts of now")
    options = parser.parse_args()
    if options.paths:
        for path in (file for folder in options.paths for file in files_below(folder.resolve())):
            for finding in sorted(inspected(path), key=lambda finding: finding.line):
                print(f"{finding.path}:{finding.line}: {finding.kind}: {finding.text}")
        return 0
    now = counts()
    limits = json.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {}
    for tree, kinds in now.items():
        for kind, count in kinds.items():
            print(f"{tree:11} {kind:40} {count:6} {limits.get(tree, {}).get(kind, 0):6}")
    above = exceeded(now, limits) if limits else []
    if options.write and not above:
        LIMITS.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    for line in above:
        print(f"above its limit: {line}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
