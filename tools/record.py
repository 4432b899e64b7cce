"""Compare variants, plans, predicted times, smallest budgets and bits of some 40 pairs with a record.

    python tools/record.py                    # compare with tests/record; print each difference; exit with 1 if any
    python tools/record.py --write            # update the files
    python tools/record.py --only gpt --only vit

Each model runs in its own process (``record_run``) with fixed costs (``record_costs``). Bits depend on the processor
and the PyTorch version. If these differ from the recorded ones, digests are not compared; equality with plain PyTorch
in the same run always is. Kernels may then also change plans by other scratch memory.
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
# Time limit for a hanging process, far above any normal run.
SECONDS = 7200.0
# Fields that depend on the machine and the PyTorch version, and the facts that they depend on.
BITS = ("losses", "losses_digest", "state_digest")
FACTS_OF_BITS = ("cpu", "cpu_capability", "threads", "torch")
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    model: str
    pair: str
    field: str
    recorded: object
    now: object

    def __str__(self) -> str:
        return f"{self.model}: {self.pair}: {self.field}: {self.recorded} → {self.now}"


def differences(model: str, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    before, after = recorded["pairs"], now["pairs"]
    changed = changed_facts(recorded, now)
    skipped = BITS if any(name in FACTS_OF_BITS for name in changed) else ()
    differing: list[Difference] = []
    for pair in {**before, **after}:
        if pair not in before or pair not in after:
            states = ["recorded" if pair in contents else ABSENT for contents in (before, after)]
            differing.append(Difference(model, pair, "pair", *states))
            continue
        left, right = dict(_fields(before[pair])), dict(_fields(after[pair]))
        for field in {**left, **right}:
            values = left.get(field, ABSENT), right.get(field, ABSENT)
            if values[0] != values[1] and field.rpartition(".")[2] not in skipped:
                differing.append(Difference(model, pair, field, *values))
    return differing


def changed_facts(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of machine and versions that differ from the record, by name."""
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
    path = folder / f"{model}.json"
    return json.loads(path.read_text()) if path.exists() else {"recorded_with": {}, "pairs": {}}


def format_record(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def run_model(model: str) -> dict[str, Any]:
    """Run the pairs of a model in one or several processes, and return the content of its file."""
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
        failed_logs = [log.read_text(errors="replace") for log, code in zip(logs, codes, strict=True) if code]
        if failed_logs:
            raise RuntimeError("\n".join(failed_logs[0].splitlines()[-20:]))
        return json.loads(out.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the library with its record, or update the record.")
    parser.add_argument("--write", action="store_true", help="Update the files.")
    parser.add_argument("--jobs", type=int, default=2, help="Number of concurrent processes (default: 2).")
    parser.add_argument(
        "--only", action="append", choices=list(GROUPS), help="Model to run; repeatable (default: all)."
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="Folder of the record.")
    options = parser.parse_args(arguments)
    models = list(options.only or GROUPS)
    begin = time.monotonic()
    changed: list[Difference] = []
    changed_by_name: dict[str, str] = {}
    pairs, failures = 0, 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {model: pool.submit(run_model, model) for model in models}
        for model, result in running.items():
            try:
                now = result.result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{model}: failed: {error}", flush=True)
                failures += 1
                continue
            recorded = read_record(model, options.folder)
            differing = differences(model, recorded, now)
            for difference in differing:
                print(difference, flush=True)
            if recorded["pairs"]:
                changed_by_name |= changed_facts(recorded, now)
            changed += differing
            pairs += len(now["pairs"])
            if options.write:
                options.folder.mkdir(parents=True, exist_ok=True)
                (options.folder / f"{model}.json").write_text(format_record(now))
    if options.only is None:
        stale = [path for path in sorted(options.folder.glob("*.json")) if path.stem not in GROUPS]
        for path in stale:
            if options.write:
                path.unlink()
            else:
                print(f"{path.stem}: recorded → {ABSENT}", flush=True)
                failures += 1
    if changed_by_name:
        print(f"recorded with other facts: {', '.join(changed_by_name.values())}. Plans may differ for that reason.")
    if any(name in FACTS_OF_BITS for name in changed_by_name):
        print("Digests of bits are not compared; equality with plain PyTorch is.")
    action = "updated" if options.write else "compared"
    count = "no difference" if not changed else f"{len(changed)} differences"
    failed = f", {failures} failures" if failures else ""
    print(f"{pairs} pairs of {len(models)} models {action} in {time.monotonic() - begin:.0f} s: {count}{failed}")
    return int(bool(failures or (changed and not options.write)))


if __name__ == "__main__":
    sys.exit(main())
