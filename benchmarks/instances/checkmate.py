"""Steps with Checkmate's and MONeT's published schedules, from the repository ``utsaslab/monet-schedules``.

MONeT's authors (Shah et al., ICLR 2021) ran Checkmate's integer program (Jain et al., MLSys 2020) on five networks for
up to 24 hours each. Checkmate's model of a step: each node is an op that creates one storage, without workspaces. Sizes
are rounded to KiB, times to 10 µs. Parameters, gradients and the input are subtracted from the budget; offloading is
impossible. Unlike ours, its plans have no addresses. For GoogleNet, the objectives are read from the solver's logs;
MONeT's solutions may run ReLU in place but use no other operator implementations.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from instances.sources import Clone, Instance

from outofcore.costs import Costs, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile

REPOSITORY = "monet-schedules"
# Folder and file of each network, and the budgets in GiB for which the solver found a schedule.
_NETWORKS = {
    "MobileNetV2": ("mobilenet_272", "mobilenet_v2_272", range(5, 11)),
    "ResNet-50": ("r50_184", "resnet50_184", range(5, 11)),
    "U-Net": ("unet_11", "un_11", range(5, 11)),
    "VGG-16": ("vgg16_176", "vgg16_176", range(8, 11)),
}
_TICKS = 100_000  # the solver's time units per second
_OBJECTIVE = re.compile(r"^Best objective ([0-9.e+]+), best bound ([0-9.e+]+)", re.MULTILINE)

CASES = {f"{network} {gib} GB": (network, gib) for network, (_, _, budgets) in _NETWORKS.items() for gib in budgets}
GOOGLENET_CASES = {f"GoogleNet {gib} GB": gib for gib in range(5, 11)}


class Inert:
    """A stub for an object of any foreign class: it stores state and has no behaviour."""

    def __new__(cls, *_: object) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Dtype(Inert):
    """A stub for a numpy dtype, such as "f8"."""

    def __new__(cls, code: str, *_: object) -> _Dtype:
        dtype = object.__new__(cls)
        dtype.__dict__["code"] = code
        return dtype


def _decode_scalar(dtype: _Dtype, data: bytes) -> float:
    return struct.unpack({"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i"}[dtype.__dict__["code"]], data)[0]


def _make_array(*_: object) -> Inert:
    return Inert()


def _make_nested(_: type, name: str) -> type[Inert]:
    """Replace ``getattr``, with which pickles look up nested classes."""
    return type(name, (Inert,), {})


_HARMLESS: dict[tuple[str, str], Any] = {
    ("builtins", "set"): set,
    ("builtins", "list"): list,
    ("builtins", "getattr"): _make_nested,
    ("collections", "defaultdict"): defaultdict,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): Inert,
    ("numpy.core.multiarray", "scalar"): _decode_scalar,
    ("numpy.core.multiarray", "_reconstruct"): _make_array,
}
_FOREIGN = re.compile(r"(monet|checkmate)\.[\w.]+|__main__")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        harmless = _HARMLESS.get((module_name, global_name))
        if harmless is not None:
            return harmless
        if _FOREIGN.fullmatch(module_name) and global_name.isidentifier():
            return type(global_name, (Inert,), {})
        raise pickle.UnpicklingError(f"the pickle refers to {module_name}.{global_name}, which is not allowed")


def load_pickle(data: bytes) -> Any:
    """Load a pickle of MONeT's without running its code; foreign objects become ``Inert``.

    Raises UnpicklingError if it refers to anything but MONeT's classes, arrays and plain containers.
    """
    return _Unpickler(io.BytesIO(data)).load()


def make_graph(nodes: Mapping[int, Any], edges: Sequence[Sequence[int]], milliseconds: Sequence[float]) -> GraphFile:
    reads: dict[int, dict[int, None]] = {node: {} for node in nodes}
    for source, node, *_ in edges:
        reads[node][source] = None
    storages = tuple(Storage(k, round(nodes[k].mem / 1024) * 1024, StorageKind.ACTIVATION) for k in sorted(nodes))
    ops = tuple(Op(k, str(nodes[k].op), tuple(reads[k]), (), (k,)) for k in sorted(nodes))
    graph = StepGraph(storages, ops)
    graph.check()
    return GraphFile.of(graph, Costs(tuple(OpCost(round(duration * 100) / _TICKS) for duration in milliseconds)))


def _compute_budget(gib: int, nodes: Mapping[int, Any]) -> int:
    """Return the bytes that the solver's budget leaves for results of ops."""
    return (gib << 30) - round(nodes[max(nodes)].fixed_mem / 1024) * 1024


def read_instance(clone: Clone, case: str) -> Instance:
    """Read one of ``CASES``, with the step time of Checkmate's schedule."""
    network, gib = CASES[case]
    folder, file, _ = _NETWORKS[network]
    name = f"checkmate_{folder}_24hr/checkmate_solution_{file}_normal_{gib}.00.pkl"
    problem, solution = load_pickle(clone.read(name))
    nodes = problem.nodes
    graph_file = make_graph(nodes, problem.edge_list, [nodes[k].workspace_compute[0] for k in sorted(nodes)])
    return Instance(case, _compute_budget(gib, nodes), graph_file, {"Checkmate": solution.runtime_expected / _TICKS})


def read_googlenet(clone: Clone, case: str) -> Instance:
    """Read one of ``GOOGLENET_CASES``, with MONeT's step time, and Checkmate's where it found a schedule."""
    gib = GOOGLENET_CASES[case]
    problem, solution = load_pickle(
        clone.read(f"monet_googlenet_320_24hr/solution_googlenet_320_inplace_normal_{gib}.00.pkl")
    )
    _, milliseconds, *_ = load_pickle(clone.read("cost_googlenet_320_normal.pkl"))
    nodes = problem.nodes
    graph_file = make_graph(nodes, problem.edge_list, [milliseconds[k][0] for k in sorted(nodes)])
    log = clone.read(f"checkmate_googlenet_320_24hr/checkmate_googlenet_normal_320_{gib:02}").decode()
    solved = _OBJECTIVE.search(log)
    published = {"Checkmate": float(solved[1]) / _TICKS} if solved else {}
    published["MONeT, ReLU in place"] = float(solution.runtime_expected) / _TICKS
    return replace(Instance(case, _compute_budget(gib, nodes), graph_file), published=published)
