"""Train one workload of a benchmark step by step, on commands from the parent process.

The argument is JSON: ``model`` (of the zoo, or "bert"), its ``options`` and a ``mode`` with its settings. Each line of
standard input is a command (``step``, ``report``, ``forget-peak``, ``picture PATH``), answered with a line of JSON on
standard output. Other output goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from _bert import workload
from _blocks import checkpoint_blocks, checkpoint_chains

import outofcore
from outofcore.cli.subjects import plain_step, subject_of
from outofcore.errors import OutOfCoreError
from outofcore.execution.arena import Arena
from outofcore.execution.opening import open_backend
from outofcore.follow import loop_planner
from outofcore.follow.native import load_paging
from outofcore.planning.parameters import SearchParams
from outofcore.policies import Auto
from outofcore.report import Page, page_content, step_report, write_report
from outofcore.report.machine import peak_memory_bytes, resident_memory_bytes
from outofcore.units import KIB
from outofcore.zoo import Workload

Answer = dict[str, Any]


def _start_loop(model: torch.nn.Module, spec: dict[str, Any]) -> outofcore.Loop:
    """Start a loop with policy "auto", "moves" (no recomputation), "unplaced", "demand" (no plan) or "late"."""
    policy: Any = "auto"
    match spec["policy"]:
        case "moves":
            policy = Auto(SearchParams(recompute_changes=0))
        case "unplaced":
            schedule_of = loop_planner.schedule_of
            loop_planner.schedule_of = lambda *args: dataclasses.replace(schedule_of(*args), offsets=(), scratch=())
        case "demand" | "late":
            policy = None
    loop = outofcore.budget(spec["budget"], model, home=spec["home"], policy=policy, cache=False).start()
    if spec["policy"] == "late":
        load_paging().follow_ahead(loop._space, 0)
    return loop


class _Training:
    def __init__(self, work: Workload, spec: dict[str, Any]) -> None:
        self._work = work
        open_backend(None)  # prepares MKL; without it, two plain processes would differ in bits
        torch.manual_seed(work.options.seed)  # for dropout, the same in every mode
        self._batches = work.batches()
        model = work.build()
        optimizer = work.optimizer(model)
        self._run: Callable[..., torch.Tensor] = work.make_step(model, optimizer)
        self._step: outofcore.Step | None = None
        self._loop: outofcore.Loop | None = None
        match spec["mode"]:
            case "checkpoint":
                checkpoint_blocks(model)
            case "sequential":
                checkpoint_chains(model, spec["segments"])
            case "compile":
                from torch._functorch import config  # noqa: PLC0415 - slow to import, used only in this mode

                config.activation_memory_budget = spec["share"]
                model.compile()
            case "outofcore":
                self._step = outofcore.compile(
                    self._run,
                    model,
                    optimizer,
                    budget=spec["budget"],
                    home=spec["home"],
                    policy=spec["policy"],
                    kernels=spec["kernels"],
                )
                self._run = self._step
            case "followed":
                self._loop = _start_loop(model, spec)

    def step(self) -> Answer:
        batch = next(self._batches)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start, processor = time.perf_counter(), time.process_time()
        loss = self._run(*batch)
        seconds, processor = time.perf_counter() - start, time.process_time() - processor
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        answer: Answer = {
            "loss": loss.item().hex(),
            "seconds": seconds,
            "processor_seconds": processor,
            "faults": faults,
        }
        answer["length"] = batch[0].shape[-1]
        if self._loop is not None:
            answer |= asdict(self._loop.stats)
        if self._step is not None:
            answer |= {key: value for key, value in asdict(self._step.stats).items() if key != "seconds"}
        return answer

    def report(self) -> Answer:
        answer: Answer = {"rss": resident_memory_bytes(), "peak_rss": peak_memory_bytes()}
        if self._step is not None:
            planned, graph = self._step.planned, self._step.captured.graph
            report = step_report(graph, planned.plan, planned.program, self._step.timeline, self._step.budget)
            moved = [{**asdict(m), "kind": m.kind.value} for m in report.moved]
            answer["plan"] = {**asdict(report), "moved": moved}
            arena = self._step._session.steps.arena
            if isinstance(arena, Arena):
                answer["arena_rss"] = _resident_bytes(arena.address, arena.bytes)
        return answer

    def forget_peak(self) -> Answer:
        peak = peak_memory_bytes()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return {"peak_rss": peak}

    def picture(self, path: Path) -> Answer:
        step = self._step
        if step is None:
            return {}
        timelines = [("measured", step.timeline), ("predicted", step.planned.timeline)]
        graph, planned, title = step.captured.graph, step.planned, self._work.describe()
        page = page_content(graph, planned.plan, planned.program, timelines, Page(title, step.budget))
        write_report(path, page)
        return {"picture": str(path)}

    def close(self) -> None:
        if self._step is not None:
            self._step.close()
        if self._loop is not None:
            self._loop.stop()


def _resident_bytes(address: int, count: int) -> int:
    """Return the resident bytes of an address range from ``/proc/self/smaps``."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, _, tail = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, _, end = first.partition("-")
            inside = int(start, 16) < address + count and int(end, 16) > address
        elif inside and first == "Rss:":
            resident += int(tail.split()[0]) * KIB
    return resident


def _serve(spec: dict[str, Any], answer: Callable[[Answer], None]) -> None:
    work = workload(spec["model"], spec["options"])
    facts: Answer = {"workload": work.describe(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    if spec["mode"] == "survey":
        subject = subject_of(plain_step(work), home=spec["home"])
        smallest = subject.smallest_budget
        if spec["kernels"] != "eager":
            model = work.build()
            optimizer = work.optimizer(model)
            inputs = {"inputs": next(work.batches()), "kernels": spec["kernels"]}
            smallest = outofcore.smallest_budget(work.make_step(model, optimizer), model, optimizer, **inputs)
        answer({**facts, "in_core_budget": subject.in_core_budget, "smallest_budget": smallest})
        return
    training = _Training(work, spec)
    answer(facts)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        match command:
            case "step":
                answer(training.step())
            case "report":
                answer(training.report())
            case "forget-peak":
                answer(training.forget_peak())
            case "picture":
                answer(training.picture(Path(argument)))
    training.close()


def main() -> None:
    # The pipe carries only answers; output of libraries goes to standard error.
    pipe: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def answer(content: Answer) -> None:
        print(json.dumps(content), file=pipe, flush=True)

    try:
        _serve(json.loads(sys.argv[1]), answer)
    except OutOfCoreError as error:
        answer({"error": f"{type(error).__name__}: {error}"})
    except Exception as error:  # compilers may raise any exception; the parent records it
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
