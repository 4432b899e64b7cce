"""Run the pairs of a model and record step, plan, smallest budget and bits; started by ``record.py``."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record_costs import costs_digest, digest, fixed_costs, graph_digest, variant_of
from record_models import SEED, Training
from record_pairs import GROUPS, Group, Pair
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outofcore
from outofcore.analysis import is_large
from outofcore.analysis.gaps import gaps_of
from outofcore.capture import capture_step
from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Residency
from outofcore.planning import QUICK, Planned, SearchParams, plan_step, smallest_budget
from outofcore.policies import Auto
from outofcore.profiling.ops import profile_ops
from outofcore.program import CopyIn, CopyOut, Program, Run
from outofcore.report.machine import this_machine
from outofcore.transforms.passes import rewrite_for_lowest_memory
from outofcore.units import parse_bytes

# Steps of a compiled step and of a loop; a loop needs steps to be recorded and planned.
STEPS, LOOP_STEPS = 3, 6
PLAIN = "plain PyTorch"
_PACKAGES = ("torch", "numpy", "highspy", "transformers")

Entry = dict[str, Any]


def facts() -> dict[str, Any]:
    """Return the facts that bits, and possibly plans, depend on."""
    return {
        "cpu": this_machine().cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


@dataclass(frozen=True)
class Bits:
    """Losses of some steps and digests of all resulting state."""

    losses: tuple[float, ...]
    losses_digest: str
    state_digest: str


@dataclass
class PairRecorder:
    """Records the pairs of one model; ``plain`` builds the training for plain PyTorch."""

    make: Callable[[], Training]
    plain: Callable[[], Training]
    shard: bool = False
    _plain_bits: dict[int, Bits] = field(default_factory=dict[int, Bits])
    _own_bits: dict[tuple[str, str], tuple[str, Bits]] = field(default_factory=dict[tuple[str, str], tuple[str, Bits]])
    _smallest: dict[str, int] = field(default_factory=dict[str, int])

    def record(self, pair: Pair) -> Entry:
        match pair.mode:
            case "compile":
                return self._record_compiled(pair)
            case "budget":
                return self._record_loop(pair)
            case "plan without a home":
                return self._record_plan(pair)

    def _record_compiled(self, pair: Pair) -> Entry:
        with fixed_costs():
            training = self.make()
            home = pair.home.rpartition(" ")[2]
            # Without a limit, host memory would depend on the machine.
            host_budget = pair.home.removeprefix("host ").removesuffix(", disk") if "," in pair.home else "1GiB"
            step = outofcore.compile(
                training.step,
                training.model,
                training.optimizer,
                budget=pair.budget,
                home=home,
                host_budget=host_budget if home == "host" or "," in pair.home else None,
                policy=Auto(search_of(pair)),
                cache=False,
                shard=self.shard or None,
                kernels=pair.kernels,
                split=pair.split,
            )
            torch.manual_seed(SEED)
            losses = [step(*next(training.batches)).detach().clone() for _ in range(STEPS)]
            shown = step._session.steps.last_step
            assert shown is not None
            entry = {
                "variant": variant_of(shown),
                **step_of(shown.graph, shown.costs),
                "plan": plan_of(shown.graph, shown.planned),
                "input_signatures": step._session.signature_count,
            }
            step.close()
            bits = bits_of(training, losses)
            if self.shard:
                entry["smallest_budget"] = smallest_budget(shown.graph, shown.costs)
            else:
                entry["smallest_budget"] = self._smallest_of(pair)
        entry["bits"] = self._compare_bits(pair, bits, STEPS)
        return entry

    def _smallest_of(self, pair: Pair) -> int:
        key = f"{pair.kernels}, {pair.split}"
        if key not in self._smallest:
            training = self.make()
            self._smallest[key] = outofcore.smallest_budget(
                training.step,
                training.model,
                training.optimizer,
                inputs=next(training.batches),
                cache=False,
                kernels=pair.kernels,
                split=pair.split,
            )
        return self._smallest[key]

    def _record_loop(self, pair: Pair) -> Entry:
        with fixed_costs() as observed:
            training = self.make()
            policy = Auto(search_of(pair))
            torch.manual_seed(SEED)
            with outofcore.budget(pair.budget, training.model, policy=policy, cache=False) as run:
                losses = [training.step(*next(training.batches)).detach().clone() for _ in range(LOOP_STEPS)]
            bits, stats = bits_of(training, losses), run.stats
        record, answer = observed.loops[-1]
        entry = {
            "variant": "eager loop",
            **step_of(record.graph, record.costs),
            "plan": answer.reason if answer.planned is None else plan_of(record.graph, answer.planned),
            "plans": len(observed.loops),
            "reruns": stats.reruns > 0,
            "smallest_budget": smallest_budget(record.graph, record.costs),
        }
        entry["bits"] = self._compare_bits(pair, bits, LOOP_STEPS)
        return entry

    def _record_plan(self, pair: Pair) -> Entry:
        with fixed_costs():
            training = self.make()
            captured = rewrite_for_lowest_memory(
                capture_step(training.step, [training.model], [training.optimizer], next(training.batches), {})
            )
            profiles = profile_ops(captured)
        costs = Costs(tuple(profile.cost for profile in profiles))
        planned = plan_step(captured.graph, costs, parse_bytes(pair.budget), Auto(search_of(pair)))
        if pair.mode not in self._smallest:
            self._smallest[pair.mode] = smallest_budget(captured.graph, costs)
        return {
            "variant": "lowest memory",
            **step_of(captured.graph, costs),
            "plan": plan_of(captured.graph, planned),
            "smallest_budget": self._smallest[pair.mode],
        }

    def _compare_bits(self, pair: Pair, bits: Bits, steps: int) -> Entry:
        """Return the bits, and the run with equal bits: plain PyTorch, or an earlier pair of the same kind."""
        if steps not in self._plain_bits:
            training = self.plain()
            torch.manual_seed(SEED)
            losses = [training.step(*next(training.batches)).detach().clone() for _ in range(steps)]
            self._plain_bits[steps] = bits_of(training, losses)
        equal_to = PLAIN if bits == self._plain_bits[steps] else "nothing"
        if equal_to != PLAIN and (pair.kernels != "eager" or pair.split == "close"):
            first, own_bits = self._own_bits.setdefault((pair.kernels, pair.split), (pair.name, bits))
            equal_to = "no other pair" if first == pair.name else first if bits == own_bits else "nothing"
        return {
            "equal_to": equal_to,
            "losses": [round(loss, 6) for loss in bits.losses],
            "losses_digest": bits.losses_digest,
            "state_digest": bits.state_digest,
        }


def search_of(pair: Pair) -> SearchParams:
    params = QUICK if pair.search == "quick" else SearchParams()
    return params if pair.mode != "budget" or pair.recompute else replace(params, recompute_changes=0)


def step_of(graph: StepGraph, costs: Costs) -> Entry:
    """Return the entries that describe a planned step."""
    return {
        "ops": len(graph.ops),
        "storages": len(graph.storages),
        "storage_bytes": sum(storage.bytes for storage in graph.storages),
        "scratch_bytes": sum(cost.workspace_bytes for cost in costs.ops),
        "ops_seconds": round_seconds(costs.compute_seconds),
        "graph_digest": graph_digest(graph),
        "costs_digest": costs_digest(costs),
    }


def plan_of(graph: StepGraph, planned: Planned) -> Entry:
    """Return a plan as readable numbers and digests."""
    plan, program = planned.plan, planned.program
    instructions = program.instructions
    copies = [instruction for instruction in instructions if isinstance(instruction, CopyOut | CopyIn)]
    gaps = sum(len(gaps_of(graph, s.id)) for s in graph.storages if is_large(s.bytes))
    residencies = [decision.residency for decision in plan.decisions]
    offloaded, recomputed = residencies.count(Residency.OFFLOAD), residencies.count(Residency.RECOMPUTE)
    return {
        "policy": plan.policy,
        "step_seconds": round_seconds(planned.timeline.step_seconds),
        "gaps_resident": gaps - offloaded - recomputed,
        "gaps_offloaded": offloaded,
        "gaps_recomputed": recomputed,
        "gradients_staying": len(plan.staying),
        "instructions": len(instructions),
        "ops_run_again": sum(isinstance(instruction, Run) and instruction.again for instruction in instructions),
        "copies_out": sum(isinstance(instruction, CopyOut) for instruction in copies),
        "copies_in": sum(isinstance(instruction, CopyIn) for instruction in copies),
        "copied_bytes": sum(program.blocks[instruction.block].bytes for instruction in copies),
        "arena_bytes": program.arena_bytes,
        "decisions_digest": digest(sorted(_decisions(planned))),
        "instructions_digest": digest(_instructions(program)),
        "addresses_digest": digest([(b.storage, b.bytes, b.born, b.dies, b.wraps, b.offset) for b in program.blocks]),
    }


def _decisions(planned: Planned) -> Iterator[str]:
    plan = planned.plan
    for d in plan.decisions:
        gap = f"{d.gap.storage} {d.gap.start} {d.gap.end}"
        yield f"gap {gap} {d.residency.value} {d.release_by} {d.fetch_at} {d.home}"
    yield from (f"stays {storage}" for storage in plan.staying)


def _instructions(program: Program) -> Iterator[str]:
    for step in program.instructions:
        waits = [(wait.queue.value, wait.count, wait.home) for wait in step.waits]
        if isinstance(step, Run):
            yield f"run {step.op} {step.blocks} {step.workspace} {step.again} {step.communicates} {waits}"
        else:
            yield f"{type(step).__name__} {step.block} {step.version} {step.home} {waits}"
    for name in ("results", "staying", "clean"):
        yield f"{name} {getattr(program, name)}"
    yield f"lodgings {[(lodging.storage, lodging.home) for lodging in program.lodgings]}"


def round_seconds(seconds: float) -> float:
    return float(f"{seconds:.9g}")


def bits_of(training: Training, losses: Sequence[torch.Tensor]) -> Bits:
    """Return digests of losses, parameters, buffers, gradients, optimizer state and the random generator."""
    plain = training.model.module if isinstance(training.model, DistributedDataParallel) else training.model
    state: dict[str, torch.Tensor] = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    state |= {f"gradient of {name}": p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for number, items in training.optimizer.state_dict()["state"].items():
        state |= {f"{name} of parameter {number}": torch.as_tensor(item) for name, item in items.items()}
    state["random generator"] = torch.get_rng_state()
    if dist.is_initialized():  # buffers differ between processes
        state = {name: tensor for name, tensor in state.items() if name not in dict(plain.named_buffers())}
    return Bits(
        tuple(loss.item() for loss in losses),
        tensors_digest({str(number): loss for number, loss in enumerate(losses)}),
        tensors_digest(state),
    )


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of all bytes of tensors, with names, types and shapes."""
    digest_of_bytes = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest_of_bytes.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest_of_bytes.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest_of_bytes.hexdigest()[:16]


def record_group(group: Group, names: Sequence[str] = ()) -> dict[str, Entry]:
    """Record the pairs of a group that runs in one process; ``names`` selects pairs."""
    recorder = PairRecorder(group.make, group.make)
    return {pair.name: recorder.record(pair) for pair in group.pairs if not names or pair.name in names}


def record_shared(group: Group, rank: int) -> dict[str, Entry]:
    """Record the pairs of a group as one of its processes; entries have the bits of all processes."""

    def replica(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=0.25)

    recorder = PairRecorder(partial(group.make, rank), partial(group.make, rank, replica), shard=True)
    entries = {pair.name: recorder.record(pair) for pair in group.pairs}
    for entry in entries.values():
        bits_of_ranks: list[Any] = [None] * group.processes
        dist.all_gather_object(bits_of_ranks, entry["bits"])
        entry["bits"] = {f"rank {number}": bits for number, bits in enumerate(bits_of_ranks)}
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the pairs of one model.")
    parser.add_argument("group", choices=list(GROUPS))
    parser.add_argument("out", type=Path, help="File for the result.")
    parser.add_argument("--rank", type=int, help="Rank of this process, if several share the model.")
    parser.add_argument("--store", help="File for the rendezvous of the processes.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Inductor's cache may contain kernels for other instruction sets.
    cache_key = f"{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
        Path(tempfile.gettempdir(), f"outofcore-record-{os.getuid()}-{cache_key}")
    )
    group = GROUPS[options.group]
    if options.rank is None:
        entries = record_group(group)
    else:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.store}",
            rank=options.rank,
            world_size=group.processes,
            timeout=timedelta(hours=1),
        )
        entries = record_shared(group, options.rank)
    if not options.rank:
        options.out.write_text(json.dumps({"recorded_with": facts(), "pairs": entries}, indent=2) + "\n")
    if options.rank is not None:
        # Threads of the process group could abort the interpreter at exit.
        os._exit(0)


if __name__ == "__main__":
    main()
