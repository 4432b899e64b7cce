"""The record of what the library does: variants, plans, predicted times, smallest budgets and bits of some 40 pairs.

    python tools/record.py                    # compare with tests/record; print each difference; exit with 1 if any
    python tools/record.py --write            # renew the files
    python tools/record.py --only gpt --only vit

A pair is a model with a budget (``record_pairs``). ``tests/record`` has a file of JSON for each model. A change of the
library that is meant to change nothing leaves the record as it is; one that changes plans says by this which ones.

Each model runs in a process of its own (``record_run``), several at a time, with one thread each. Costs are fixed ones
(``record_costs``), so that neither the speed of the machine nor what else runs there makes a difference.

Bits depend on the processor and on the version of PyTorch. Where those are not as recorded, digests of bits and losses
are not compared; that the bits equal those of plain PyTorch in the same run always is. Kernels may also ask for other
scratch memory there, and then plans differ: ``scratch_bytes`` and ``costs_digest`` say so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record_pairs import GROUPS

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "record"
# Of a process that hangs: none takes nearly as long, on any machine.
SECONDS = 7200.0
# Fields that depend on the machine and on the version of PyTorch, by these facts.
BITS = ("losses", "losses_digest", "state_digest")
FACTS_OF_BITS = ("cpu", "cpu_capability", "threads", "torch")
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """A field of a pair that is not as recorded."""

    model: str
    pair: str
    field: str
    recorded: object
    now: object

    def __str__(self) -> str:
        return f"{self.model}: {self.pair}: {self.field}: {self.recorded} → {self.now}"


def differences(model: str, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between two contents of a file of the record."""
    before, after = recorded["pairs"], now["pairs"]
    others = facts_that_differ(recorded, now)
    skipped = BITS if any(name in FACTS_OF_BITS for name in others) else ()
    found: list[Difference] = []
    for pair in {**before, **after}:
        if pair not in before or pair not in after:
            states = ["recorded" if pair in each else ABSENT for each in (before, after)]
            found.append(Difference(model, pair, "pair", *states))
            continue
        left, right = dict(_fields(before[pair])), dict(_fields(after[pair]))
        for field in {**left, **right}:
            values = left.get(field, ABSENT), right.get(field, ABSENT)
            if values[0] != values[1] and field.rpartition(".")[2] not in skipped:
                found.append(Difference(model, pair, field, *values))
    return found


def facts_that_differ(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return what of the machine and the versions is not as recorded, by name."""
    before, after = recorded["recorded_with"], now["recorded_with"]
    names = [name for name in after if before.get(name) != after[name]]
    return {name: f"{name} {before.get(name, ABSENT)} → {after[name]}" for name in names}


def _fields(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_record(model: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Return the file of a model; one without pairs if there is none."""
    path = folder / f"{model}.json"
    return json.loads(path.read_text()) if path.exists() else {"recorded_with": {}, "pairs": {}}


def text_of(content: Mapping[str, Any]) -> str:
    """Return a file of the record as text."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def run_model(model: str) -> dict[str, Any]:
    """Run the pairs of a model in a process of their own, or in several, and return what its file says.

    Raises:
        RuntimeError: a process failed; with the end of what it wrote.
    """
    script = Path(__file__).with_name("record_run.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    count = GROUPS[model].processes
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        ranks = [[]] if count == 1 else [["--rank", str(rank), "--store", f"{folder}/store"] for rank in range(count)]
        logs = [Path(folder, f"log{number}") for number in range(count)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for options, log in zip(ranks, logs, strict=True):
                command = [sys.executable, str(script), model, str(out), *options]
                with log.open("wb") as file:
                    processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
            codes = [process.wait(SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [log.read_text(errors="replace") for log, code in zip(logs, codes, strict=True) if code]
        if failed:
            raise RuntimeError("\n".join(failed[0].splitlines()[-20:]))
        return json.loads(out.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare with the record or renew it; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the library with its record, or renew the record.")
    parser.add_argument("--write", action="store_true", help="Renew the files.")
    parser.add_argument("--jobs", type=int, default=2, help="Processes at a time (default: 2).")
    parser.add_argument("--only", action="append", choices=list(GROUPS), help="A model; may be given several times.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="Folder of the record.")
    asked = parser.parse_args(arguments)
    models = list(asked.only or GROUPS)
    begin = time.monotonic()
    changed: list[Difference] = []
    others: dict[str, str] = {}
    pairs, failures = 0, 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        running = {model: pool.submit(run_model, model) for model in models}
        for model, result in running.items():
            try:
                now = result.result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{model}: failed: {error}", flush=True)
                failures += 1
                continue
            recorded = read_record(model, asked.folder)
            found = differences(model, recorded, now)
            for difference in found:
                print(difference, flush=True)
            if recorded["pairs"]:
                others |= facts_that_differ(recorded, now)
            changed += found
            pairs += len(now["pairs"])
            if asked.write:
                asked.folder.mkdir(parents=True, exist_ok=True)
                (asked.folder / f"{model}.json").write_text(text_of(now))
    if asked.only is None:
        stale = [path for path in sorted(asked.folder.glob("*.json")) if path.stem not in GROUPS]
        for path in stale:
            if asked.write:
                path.unlink()
            else:
                print(f"{path.stem}: recorded → {ABSENT}", flush=True)
                failures += 1
    if others:
        print(f"recorded elsewhere: {', '.join(others.values())}. Plans may differ for that reason.")
    if any(name in FACTS_OF_BITS for name in others):
        print("Digests of bits are not compared; that bits equal those of plain PyTorch is.")
    what = "renewed" if asked.write else "compared"
    count = "no difference" if not changed else f"{len(changed)} differences"
    failed = f", {failures} failures" if failures else ""
    print(f"{pairs} pairs of {len(models)} models {what} in {time.monotonic() - begin:.0f} s: {count}{failed}")
    return int(bool(failures or (changed and not asked.write)))


if __name__ == "__main__":
    sys.exit(main())
