"""Find splits that change the bits of an op, by trials on this machine: ``find_mismatches``.

A library may use another kernel for fewer rows, which adds in another order. So each split is tried once per op family
on random numbers, whole against parts, and the verdict is cached.

A whole op beyond the budget is tried in a separate process, if the machine has twice the memory free. Otherwise two
ranges within the budget are tried, one at each end of the axis. That proves less: of 234 splits without a mismatch on
half of an op, 8 had one on the whole op. If not even a quarter of the op fits, the split is dropped.

Vectorized elementwise kernels may round the last elements of a range differently, and elements with gaps in memory. So
such operators are also tried on small pieces. Limits: a kernel that rounds differently only for rare numbers is not
detected. Separate trial processes have not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import pickle
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.analysis.chunks import extent, is_dense
from outofcore.capture.captured import Call, Ref, Value
from outofcore.capture.helpers import pack_work, receive_work
from outofcore.capture.operators import arguments_by_name, arrange_arguments, written_arguments
from outofcore.capture.patching import CAPTURE_LOCK
from outofcore.child_processes import start_process
from outofcore.execution.backend import Backend
from outofcore.profiling.cache import Cache
from outofcore.profiling.ops import op_shelf
from outofcore.profiling.scratch import set_runnable_integers
from outofcore.report.machine import available_memory_bytes
from outofcore.transforms.split.exactness import ExactnessCheck
from outofcore.transforms.split.rules import is_elementwise
from outofcore.transforms.split.tensors import dense_like, named_refs, with_tensors
from outofcore.transforms.split.ways import ArgumentName, Cut
from outofcore.units import MIB

_log = logging.getLogger("outofcore.profiling")

_SEED = 20_406
# Least elements per thread of an elementwise operator (GRAIN_SIZE of ATen/TensorIterator.h).
_THREAD_ELEMENTS = 32_768
# An upper bound of a kernel's vector length.
_MAX_VECTOR_LENGTH = 64
_SCRAP_ELEMENTS = 7  # elements, fewer than any kernel's vector length
_ALL_SCRAP_ELEMENTS = 1024 * _SCRAP_ELEMENTS  # elements of all scraps


@dataclass(frozen=True)
class _TrialEffort:
    """The limits of the trials of a split."""

    # Trials are repeated on new numbers until they reach one of these three.
    elements: int = 4096  # compared
    bytes: int = 64 * MIB  # of arguments and results
    draws: int = 64
    max_placings: int = 8  # largest number of combinations of arguments in place and in their own memory
    min_share: float = 0.25  # smallest fraction of an op that may stand for it


_EFFORT = _TrialEffort()
# Part of PyTorch's error message when memory runs out.
_NO_MEMORY = "DefaultCPUAllocator"
# Integer types by size, to compare bits.
_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TrialRange:
    """The range ``low:high`` of an op's axis that a trial runs as a whole, and the parts to compare with it."""

    low: int
    high: int
    parts: tuple[tuple[int, int], ...]


def find_mismatches(
    checks: Sequence[ExactnessCheck],
    values: Sequence[Value],
    backend: Backend,
    max_bytes: int,
    cache: Cache | None = None,
) -> frozenset[str]:
    """Run exactness checks and return the keys of failed checks; ``max_bytes`` limits memory in this process."""
    shelf = None if cache is None else op_shelf(cache, backend.facts(), kind="parts")
    verdicts = _Verdicts(values, backend.device, {} if shelf is None else shelf.read())
    for check in checks:
        if verdicts.is_known(check) or _fits(check, values, _whole_range(check), max_bytes):
            verdicts.run_here(check, (_whole_range(check),))
    large_checks = [check for check in checks if check.key not in verdicts.holds]
    if large_checks:
        # Otherwise the processes of a machine would all use the memory at once.
        with contextlib.nullcontext() if shelf is None else shelf.take_turn():
            verdicts.cached |= {} if shelf is None else shelf.read()
            verdicts.run_in_process(large_checks)
            if shelf is not None:
                shelf.write(verdicts.new)
        for check in large_checks:
            if check.key not in verdicts.holds:
                verdicts.run_here(check, choose_trial_ranges(check, values, max_bytes))
    if shelf is not None:
        shelf.write(verdicts.new)
    mismatches = frozenset(key for key, holds in verdicts.holds.items() if not holds)
    for key in sorted(mismatches):
        _log.info("mismatch: the parts do not give the bits of the whole op: %s", key)
    return mismatches


@dataclass
class _Verdicts:
    """Collects verdicts of exactness checks: ``holds`` by check, ``cached`` and ``new`` by key in the cache."""

    values: Sequence[Value]
    device: torch.device
    cached: dict[str, object]
    new: dict[str, object] = field(default_factory=dict[str, object])
    holds: dict[str, bool] = field(default_factory=dict[str, bool])

    def is_known(self, check: ExactnessCheck) -> bool:
        return isinstance(self.cached.get(_key(check, (_whole_range(check),))), bool)

    def run_here(self, check: ExactnessCheck, ranges: Sequence[TrialRange]) -> None:
        """Record a check's verdict, from the cache or from a trial in this process."""
        key = _key(check, ranges)
        verdict = self.cached.get(key)
        if not isinstance(verdict, bool):
            verdict = _run_check(check, self.values, self.device, ranges)
            if verdict is not None:
                self.new[key] = verdict
        self.holds[check.key] = bool(verdict)  # without memory for a trial, assume a mismatch

    def run_in_process(self, checks: Sequence[ExactnessCheck]) -> None:
        """Record cached verdicts of checks; run the other checks in another process as far as memory allows."""
        # A trial also needs an unknown amount of scratch memory.
        max_bytes = _free_bytes(self.device) // 2
        unchecked = [c for c in checks if not self.is_known(c) and _fits(c, self.values, _whole_range(c), max_bytes)]
        verdicts = _run_in_process(unchecked, self.values, self.device)
        self.new |= {
            _key(check, (_whole_range(check),)): verdicts[check.key] for check in unchecked if check.key in verdicts
        }
        for check in checks:
            key = _key(check, (_whole_range(check),))
            holds = self.new.get(key, self.cached.get(key))
            if isinstance(holds, bool):
                self.holds[check.key] = holds


def _key(check: ExactnessCheck, ranges: Sequence[TrialRange]) -> str:
    """Return the cache key of a check that runs on these ranges of its op."""
    tried = [(trial_range.low, trial_range.high, trial_range.parts) for trial_range in ranges]
    return hashlib.sha256(f"stretches, several draws: {check.key} {tried}".encode()).hexdigest()[:24]


def _free_bytes(device: torch.device) -> int:
    return (available_memory_bytes() or 0) if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _run_in_process(checks: Sequence[ExactnessCheck], values: Sequence[Value], device: torch.device) -> dict[str, bool]:
    """Run checks of whole ops in another process; return the available verdicts by key."""
    verdicts = {b"True": True, b"False": False}
    results: dict[str, bool] = {}
    while checks:
        try:
            answers, status = _run_trial_process(pack_work((checks, values, device)))
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
            _log.info("cannot start a process for exactness checks: %s", error)
            break
        results |= {c.key: verdicts[answer] for c, answer in zip(checks, answers, strict=False) if answer in verdicts}
        if len(answers) == len(checks):
            break
        _log.info("a process for exactness checks ended with status %d: %s", status, checks[len(answers)].key)
        # A process killed by a signal may have needed too much memory for this check; run the later ones in another.
        checks = checks[len(answers) + 1 :] if status < 0 else []
    return results


def _run_trial_process(work: bytes) -> tuple[list[bytes], int]:
    """Run pickled exactness checks in a new process; return the printed verdicts and the exit status."""
    with tempfile.TemporaryFile() as output:
        helper = start_process(f"{__name__}:serve", work, output)
        try:
            status = helper.wait()
        finally:
            helper.kill()
            helper.wait()
        output.seek(0)
        return output.read().split(), status


def serve() -> None:
    """Run the checks from standard input and print their verdicts: the main function of a trial process."""
    # If memory runs out anyway, the kernel must kill this process first.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    checks, values, device = receive_work()
    # Fail now if the device is not available, so that no verdict is returned.
    torch.zeros(1, device=device)
    for check in checks:
        sys.stdout.write(f"{_run_check(check, values, device, (_whole_range(check),))}\n")
        sys.stdout.flush()


def _whole_range(check: ExactnessCheck) -> TrialRange:
    return TrialRange(check.ends[0], check.ends[-1], tuple(_representative_parts(check.ends)))


def _fits(check: ExactnessCheck, values: Sequence[Value], trial_range: TrialRange, max_bytes: int) -> bool:
    part = max(high - low for low, high in trial_range.parts)
    return _needed_bytes(check, values, trial_range.low, trial_range.high, part) <= max_bytes


def choose_trial_ranges(check: ExactnessCheck, values: Sequence[Value], max_bytes: int) -> tuple[TrialRange, ...]:
    """Choose ranges of an op to check within ``max_bytes``: the whole op or both ends; () if too short."""
    parts, end = list(itertools.pairwise(check.ends)), check.ends[-1]
    # A single part always fits into the budget.
    if len(parts) == 1 or _fits(check, values, _whole_range(check), max_bytes):
        return (_whole_range(check),)

    def fits(low: int, high: int, compared: Sequence[tuple[int, int]]) -> bool:
        return _fits(check, values, TrialRange(low, high, tuple(compared)), max_bytes)

    grain, ranges = check.split.grain, list[TrialRange]()
    for ordered in (parts, parts[::-1]):
        # As many parts as fit; else one part within the longest range that fits; else one part and its halves.
        counts = range(len(parts) - 1, 1, -1)
        position = bisect_left(
            counts, True, key=lambda n, ordered_parts=ordered: fits(*_bounds(ordered_parts[:n]), ordered_parts[:n])
        )
        if position < len(counts):
            fitting_parts = ordered[: counts[position]]
            ends = sorted({edge for part in fitting_parts for edge in part})
            ranges.append(TrialRange(*_bounds(fitting_parts), tuple(_representative_parts(ends))))
            continue
        low, high = first = ordered[0]
        neighbour = ordered[1]
        edges = range(neighbour[0], low, grain) if high == end else range(neighbour[1], high, -grain)
        wider = [(min(edge, low), max(edge, high)) for edge in edges]
        position = bisect_left(wider, True, key=lambda span, part=first: fits(*span, [part]))
        if position < len(wider):
            ranges.append(TrialRange(*wider[position], (first,)))
            continue
        middle = (low + high) // 2
        middle = middle // grain * grain if middle // grain * grain > low else middle
        if low < middle:
            ranges.append(TrialRange(low, high, ((low, middle), (middle, high))))
    min_length = (end - check.ends[0]) * _EFFORT.min_share
    return (
        ()
        if any(trial_range.high - trial_range.low < min_length for trial_range in ranges)
        else tuple(dict.fromkeys(ranges))
    )


def _bounds(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(low for low, _ in parts), max(high for _, high in parts)


def _needed_bytes(check: ExactnessCheck, values: Sequence[Value], low: int, high: int, part_length: int) -> int:
    """Return the bytes that a check of the range ``low:high`` with a part of ``part_length`` needs."""
    func, names = _operator(check.call), _argument_values(check.call, values)
    written = written_arguments(func, arguments_by_name(func, check.call.args, check.call.kwargs))
    changed = {name for name in names if name[0] in written}
    copied = changed | {name for name in names if name in check.split.argument_cuts or name in check.gathered_strides}
    whole = _argument_bytes(check, values, low, high) + _result_bytes(
        check, values, low, high, check.reference or check.call
    )
    part_bytes = _argument_bytes(check, values, low, low + part_length, copied) + _result_bytes(
        check, values, low, low + part_length, check.call
    )
    return whole + _argument_bytes(check, values, low, high, changed) + part_bytes


def _argument_bytes(
    check: ExactnessCheck, values: Sequence[Value], low: int, high: int, names: Set[ArgumentName] | None = None
) -> int:
    """Return the bytes of a part's arguments; ``names`` selects some of the arguments."""
    tensors = _argument_values(check.call, values)
    cuts = check.split.argument_cuts
    return sum(
        _part_bytes(v, name in cuts, check, low, high) for name, v in tensors.items() if names is None or name in names
    )


def _result_bytes(check: ExactnessCheck, values: Sequence[Value], low: int, high: int, call: Call) -> int:
    cuts = check.split.result_cuts
    results = ((place, values[v]) for place, v in enumerate(call.results) if v is not None)
    return sum(_part_bytes(value, place in cuts, check, low, high) for place, value in results)


def _part_bytes(value: Value, is_cut: bool, check: ExactnessCheck, low: int, high: int) -> int:
    share = (high - low) / check.split.extent if is_cut else 1.0
    return int(prod(value.shape) * value.dtype.itemsize * share)


def _argument_values(call: Call, values: Sequence[Value]) -> dict[ArgumentName, Value]:
    return {name: values[index] for name, index in named_refs(call)}


def _operator(call: Call) -> Any:
    return call.func


def _run_check(
    check: ExactnessCheck, values: Sequence[Value], device: torch.device, ranges: Sequence[TrialRange]
) -> bool | None:
    """Return whether all parts match the whole op; False if the op fails, None if memory runs out."""
    if not ranges:
        return False
    with CAPTURE_LOCK, internals.below_autograd():
        try:
            if is_elementwise(_operator(check.call)) and not _rounds_uniformly(check, values, device):
                return False
            return all(
                ExactnessTrial(check, values, device, trial_range, draw).is_equal()
                for trial_range in ranges
                for draw in range(_count_draws(check, values, trial_range))
            )
        except (RuntimeError, ValueError, IndexError) as error:
            # An op that fails in a trial is not split.
            _log.info("an exactness check failed to run: %s: %s", check.key, error)
            return None if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY in str(error) else False


def _count_draws(check: ExactnessCheck, values: Sequence[Value], trial_range: TrialRange) -> int:
    """Return how often to run a trial, each time with new random numbers."""
    func = _operator(check.call)
    written = written_arguments(func, arguments_by_name(func, check.call.args, check.call.kwargs))
    sizes = [prod(values[v].shape) for v in check.call.results if v is not None]
    sizes += [prod(value.shape) for (name, _), value in _argument_values(check.call, values).items() if name in written]
    fraction = (trial_range.high - trial_range.low) / check.split.extent
    draws = ceil(_EFFORT.elements / max(min(sizes, default=1) * fraction, 1))
    low, high = trial_range.low, trial_range.high
    bytes_per_trial = _argument_bytes(check, values, low, high) + _result_bytes(check, values, low, high, check.call)
    affordable = _EFFORT.bytes // max(bytes_per_trial, 1)
    return max(min(draws, affordable, _EFFORT.draws), 1)


def _rounds_uniformly(check: ExactnessCheck, values: Sequence[Value], device: torch.device) -> bool:
    """Return whether an elementwise operator rounds every element equally in the whole op and in its parts."""
    tensors = _argument_values(check.call, values)
    # Parts may be contiguous although the whole is not.
    has_gaps = any(prod(v.shape) > 1 and not is_dense(v.shape, v.stride) for v in tensors.values())
    if (has_gaps or check.gathered_strides) and _rounds_unevenly(check, tensors, device, _rounds_gaps_differently):
        return False
    return _has_no_remainder(check, tensors) or not _rounds_unevenly(check, tensors, device, _rounds_scraps_differently)


def _has_no_remainder(check: ExactnessCheck, tensors: Mapping[ArgumentName, Value]) -> bool:
    """Return whether boundaries of parts and threads align with SIMD vectors; False for unequal shapes."""
    sizes = {prod(value.shape) for value in tensors.values()}
    elements = max(sizes, default=0)
    threads = torch.get_num_threads()

    def is_even(count: int) -> bool:
        chunk_count = min(threads, -(-count // _THREAD_ELEMENTS))
        return chunk_count < 2 or not -(-count // chunk_count) % _MAX_VECTOR_LENGTH

    inner = elements // check.split.extent
    same_shape = all(value.shape == next(iter(tensors.values())).shape for value in tensors.values() if value.shape)
    counts = [(high - low) * inner for low, high in zip(check.ends, check.ends[1:], strict=False)]
    return (
        same_shape
        and not any(count % _MAX_VECTOR_LENGTH for count in counts[:-1])
        and all(map(is_even, [elements, *counts]))
    )


Rounds = Callable[[Call, Mapping[ArgumentName, Value], torch.device], bool]


def _rounds_unevenly(
    check: ExactnessCheck, tensors: Mapping[ArgumentName, Value], device: torch.device, finds_difference: Rounds
) -> bool:
    """Return the result of the test ``finds_difference``, cached per operator and kind of arguments."""
    call, func = check.call, _operator(check.call)
    kinds = ", ".join(f"{name}: {value.dtype} {prod(value.shape) > 1}" for name, value in tensors.items())
    constants = [item for item in (*call.args, *call.kwargs.values()) if not isinstance(item, Ref | list | tuple)]
    key = f"{finds_difference.__name__} {func} {kinds} {constants} {device} {torch.backends.cpu.get_cpu_capability()}"
    if key not in _uneven:
        _uneven[key] = finds_difference(call, tensors, device)
    return _uneven[key]


_uneven: dict[str, bool] = {}


def _rounds_gaps_differently(call: Call, tensors: Mapping[ArgumentName, Value], device: torch.device) -> bool:
    long, run = _make_long_arguments(call, tensors, device)
    with_gaps = {n: torch.stack([t, t], dim=-1)[:, 0] if t.numel() > 1 else t.clone() for n, t in long.items()}
    return not _have_same_bits(run({name: tensor.clone() for name, tensor in long.items()}), run(with_gaps))


def _rounds_scraps_differently(call: Call, tensors: Mapping[ArgumentName, Value], device: torch.device) -> bool:
    """Return whether an operator rounds elements differently in pieces of a few elements than in a long tensor."""
    long, run = _make_long_arguments(call, tensors, device)
    whole = run({name: tensor.clone() for name, tensor in long.items()})
    for start in range(0, _ALL_SCRAP_ELEMENTS, _SCRAP_ELEMENTS):
        scrap = {
            n: t.narrow(0, start, _SCRAP_ELEMENTS).clone() if t.numel() > 1 else t.clone() for n, t in long.items()
        }
        if not _have_same_bits(whole.narrow(0, start, _SCRAP_ELEMENTS), run(scrap)):
            return True
    return False


def _make_long_arguments(
    call: Call, tensors: Mapping[ArgumentName, Value], device: torch.device
) -> tuple[dict[ArgumentName, torch.Tensor], Callable[[Mapping[ArgumentName, torch.Tensor]], torch.Tensor]]:
    """Make long random arguments for an elementwise operator, and a function that runs the operator on them."""
    func = _operator(call)
    generator = torch.Generator(device).manual_seed(_SEED)
    tensors_by_name: dict[ArgumentName, torch.Tensor] = {}
    for name, value in tensors.items():
        tensor = torch.empty(_ALL_SCRAP_ELEMENTS if prod(value.shape) > 1 else 1, dtype=value.dtype, device=device)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            tensor.normal_(generator=generator)
        else:
            tensor.random_(0, 2, generator=generator)
        tensors_by_name[name] = tensor

    def run(inputs: Mapping[ArgumentName, torch.Tensor]) -> torch.Tensor:
        args, kwargs = arrange_arguments(
            func, call, with_tensors(arguments_by_name(func, call.args, call.kwargs), inputs)
        )
        return internals.result_leaves(func(*args, **kwargs))[0]

    return tensors_by_name, run


Same = Callable[[torch.Tensor, Any], bool]


class ExactnessTrial:
    """Compares an op, or a range of it, with its parts on equal random inputs; ``draw`` selects the numbers."""

    def __init__(
        self,
        check: ExactnessCheck,
        values: Sequence[Value],
        device: torch.device,
        trial_range: TrialRange,
        draw: int = 0,
    ) -> None:
        self.check, self.split, self.func = check, check.split, _operator(check.call)
        self.low, self.high, self.parts, self.device = trial_range.low, trial_range.high, trial_range.parts, device
        self.is_whole = (self.low, self.high) == (0, self.split.extent)
        self.generator = torch.Generator(device).manual_seed(_SEED + draw)
        self.arguments = {
            name: self._make_argument(name, value) for name, value in _argument_values(check.call, values).items()
        }
        # Indices are spread over the whole table; parts then count them from their own beginning.
        set_runnable_integers(
            self.func,
            self._named_arguments(self.arguments, self.low, self.high, adapt_constants=not self.split.rebased_indices),
        )

    def _make_argument(self, name: ArgumentName, value: Value) -> torch.Tensor:
        """Make a random tensor for an argument, or for its slice if the trial covers only a range; integers are 0."""
        cut = self.split.argument_cuts.get(name)
        shape, stride = value.shape, value.stride
        if cut is not None and not self.is_whole:
            shape = cut.part_shape(value.shape, self.low, self.high)
            stride = dense_like(shape, (*stride[: cut.dims[0]], stride[cut.dims[1] - 1], *stride[cut.dims[1] :]))
        # Keep the offset, because libraries use other code for misaligned memory.
        shift = value.offset % max(SMALL_ALIGNMENT // value.dtype.itemsize, 1)
        base = torch.empty(shift + extent(shape, stride), dtype=value.dtype, device=self.device)
        flat, tensor = base[shift:], torch.as_strided(base, shape, stride, shift)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            flat.normal_(generator=self.generator)
        elif value.dtype is torch.bool:
            flat.random_(0, 2, generator=self.generator)
        else:
            flat.zero_()
        return tensor

    def _named_arguments(
        self,
        tensors: Mapping[ArgumentName, torch.Tensor],
        low: int,
        high: int,
        *,
        adapt_constants: bool = True,
        call: Call | None = None,
    ) -> dict[str, Any]:
        """Return the op's arguments by name; ``adapt_constants`` adapts constants such as sizes to a part."""
        call = call or self.check.call
        named = with_tensors(arguments_by_name(self.func, call.args, call.kwargs), tensors)
        if (
            adapt_constants
            and self.split.adjust is not None
            and not (self.is_whole and (low, high) == (self.low, self.high))
        ):
            self.split.adjust(named, low, high)
        return named

    def _run(
        self, tensors: Mapping[ArgumentName, torch.Tensor], low: int, high: int, call: Call | None = None
    ) -> tuple[list[Any], dict[ArgumentName, torch.Tensor]]:
        """Run the op on the part ``low:high``; return its results and the arguments that it wrote in place."""
        named = self._named_arguments(tensors, low, high, call=call)
        args, kwargs = arrange_arguments(self.func, self.check.call, named)
        written = written_arguments(self.func, named)
        out = self.func(*args, **kwargs)
        return internals.result_leaves(out), {name: t for name, t in tensors.items() if name[0] in written}

    def _argument_part(self, name: ArgumentName, low: int, high: int) -> torch.Tensor:
        """Return an argument for the part ``low:high``: a copied slice, or the whole argument if it is not cut."""
        tensor, cut = self.arguments[name], self.split.argument_cuts.get(name)
        if name in self.check.gathered_strides:
            return torch.empty_strided(
                tensor.shape, self.check.gathered_strides[name], dtype=tensor.dtype, device=self.device
            ).copy_(tensor)
        if cut is None:
            return (
                tensor.clone()
                if name[0] in written_arguments(self.func, self._named_arguments(self.arguments, low, high))
                else tensor
            )
        dim = cut.dims[0]
        tensor = self._merge_cut(tensor, cut)
        base = cut.ends(self.low, self.high)[0] if not self.is_whole else 0
        first, last = (end - base for end in cut.ends(low, high))
        inside_ends = max(first, 0), min(last, tensor.shape[dim])
        part = tensor.narrow(dim, inside_ends[0], max(inside_ends[1] - inside_ends[0], 0))
        shape = [*tensor.shape]
        shape[dim] = last - first
        result = torch.empty_strided(shape, dense_like(shape, tensor.stride()), dtype=tensor.dtype, device=self.device)
        if inside_ends != (first, last):
            result.zero_()
        result.narrow(dim, inside_ends[0] - first, part.shape[dim]).copy_(part)
        return result

    def is_equal(self, same: Same | None = None) -> bool:
        """Return whether each part computes the same results as the whole range; ``same`` compares two tensors."""
        same = same or _have_same_bits
        written = written_arguments(self.func, self._named_arguments(self.arguments, self.low, self.high))
        # Only written arguments need a copy.
        arguments = {name: _copy_with_layout(t) if name[0] in written else t for name, t in self.arguments.items()}
        whole_results, changed = self._run(arguments, self.low, self.high, self.check.reference)
        for low, high in self.parts:
            for arguments in self._layouts_of_part(low, high):
                part_results, written = self._run(arguments, low, high)
                for place, index in enumerate(self.check.call.results):
                    if index is None or not isinstance(whole_results[place], torch.Tensor):
                        continue
                    cut = self.split.result_cuts.get(place)
                    if cut is None and low:
                        continue
                    if not same(self._slice(whole_results[place], cut, low, high), part_results[place]):
                        return False
                for name, tensor in written.items():
                    if not same(self._slice(changed[name], self.split.argument_cuts.get(name), low, high), tensor):
                        return False
        return True

    def _layouts_of_part(self, low: int, high: int) -> Iterator[dict[ArgumentName, torch.Tensor]]:
        """Yield a part's arguments in several memory layouts: as copies and as misaligned or gapped views."""
        written = written_arguments(self.func, self._named_arguments(self.arguments, low, high))
        views: dict[ArgumentName, torch.Tensor] = {}
        for name, tensor in self.arguments.items():
            cut = self.split.argument_cuts.get(name)
            if cut is None or not cut.is_adjacent or name[0] in written:
                continue
            merged = self._merge_cut(tensor, cut)
            view = merged.narrow(cut.dims[0], low - (0 if self.is_whole else self.low), high - low)
            gaps = not is_dense(view.shape, view.stride())
            # `StepWriter.gather_argument` copies such parts of tensors without gaps.
            is_copied = gaps and is_dense(merged.shape, merged.stride())
            if not is_copied and (gaps or view.data_ptr() % SMALL_ALIGNMENT):
                views[name] = view
        for number in range(min(1 << len(views), _EFFORT.max_placings)):
            views_used = {name for place, name in enumerate(views) if number >> place & 1}
            yield {
                name: views[name] if name in views_used else self._argument_part(name, low, high)
                for name in self.arguments
            }

    def _merge_cut(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        return tensor.flatten(cut.dims[0], cut.dims[1] - 1) if self.is_whole else tensor

    def _slice(self, tensor: torch.Tensor, cut: Cut | None, low: int, high: int) -> torch.Tensor:
        """Return the slice of an argument or result for the part ``low:high``; the whole tensor without a cut."""
        if cut is None:
            return tensor
        base = cut.ends(self.low, self.high)[0] if not self.is_whole else 0
        start, last = (end - base for end in cut.ends(low, high))
        return self._merge_cut(tensor, cut).narrow(cut.dims[0], start, last - start)


def _copy_with_layout(tensor: torch.Tensor) -> torch.Tensor:
    shift, count = tensor.storage_offset(), extent(tensor.shape, tensor.stride())
    base = torch.empty(shift + count, dtype=tensor.dtype, device=tensor.device)
    base[shift:].copy_(torch.as_strided(tensor, (count,), (1,), shift))
    return torch.as_strided(base, tensor.shape, tensor.stride(), shift)


def _representative_parts(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first part, the last, and one of each length, because kernels are chosen by size."""
    parts = list(itertools.pairwise(ends))
    lengths = {high - low: (low, high) for low, high in parts[1:-1]}
    return list(dict.fromkeys([parts[0], *lengths.values(), parts[-1]]))


def _have_same_bits(first: torch.Tensor, second: Any) -> bool:
    """Return whether two tensors have the same bits; all NaNs count as equal."""
    if not isinstance(second, torch.Tensor) or first.dtype != second.dtype or first.numel() != second.numel():
        return False
    first, second = first.reshape(-1), second.reshape(-1)
    if first.is_complex():
        first, second = torch.view_as_real(first).reshape(-1), torch.view_as_real(second).reshape(-1)
    integer_type = _INTEGER_TYPES.get(first.dtype.itemsize)
    if not first.is_floating_point() or integer_type is None:
        return torch.equal(first, second)
    first_bits, second_bits = first.contiguous().view(integer_type), second.contiguous().view(integer_type)
    if torch.equal(first_bits, second_bits):
        return True
    nan = first.isnan()
    return torch.equal(nan, second.isnan()) and torch.equal(
        first_bits.masked_fill(nan, 0), second_bits.masked_fill(nan, 0)
    )
