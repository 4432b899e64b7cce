"""One process of an elastic training, started by torchrun: prints what its steps took, as JSON, if it is the first.

torchrun … _elastic_worker.py OPTIONS, where OPTIONS is JSON.
"""

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
        seen: list[dict[str, Any]] = []
        for _ in range(options["steps"]):
            batches = list(islice(stream, workers))
            run({worker: batches[worker] for worker in run.workers})
            seen.append(asdict(run.stats))
        found = hashlib.sha256()
        for tensor in model.state_dict().values():
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        everywhere = [told[options["warm_up"] :] for told in run._processes.gather(seen)]
    if run.rank == 0:
        steady = everywhere[0]
        turns = len(steady[0]["turn_seconds"])

        def slowest(what: Callable[[dict[str, Any]], float]) -> float:
            """The median of the process in which it is the greatest."""
            return max(statistics.median(what(one) for one in told) for told in everywhere)

        result = {
            "step_seconds": statistics.median(one["seconds"] for one in steady),
            # The first begins with what the update has left where it was, the second finds gradients.
            "turn_seconds": [statistics.median(one["turn_seconds"][k] for one in steady) for k in range(turns)],
            # All switches of a step together, in the process that they take longest in.
            "switch_seconds": slowest(lambda one: one["switch_seconds"]),
            "switch_share": slowest(lambda one: one["switch_seconds"] / one["seconds"]),
            "sum_seconds": statistics.median(one["sum_seconds"] for one in steady),
            "update_seconds": statistics.median(one["update_seconds"] for one in steady),
            "gradient_bytes": steady[-1]["gradient_bytes"],
            "bytes_sent": sum(told[-1]["bytes_sent"] for told in everywhere),
            "ring_bytes": steady[-1]["least_bytes"] * run.processes,
            "bits": found.hexdigest(),
        }
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
