"""Run multithreaded programs with native code built for ThreadSanitizer, and print the races found.

    python tools/tsan.py                                  # programs of four roles, two seeds each: ten minutes
    python tools/tsan.py --seeds 3 4 -- --roles logger    # arguments of tests/torch_cpu/thread_programs.py

Needs Linux, g++ and its libtsan. The build also checks the lock order (``locks.h``). PyTorch, Python and gloo are not
instrumented; races inside them are ignored. Builds and reports go to ``build/tsan``.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from outofcore import compiling
from outofcore.runtime import native

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "torch_cpu" / "thread_programs.py"
SUPPRESSIONS = ROOT / "tests" / "tsan-suppressions.txt"
FOLDER = ROOT / "build" / "tsan"
FLAGS = ("-fsanitize=thread", "-O1", "-g", "-fno-omit-frame-pointer", "-DOUTOFCORE_CHECK_LOCKS")
ROLES = (["loader"], ["logger"], ["teacher"], ["twin"])
# Our innermost frame, as in "#1 evict /path/to/runtime/csrc/follow/blocks.h:512 (outofcore-cpu.so+0x1)".
FRAME = re.compile(r"#\d+ (.+?) \S*/(csrc/[\w./]+:\d+)")


def instrument() -> None:
    """Make this process build and load the instrumented library."""
    plain = native._defines
    native._defines = lambda flavor: [*plain(flavor), *FLAGS]
    native._EXTRA_FLAGS.clear()


def build() -> None:
    """Build the library, which only a process with libtsan can load."""
    instrument()
    file = native.library_file()
    folder = compiling.ensure_private_folder(compiling.user_cache_folder() / file.stem)
    if not (folder / file.name).exists():
        native.build(folder / file.name)


def libtsan() -> str:
    process = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    return str(Path(process.stdout.strip()).resolve())


def run(seed: int, arguments: list[str], seconds: int) -> int:
    options = {
        "suppressions": SUPPRESSIONS,
        "ignore_noninstrumented_modules": 1,
        "log_path": FOLDER / "reports" / f"{'-'.join(arguments).replace('-', '').replace(' ', '')}-{seed}",
        "history_size": 5,
        "exitcode": 66,
        "report_signal_unsafe": 0,
        "second_deadlock_stack": 1,
    }
    environment = {
        **os.environ,
        "LD_PRELOAD": libtsan(),
        "TSAN_OPTIONS": " ".join(f"{name}={value}" for name, value in options.items()),
        "OMP_NUM_THREADS": "1",
    }
    # Randomised addresses can collide with the shadow memory.
    command = ["setarch", "-R", sys.executable, __file__, "--inside", PROGRAMS, "--inline", str(seed), *arguments]
    command += ["--limit", str(seconds)]
    return subprocess.run(command, env=environment, check=False).returncode


def race_of(report: str) -> str:
    """Name a report by its kind and our innermost lines."""
    kind = re.search(r"ThreadSanitizer: (.+?) \(pid", report)
    stacks = re.split(r"\n\s*\n", report)
    lines = [f"{m[1].split('(')[0][-40:]} {m[2]}" for m in map(FRAME.search, stacks) if m]
    return f"{kind[1] if kind else 'report'}: {' | '.join(lines[:2])}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Look for data races in native code.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds of the programs (default: 0 1)")
    parser.add_argument("--seconds", type=int, default=240, help="time limit of a program in seconds (default: 240)")
    parser.add_argument("programs", nargs="*", help="arguments of thread_programs.py, after --")
    options = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = str(FOLDER)
    build()
    shutil.rmtree(FOLDER / "reports", ignore_errors=True)
    (FOLDER / "reports").mkdir()
    kinds = [options.programs] if options.programs else [["--roles", *roles] for roles in ROLES]
    for arguments in kinds:
        for seed in options.seeds:
            print(f"seed {seed} {' '.join(arguments)}: exit status {run(seed, arguments, options.seconds)}", flush=True)
    races: collections.Counter[str] = collections.Counter()
    for path in (FOLDER / "reports").iterdir():
        races.update(map(race_of, path.read_text(errors="replace").split("==================\n")[1::2]))
    for race, count in races.most_common():
        print(f"{count:4} {race}")
    print(f"{races.total()} reports of {len(races)} kinds, in {FOLDER / 'reports'}")
    return bool(races)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        instrument()
        sys.path.insert(0, str(PROGRAMS.parent))
        import thread_programs  # type: ignore[import-not-found] - in tests/torch_cpu

        sys.exit(thread_programs.main(sys.argv[3:]))
    sys.exit(main())
