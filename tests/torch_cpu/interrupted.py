"""Interrupt training at random moments, in a separate process because it may crash.

Each round compiles a step over a new model and makes its first three calls. A SIGINT arrives at a random moment of one
call, sometimes followed by a second. The model must match the note on the exception, later calls must succeed, and the
final model must equal that of eager PyTorch.

With ``--stage`` SIGINTs arrive in that stage of a first call, and the closed step must leave no resources.

    python tests/torch_cpu/interrupted.py --seed 7 --rounds 20 --cache none
    python tests/torch_cpu/interrupted.py --rounds 20 --stage "measure copies"

Prints one line of JSON for each round; exits with 1 if a round failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import failing_model

import outofcore

CALLS = 3
# Interrupts per round with --stage.
MAX_INTERRUPTS = 4
# Texts in the note of an exception for the three states of the model.
UNCHANGED, DONE, TORN = "as they were before this step", "step has been made", "part old and part new"


@dataclass
class Round:
    seed: int
    call: int  # the interrupted call
    after_s: float
    twice: bool
    stage: str = ""  # of the first call; "": any moment
    interrupts: int = 0  # KeyboardInterrupts raised
    told: str = ""  # the note
    where: str = ""  # the innermost frames in the library
    faults: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)  # seconds of each stage of the first completed call


def eager_contents() -> list[dict[str, torch.Tensor]]:
    model, optimizer, step = failing_model.build_sides()
    snapshots = [failing_model.contents(model, optimizer)]
    for k in range(CALLS):
        torch.manual_seed(k)
        step(failing_model.batch(k))
        snapshots.append(failing_model.contents(model, optimizer))
    return snapshots


def have_equal_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)


def run_round(round_: Round, expected: list[dict[str, torch.Tensor]], options: dict[str, Any]) -> list[float]:
    """Make the calls of one round and return the seconds of each."""
    model, optimizer, step = failing_model.build_sides()
    seconds: list[float] = []
    completed = 0
    with outofcore.compile(step, model, optimizer, **options) as ours:
        tries = MAX_INTERRUPTS if round_.stage else 1
        while completed < CALLS:
            torch.manual_seed(completed)
            batch = failing_model.batch(completed)
            killer = None
            began = threading.Event()
            stages: list[tuple[str, float]] = []  # name and start time
            ours.on_progress = functools.partial(_record_stage, stages, began, round_.stage)
            if not round_.stage:
                began.set()
            if completed == round_.call and tries:
                tries -= 1
                killer = threading.Thread(target=_interrupt, args=(began, round_.after_s, round_.twice), daemon=True)
            begin = time.perf_counter()
            error: BaseException | None = None
            try:
                if killer is not None:
                    killer.start()
                ours(batch)
                began.set()  # if the stage did not occur
                if killer is not None:
                    killer.join()
                    time.sleep(0.01)
            except BaseException as caught:
                error = caught
            began.set()
            if killer is not None:
                _join_killer(killer)
            seconds.append(time.perf_counter() - begin)
            if completed == 0 and error is None and stages:  # empty if the plan was made before an interrupt
                ends = [at for _, at in stages[1:]] + [time.perf_counter()]
                round_.stages = {stage: end - at for (stage, at), end in zip(stages, ends, strict=True)}
            if error is None:
                ours._session.keeper.check_invariants()
                completed += 1
                continue
            round_.interrupts += isinstance(error, KeyboardInterrupt)
            # Heap corruption shows when memory is allocated.
            _ = [torch.empty(count) for count in range(1, 1 << 18, 4099)]
            completed = completed_calls(round_, error, model, optimizer, expected, completed)
            if round_.faults or TORN in round_.told:
                return seconds
        if not have_equal_bits(failing_model.contents(model, optimizer), expected[CALLS]):
            round_.faults.append("the model is not as eager training leaves it")
    return seconds


def _join_killer(killer: threading.Thread) -> None:
    """Wait until no more signals arrive."""
    for _ in range(3):  # a signal may come while another one is handled
        with contextlib.suppress(KeyboardInterrupt):
            killer.join()
            time.sleep(0.01)


def _record_stage(
    stages: list[tuple[str, float]], began: threading.Event, stage_to_interrupt: str, stage: str, *_: object
) -> None:
    if not stages or stages[-1][0] != stage:
        stages.append((stage, time.perf_counter()))
    if stage == stage_to_interrupt:
        began.set()


def _interrupt(began: threading.Event, after_s: float, twice: bool) -> None:
    began.wait()
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGINT)
    if twice:
        time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)


def count_resources(folder: str) -> tuple[int, int, int]:
    names = [name for _, _, files in os.walk(folder) for name in files]
    return threading.active_count(), len(names), len(list(Path("/proc/self/fd").iterdir()))


def completed_calls(
    round_: Round,
    error: BaseException,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    expected: list[dict[str, torch.Tensor]],
    completed: int,
) -> int:
    """Return the number of completed calls after an interrupted one."""
    round_.told = " ".join(getattr(error, "__notes__", ()))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "outofcore" in f.filename]
    round_.where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-4:]))
    if not isinstance(error, KeyboardInterrupt):
        round_.faults.append(f"{type(error).__name__}: {error}")
    now = failing_model.contents(model, optimizer)
    if TORN in round_.told:
        return completed
    if DONE in round_.told or UNCHANGED in round_.told:
        completed += DONE in round_.told
        if not have_equal_bits(now, expected[completed]):
            round_.faults.append("the model does not match the note")
        return completed
    # An interrupt at the borders of the call has no note.
    if len(frames) > 1:
        round_.faults.append("there is no note")
    if have_equal_bits(now, expected[completed]):
        return completed
    if completed < CALLS and have_equal_bits(now, expected[completed + 1]):
        return completed + 1
    round_.faults.append("the model is not in the state before the step or after it")
    return completed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", default="none", help="Cache folder, or 'none'.")
    parser.add_argument("--policy", default="offload-all")
    parser.add_argument("--share", type=float, default=1.0, help="Budget as a multiple of the smallest.")
    parser.add_argument("--only", type=int, default=None, help="Index of the call to interrupt.")
    parser.add_argument("--stage", default="", help="Interrupt only in this stage of the first call.")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    expected = eager_contents()
    smallest = failing_model.smallest_budget()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "budget": int(smallest * args.share),
            "home": folder,
            "policy": args.policy,
            "cache": False if args.cache == "none" else args.cache,
        }
        quiet = Round(args.seed, -1, 0.0, False)
        lengths = run_round(quiet, expected, options)
        if args.cache != "none":
            lengths = run_round(quiet, expected, options)  # with cached measurements
        print(json.dumps({"seconds": lengths, "faults": quiet.faults}), flush=True)
        before = count_resources(folder)
        for number in range(args.rounds):
            seed = args.seed * 1_000_003 + number
            draw = random.Random(seed)
            call = draw.randrange(CALLS) if args.only is None else args.only
            round_ = Round(seed, call, draw.uniform(0.0, 1.05) * lengths[call], draw.random() < 0.25)
            if args.stage:
                round_ = Round(seed, 0, draw.uniform(0.0, 0.9) * quiet.stages[args.stage], False, args.stage)
            run_round(round_, expected, options)
            if args.stage and count_resources(folder) != before:
                round_.faults.append(f"threads, files, descriptors: {count_resources(folder)} after, {before} before")
            print(json.dumps(asdict(round_)), flush=True)
            bad += bool(round_.faults)
    return int(bad > 0 or bool(quiet.faults))


if __name__ == "__main__":
    sys.exit(main())
