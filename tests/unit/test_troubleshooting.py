"""Tests that messages for users and entries in the troubleshooting page match."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "outofcore"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Sources of messages for users. Planning and the validator have one common entry.
SPEAKING = (
    *(
        "api.py",
        "estimation",
        "step.py",
        "step_state.py",
        "session.py",
        "units.py",
        "presets.py",
        "planning/planner.py",
    ),
    *("capture", "report", "checkpoint", "materialization.py"),
    *(
        "planned_step.py",
        "_torch_internals.py",
        "cli/subjects.py",
        "cli/options.py",
        "cli/run.py",
        "cli/config_fields.py",
        "profiling/cache.py",
        "jsonfile.py",
        "compiling.py",
    ),
    *("planning/policy.py", "planning/registry.py"),
    "profiling/ops.py",
    *("distributed/agreement.py", "peers.py", "plan_updates.py"),
    *(f"execution/{name}.py" for name in ("arena", "model_state", "gradients", "runner")),
    *(f"execution/{name}.py" for name in ("aliases", "opening")),
    *("execution/cuda", "runtime", "follow", "distributed", "logical_workers"),
)
# Messages that only a bug of the library can raise.
OUR_FAULTS = re.compile(
    r"please report it|is closed; compile|the disk home is not open|this recorder|is said to be in the "
    r"arena|^§ has no tensor|is not a parameter of the model|before its program was in the arena|^cannot delete|"
    r"^cannot § bytes|^a step on a GPU has a home in host memory and at most"
)
RAISERS = {
    *("InputError", "UnitError", "BudgetError", "SpillError", "CaptureError", "ArenaError", "TransferError"),
    *("DeviceError", "StateError", "GraphError", "VersionError", "refusal", "_refusal"),
}


def text_of(node: ast.expr) -> str | None:
    """Return a literal, with "§" for interpolated values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "§" for v in node.values)  # type: ignore[misc]
    return None


def messages() -> Iterator[str]:
    files = [
        path
        for name in SPEAKING
        for path in ([SOURCE / name] if name.endswith(".py") else (SOURCE / name).rglob("*.py"))
    ]
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and named in RAISERS:
                text = text_of(node.args[0]) if node.args else None
                # A message made of parts only is checked where the parts are made.
                if text and not re.fullmatch(r"[§:;. ]*", text) and not OUR_FAULTS.search(text):
                    yield text
            # Refusals in tables of three parts: the event, the reason, and the remedy.
            if isinstance(node, ast.Dict):
                for value in node.values:
                    parts = [text_of(part) for part in value.elts] if isinstance(value, ast.Tuple) else []
                    if len(parts) == 3 and all(parts) and str(parts[0]).startswith("the "):
                        yield re.sub(r"\{\w*\}", "§", str(parts[0]))


def warnings() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warning":
                text = text_of(node.args[0])
                assert text, f"{path}:{node.lineno}: a warning begins with its text"
                yield re.sub(r"%[a-z]|%\.\d[a-z]", "§", text)


@functools.cache
def all_messages() -> list[str]:
    return sorted({*messages(), *warnings()})


ENTRIES = sorted(
    {entry.strip() for entry in re.findall(r"`([^`\n]+)`", PAGE) if re.match(r"…|[A-Za-z]", entry) and " " in entry}
)


def pattern(entry: str) -> re.Pattern[str]:
    parts = (re.escape(part) for part in entry.split("…"))
    return re.compile(".*?".join(parts))


def matching(message: str) -> list[str]:
    return [entry for entry in ENTRIES if pattern(entry).match(message)]


def test_messages_are_collected() -> None:
    assert len(all_messages()) > 90
    assert len(set(warnings())) > 8


def test_each_message_has_an_entry() -> None:
    assert [message for message in all_messages() if not matching(message)] == []


def test_entries_match_existing_messages() -> None:
    used = {entry for message in all_messages() for entry in matching(message)}
    # Messages composed from lines, and raised by another module or by native code.
    used |= {
        "writing … to the home failed",
        "reading … from the home failed",
        "the system gives no … for the … threads that copy",
        "the budget of … cannot hold this step",
        "… names a script but no function of it",
        "the optimizer … cannot be used",
        "a copy to or from the home failed",
    }
    stale = [entry for entry in ENTRIES if "…" in entry and entry not in used]
    assert stale == []
