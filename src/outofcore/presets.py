"""Devices that need not be here: what they hold, how fast they compute, and how fast bytes reach them.

Rates are the makers' peaks for dense arithmetic, from their data sheets; link rates are what copies of
large blocks from pinned memory usually reach, about 80 % of what the link carries. What follows from
them is an estimate, and every report that uses one says that it is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outofcore.costs import Home
from outofcore.errors import InputError
from outofcore.units import GIB, format_bytes


class Work(Enum):
    """What limits the speed of an op."""

    CONVOLUTION = "convolution"  # forward and backward
    MATMUL = "matmul"  # products of matrices, batched or not
    ATTENTION = "attention"  # fused attention, forward and backward
    STREAMING = "streaming"  # element by element, reductions, normalisation, pooling, updates: bound by memory


class Number(Enum):
    """The number format of products."""

    FP32 = "fp32"
    TF32 = "tf32"  # fp32 in memory, 10 bits of mantissa in the multiplier; PyTorch's default for convolutions
    HALF = "half"  # fp16 or bf16 with sums in fp32


# The share of the peak that arithmetic reaches, on plain cores and on tensor cores, which are harder to feed; and the
# share of the memory's rate that any op reaches. Assumed, and alike for all devices. A ResNet-50 in bf16, with images
# in NCHW, took 2.9 times as long on an H200 as these shares say.
EFFICIENCY = {Work.CONVOLUTION: (0.8, 0.35), Work.MATMUL: (0.85, 0.6), Work.ATTENTION: (0.5, 0.4)}
STREAMING_EFFICIENCY = 0.8
# From one kernel's start to the next, where neither has anything to do.
LAUNCH_SECONDS = 4e-6
_LINK_LATENCY_S = 10e-6


@dataclass(frozen=True)
class Device:
    """A device with its link to the host.

    Attributes:
        key: what it is called on the command line.
        name: in full, with its link.
        memory_bytes: what it holds, less what a context takes.
        flops: operations a second by number; a number that is absent is computed as fp32.
        memory_bytes_per_s: of its own memory.
        out_bytes_per_s: from the device to pinned memory of the host, as copies reach it.
        in_bytes_per_s: the other way.
    """

    key: str
    name: str
    memory_bytes: int
    flops: dict[Number, float]
    memory_bytes_per_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float

    def home(self) -> Home:
        """Return the host's memory, without a limit."""
        return Home("host", None, self.out_bytes_per_s, self.in_bytes_per_s, _LINK_LATENCY_S)

    def seconds(self, work: Work, number: Number, operations: float, moved_bytes: float) -> float:
        """Return the seconds of an op: of its arithmetic or its memory traffic, whichever is longer (a roofline).

        Args:
            work: what kind of op it is.
            number: what it computes in.
            operations: additions and multiplications.
            moved_bytes: read and written in the device's memory.
        """
        arithmetic = 0.0
        if work in EFFICIENCY:
            plain, tensor = EFFICIENCY[work]
            reached = self.flops[Number.FP32] * plain
            if number is not Number.FP32:
                reached = max(reached, self.flops.get(number, 0.0) * tensor)
            arithmetic = operations / reached
        traffic = moved_bytes / (self.memory_bytes_per_s * STREAMING_EFFICIENCY)
        return LAUNCH_SECONDS + max(arithmetic, traffic)

    def describe(self) -> str:
        """Describe the device, and how its times are estimated, in one line."""
        shares = ", ".join(f"{work.value} {plain:.0%}/{tensor:.0%}" for work, (plain, tensor) in EFFICIENCY.items())
        return (
            f"{self.name}, {format_bytes(self.memory_bytes)} usable. No op was run: times are estimates from peak "
            f"rates, of which ops are assumed to reach {shares} (plain/tensor cores) and of memory's "
            f"{STREAMING_EFFICIENCY:.0%}"
        )


def _device(
    key: str,
    name: str,
    gib: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    *,
    fp32: float,
    tf32: float | None = None,
    half: float | None = None,
) -> Device:
    """Build a device from its data sheet: memory in GiB less half a GiB for the context, rates in GB/s and TFLOP/s."""
    given = {Number.FP32: fp32, Number.TF32: tf32, Number.HALF: half}
    link = link_gb_per_s * 1e9
    flops = {number: rate * 1e12 for number, rate in given.items() if rate is not None}
    return Device(key, name, int((gib - 0.5) * GIB), flops, memory_gb_per_s * 1e9, link, link)


def devices() -> tuple[Device, ...]:
    """Return all presets.

    >>> devices()[0].key
    'k40c-12gb'
    """
    return (
        _device("k40c-12gb", "NVIDIA Tesla K40c 12 GB, PCIe 3", 12, 288, 10.0, fp32=4.29),
        _device("v100-16gb-pcie3", "NVIDIA V100 16 GB, PCIe 3", 16, 900, 12.0, fp32=14.0, half=112),
        _device("v100-16gb-nvlink2", "NVIDIA V100 16 GB, NVLink 2 to POWER9", 16, 900, 60.0, fp32=15.7, half=125),
        _device("a100-40gb-pcie4", "NVIDIA A100 40 GB, PCIe 4", 40, 1555, 24.0, fp32=19.5, tf32=156, half=312),
        _device("a100-80gb-pcie4", "NVIDIA A100 80 GB, PCIe 4", 80, 1935, 24.0, fp32=19.5, tf32=156, half=312),
        _device("h100-80gb-pcie5", "NVIDIA H100 SXM 80 GB, PCIe 5", 80, 3350, 50.0, fp32=66.9, tf32=494, half=989),
        _device("h200-141gb-pcie5", "NVIDIA H200 SXM 141 GB, PCIe 5", 140, 4800, 50.0, fp32=66.9, tf32=494, half=989),
        _device("rtx4090-24gb", "NVIDIA RTX 4090 24 GB, PCIe 4", 24, 1008, 24.0, fp32=82.6, tf32=82.6, half=165),
        _device("rtx5090-32gb", "NVIDIA RTX 5090 32 GB, PCIe 5", 32, 1792, 50.0, fp32=104.8, tf32=104.8, half=209.5),
        # Its clock depends on the power that a laptop grants: here at 1,695 MHz, which 120 W allow.
        _device("laptop-rtx4090-16gb", "NVIDIA RTX 4090 Laptop 16 GB, PCIe 4", 16, 576, 24.0, fp32=33.0, half=66.0),
    )


def device(key: str) -> Device:
    """Return a preset by its key, or by a unique beginning of it, such as "h100".

    Raises:
        InputError: there is no such preset, or more than one.

    >>> device("h100").name
    'NVIDIA H100 SXM 80 GB, PCIe 5'
    """
    known = devices()
    exact = [found for found in known if found.key == key.lower()]
    found = exact or [found for found in known if found.key.startswith(key.lower()) and key]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{key!r} fits several devices; choose one of {', '.join(d.key for d in found)}")
    names = ", ".join(d.key for d in known)
    raise InputError(f"{key!r} is no device; choose cpu or cuda for one that is here, or to simulate one of {names}")


def simulated(name: str | None) -> Device | None:
    """Return the preset of a device's name; None for a real device ("cpu", "cuda" or "cuda:0") or None.

    Raises:
        InputError: it is neither.

    >>> simulated("cuda:1") is None
    True
    >>> simulated("k40c").home().name
    'host'
    """
    return None if name is None or name.partition(":")[0] in ("cpu", "cuda") else device(name)
