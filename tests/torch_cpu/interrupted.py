"""Processes that get Ctrl-C at random moments while they measure ops or a link, and then train.

python tests/torch_cpu/interrupted.py 100        # a hundred processes, and what went wrong in how many of them
python tests/torch_cpu/interrupted.py 100 link   # likewise while the link to a disk is measured
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import outofcore

# The stage of a first call that an interrupt comes in, and seconds within which it comes.
PHASES = {"ops": ("profile", 0.6), "link": ("measure the home", 1.2)}
_TRIES = 4
_SECONDS = 150


def train_interrupted(phase: str, seed: int) -> int:
    """Interrupt first calls in a phase of theirs, then train as eager does; the number of interrupts.

    Raises:
        RuntimeError: a thread, a file or a descriptor is left behind, or the numbers differ.
    """
    stage, within = PHASES[phase]
    rng = random.Random(seed)
    torch.set_num_threads(2)

    def world():
        torch.manual_seed(0)
        body = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())
        model = nn.Sequential(*body, nn.Linear(1024, 256))
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x):
            loss = F.mse_loss(model(x), torch.zeros(x.shape[0], 256))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, model, optimizer

    batch = torch.randn(16, 3, 34, 34)
    plain, *_ = world()
    wanted = [plain(batch).detach() for _ in range(2)]
    main = threading.main_thread().ident
    interrupts = 0
    with tempfile.TemporaryDirectory() as folder:

        def compiled():
            return outofcore.compile(*world(), budget="64MiB", home=folder, cache=False)

        def left_behind() -> tuple[int, int, int]:
            names = [name for _, _, files in os.walk(folder) for name in files]
            return threading.active_count(), len(names), len(list(Path("/proc/self/fd").iterdir()))

        with compiled() as first:
            assert torch.equal(first(batch).detach(), wanted[0])
        before = left_behind()
        with compiled() as step:
            for _ in range(_TRIES):
                lock, began, over = threading.Lock(), threading.Event(), []
                step.on_progress = lambda now, *_, began=began: began.set() if now == stage else None

                def interrupt(lock=lock, began=began, over=over) -> None:
                    began.wait()
                    time.sleep(rng.random() * within)
                    with lock:
                        if not over:
                            signal.pthread_kill(main, signal.SIGINT)

                other = threading.Thread(target=interrupt)
                other.start()
                try:
                    step(batch)
                    with lock:
                        over.append(True)
                except KeyboardInterrupt:
                    interrupts += 1
                began.set()
                other.join()
                # What the heap has suffered shows when it is used.
                del other
                _ = [torch.randn(rng.randrange(1, 1 << 18)) for _ in range(64)]
        with compiled() as again:
            if not all(torch.equal(again(batch).detach(), loss) for loss in wanted):
                raise RuntimeError("the losses differ from eager's")
        if left_behind() != before:
            raise RuntimeError(f"threads, files and descriptors: {left_behind()} after, {before} before")
    return interrupts


def run(phase: str, seed: int) -> tuple[int, str]:
    """The number of interrupts that one process got, and what went wrong.

    The process is a fork, so that torch is imported once.
    """
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            os.dup2(told.fileno(), 1)
            os.dup2(told.fileno(), 2)
            signal.alarm(_SECONDS)  # ends a process that hangs
            # A shell lets what it runs in the background ignore Ctrl-C.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.dump_traceback_later(_SECONDS - 5)
            print("interrupts", train_interrupted(phase, seed))
            sys.exit()
        _, status = os.waitpid(child, 0)
        told.seek(0)
        text = told.read()
    if status or "corrupt" in text or "double free" in text:
        return 0, f"exit status {os.waitstatus_to_exitcode(status)}: {text[-2000:]}"
    return int(text.split()[-1]), ""


if __name__ == "__main__":
    start = time.monotonic()
    found = []
    for seed in range(int(sys.argv[1])):
        found.append(run((*sys.argv[2:], "ops")[0], seed))
        count, wrong = found[-1]
        print(f"seed {seed}: {wrong or f'{count} interrupts'}", flush=True)
    failed, count = sum(bool(wrong) for _, wrong in found), sum(number for number, _ in found)
    print(f"{failed} of {len(found)} went wrong; {count} interrupts; {time.monotonic() - start:.0f} s")
    sys.exit(failed > 0 or not count)
