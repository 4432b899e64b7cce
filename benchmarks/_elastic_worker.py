"""Train elastically in one process started by torchrun with JSON options; rank 0 prints its timings as JSON."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch

import outofcore
from outofcore import zoo


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    work = zoo.workload(options["model"], **options["options"])
    model = work.build()
    optimizer = work.optimizer(model)
    workers = options["workers"]
    stream = work.batches()
    with outofcore.elastic(
        work.make_turn(model),
        model,
        optimizer,
        workers=workers,
        budget=options["budget"],
        home=options["home"],
        update=work.make_update(model, optimizer),
    ) as run:
        recorded: list[dict[str, Any]] = []
        for _ in range(options["steps"]):
            batches = list(islice(stream, workers))
            run({worker: batches[worker] for worker in run.workers})
            recorded.append(asdict(run.stats))
        digest = hashlib.sha256()
        for tensor in model.state_dict().values():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        stats_by_process = [steps[options["warm_up"] :] for steps in run._processes.gather(recorded)]
    if run.rank == 0:
        steady = stats_by_process[0]
        turns = len(steady[0]["turn_seconds"])

        def slowest(value_of: Callable[[dict[str, Any]], float]) -> float:
            """Return the largest of the processes' medians."""
            return max(statistics.median(value_of(stats) for stats in steps) for steps in stats_by_process)

        result = {
            "step_seconds": statistics.median(stats["seconds"] for stats in steady),
            # The first turn begins with the data that the update left on the device; the second already has gradients.
            "turn_seconds": [statistics.median(stats["turn_seconds"][k] for stats in steady) for k in range(turns)],
            # All switches of a step, in the process with the largest sum.
            "switch_seconds": slowest(lambda stats: stats["switch_seconds"]),
            "switch_share": slowest(lambda stats: stats["switch_seconds"] / stats["seconds"]),
            "sum_seconds": statistics.median(stats["sum_seconds"] for stats in steady),
            "update_seconds": statistics.median(stats["update_seconds"] for stats in steady),
            "gradient_bytes": steady[-1]["gradient_bytes"],
            "bytes_sent": sum(steps[-1]["bytes_sent"] for steps in stats_by_process),
            "ring_bytes": steady[-1]["least_bytes"] * run.processes,
            "bits": digest.hexdigest(),
        }
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
