"""Logged training steps of DTR (Kirisame et al., ICLR 2021), from the repository ``uwsampl/dtr-prototype``.

``simrd/logs.zip`` contains eight steps logged on a Titan V. ``SLOWDOWNS`` are results of its simulator for h_DTR, run
as in ``run_pareto_paper`` at commit eff53cc (``RuntimeV2EagerOptimized`` with ``DTR()``). As in the simulator,
constants stay on the device, a mutating op creates a new storage, and offloading is impossible. Views are not ops, so
published seconds are the slowdown times the seconds of our ops. One difference favours us: a storage is free after its
last use, not when the program releases it. The peak differs by up to 5 %, and by a quarter in both LSTMs.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from instances.sources import Clone, Instance

from outofcore.costs import Costs, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile

REPOSITORY = "dtr-prototype"
_SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # of the peak
# Peak in bytes, and the slowdowns at the shares that the simulator completes within twice the time.
SLOWDOWNS = {
    "DenseNet-121 (84)": (11_020_749_360, (1.10356, 1.14139, 1.17635, 1.27145, 1.44648, 1.67943)),
    "InceptionV4 (64)": (11_245_348_984, (1.04979, 1.06841, 1.09187, 1.13056, 1.21892)),
    "ResNet-32 (56)": (10_061_179_152, (1.04626, 1.07367, 1.10678, 1.14039, 1.17825, 1.37108)),
    "Transformer (10)": (9_864_405_000, (1.03138, 1.04424, 1.0584, 1.08319, 1.12343, 1.35166)),
    "U-Net (6)": (8_415_764_640, (1.08458, 1.1308, 1.15875)),
    "TreeLSTM (D.6)": (170_173_608, (1.03409, 1.07545, 1.12309, 1.17331, 1.40137, 1.52952)),
    "LSTM (512)": (5_595_127_736, (1.03198, 1.04168, 1.06506, 1.14337, 1.30054, 1.59846)),
    "Unrolled GAN": (252_677_418, (1.04397, 1.05642, 1.06663, 1.07939, 1.20559)),
}
CASES = {
    f"{name}, {share:g}": (name, int(peak * share), slowdown)
    for name, (peak, points) in SLOWDOWNS.items()
    for share, slowdown in zip(_SHARES, points, strict=False)
}


def convert_log(lines: Iterable[Mapping[str, Any]]) -> GraphFile:
    """Convert a log to a graph, starting at the last mark of a step's start."""
    log = list(lines)
    starts = [i for i, line in enumerate(log) if line.get("ANNOTATION") == "START"]
    sizes = {line["NAME"]: int(line["MEMORY"]) for line in log if line["INSTRUCTION"] == "MEMORY"}
    aliases = {line["NAME"]: int(line["ALIAS"]) for line in log if line["INSTRUCTION"] == "ALIAS"}
    storages: list[Storage] = []
    ops: list[Op] = []
    costs: list[OpCost] = []
    of_name: dict[str, int] = {}
    references: Counter[int] = Counter()

    def make(size: int, kind: StorageKind) -> int:
        storages.append(Storage(len(storages), size, kind))
        return len(storages) - 1

    def point(name: str, storage: int) -> None:
        if name in of_name:
            references[of_name[name]] -= 1
        of_name[name] = storage
        references[storage] += 1

    for line in log[starts[-1] + 1 if starts else 0 :]:
        match line["INSTRUCTION"]:
            case "CONSTANT":
                point(line["NAME"], make(sizes[line["NAME"]], StorageKind.PARAMETER))
            case "COPY" | "COPY_FROM":
                point(line["DST"], of_name[line["SRC"]])
            case "RELEASE" if line["NAME"] in of_name:
                references[of_name.pop(line["NAME"])] -= 1
            case "CALL" | "MUTATE":
                arguments = [of_name[name] for name in line["ARGS"]]
                if line["INSTRUCTION"] == "MUTATE":
                    created_by_name = {
                        line["ARGS"][i]: make(storages[arguments[i]].bytes, StorageKind.ACTIVATION)
                        for i in line["MUTATE"]
                    }
                    aliased = {}
                else:
                    fresh = [name for name in line["RESULT"] if aliases[name] < 0]
                    created_by_name = {name: make(sizes[name], StorageKind.ACTIVATION) for name in fresh}
                    aliased = {name: arguments[aliases[name]] for name in line["RESULT"] if aliases[name] >= 0}
                for name, storage in (created_by_name | aliased).items():
                    point(name, storage)
                if created_by_name:
                    ops.append(
                        Op(len(ops), line["NAME"], tuple(dict.fromkeys(arguments)), (), tuple(created_by_name.values()))
                    )
                    costs.append(OpCost(int(line["TIME"]) / 1e9))
            case _:
                pass
    created = {storage for op in ops for storage in op.creates}
    graph = StepGraph(tuple(storages), tuple(ops), tuple(s for s, n in references.items() if n > 0 and s in created))
    graph.check()
    return GraphFile.of(graph, Costs(tuple(costs)))


def read_instance(clone: Clone, case: str) -> Instance:
    """Read one of ``CASES``, with the step time of DTR's slowdown."""
    name, budget, slowdown = CASES[case]
    with zipfile.ZipFile(io.BytesIO(clone.read("simrd/logs.zip"))) as archive:
        models = json.loads(archive.read("logs/manifest.json"))["models"]
        log = archive.read(next(model["log"] for model in models if model["name"] == name))
    file = convert_log(map(json.loads, log.splitlines()))
    return Instance(case, budget, file, {"h_DTR": slowdown * file.costs.compute_seconds})
