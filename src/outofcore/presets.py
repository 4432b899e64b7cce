"""Devices that need not be here: what they hold, how fast they compute, and how fast bytes reach them.

Rates are the makers' peaks for dense arithmetic, from their data sheets; link rates are what copies of
large blocks from pinned memory usually reach, about 80 % of what the link carries. What follows from
them is an estimate, and every report that uses one says that it is simulated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from outofcore.costs import Home
from outofcore.errors import InputError
from outofcore.units import GIB, format_bytes, parse_bytes


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
# Of a device by the user's own numbers, where nothing else is said: GB/s of its own memory for each TFLOPS in 16 bits
# (cards of the last years have 3 to 13), and shares of these TFLOPS in tf32 and fp32.
_GB_PER_TFLOPS, _TF32_SHARE, _FP32_SHARE = 6.0, 0.5, 0.25
_EXAMPLE = "24GiB, 80 TFLOPS, 25 GB/s"
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+(?:/s)?)")
_FLOPS = {"GFLOPS": 1e9, "GFLOP/S": 1e9, "TFLOPS": 1e12, "TFLOP/S": 1e12, "PFLOPS": 1e15, "PFLOP/S": 1e15}
_RATES = {"MB/S": 1e6, "GB/S": 1e9, "GIB/S": float(GIB), "TB/S": 1e12}


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
        _device("t4-16gb", "NVIDIA T4 16 GB, PCIe 3", 15, 320, 12.0, fp32=8.1, half=65),
        _device("v100-16gb-pcie3", "NVIDIA V100 16 GB, PCIe 3", 16, 900, 12.0, fp32=14.0, half=112),
        _device("v100-16gb-nvlink2", "NVIDIA V100 16 GB, NVLink 2 to POWER9", 16, 900, 60.0, fp32=15.7, half=125),
        _device("a10-24gb", "NVIDIA A10 24 GB, PCIe 4", 24, 600, 24.0, fp32=31.2, tf32=62.5, half=125),
        _device("a40-48gb", "NVIDIA A40 48 GB, PCIe 4", 48, 696, 24.0, fp32=37.4, tf32=74.8, half=149.7),
        _device("l4-24gb", "NVIDIA L4 24 GB, PCIe 4", 24, 300, 24.0, fp32=30.3, tf32=60, half=121),
        _device("l40s-48gb", "NVIDIA L40S 48 GB, PCIe 4", 48, 864, 24.0, fp32=91.6, tf32=183, half=362),
        _device("a100-40gb-pcie4", "NVIDIA A100 40 GB, PCIe 4", 40, 1555, 24.0, fp32=19.5, tf32=156, half=312),
        _device("a100-80gb-pcie4", "NVIDIA A100 80 GB, PCIe 4", 80, 1935, 24.0, fp32=19.5, tf32=156, half=312),
        _device("h100-80gb-pcie5", "NVIDIA H100 SXM 80 GB, PCIe 5", 80, 3350, 50.0, fp32=66.9, tf32=494, half=989),
        _device("h200-141gb-pcie5", "NVIDIA H200 SXM 141 GB, PCIe 5", 140, 4800, 50.0, fp32=66.9, tf32=494, half=989),
        _device("b200-180gb-pcie5", "NVIDIA B200 180 GB, PCIe 5", 179, 8000, 50.0, fp32=80, tf32=1100, half=2250),
        _device("rtx3090-24gb", "NVIDIA RTX 3090 24 GB, PCIe 4", 24, 936, 24.0, fp32=35.6, tf32=35.6, half=71),
        _device("rtx4090-24gb", "NVIDIA RTX 4090 24 GB, PCIe 4", 24, 1008, 24.0, fp32=82.6, tf32=82.6, half=165),
        _device("rtx5090-32gb", "NVIDIA RTX 5090 32 GB, PCIe 5", 32, 1792, 50.0, fp32=104.8, tf32=104.8, half=209.5),
        # Its clock depends on the power that a laptop grants: here at 1,695 MHz, which 120 W allow.
        _device("laptop-rtx4090-16gb", "NVIDIA RTX 4090 Laptop 16 GB, PCIe 4", 16, 576, 24.0, fp32=33.0, half=66.0),
    )


def device(name: str) -> Device:
    """Return a preset by its key, or by a unique beginning of it such as "h100"; or a device by its numbers.

    Numbers are its usable memory, its dense peak in 16 bits, the rate of copies from and to the host, and if you like
    that of its own memory: without it 6 GB/s for each TFLOPS. In tf32 it computes half as fast, in fp32 a quarter.

    Raises:
        InputError: there is no such preset, or more than one; or the numbers cannot be read.

    >>> device("h100").name
    'NVIDIA H100 SXM 80 GB, PCIe 5'
    >>> device("4090").key
    'rtx4090-24gb'
    >>> device("24GiB, 80 TFLOPS, 25 GB/s").memory_bytes_per_s
    480000000000.0
    >>> device("24GiB, 80 TFLOPS, 25 GB/s, 1 TB/s memory").memory_bytes_per_s
    1000000000000.0
    """
    if "," in name:
        return _by_numbers(name)
    known, key = devices(), name.lower().replace(" ", "").replace("_", "-")
    # "a10" is not an A100, and people leave "rtx" out.
    for beginning in (f"{key}-", key, f"rtx{key}") if key else ():
        found = [preset for preset in known if f"{preset.key}-".startswith(beginning)]
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(f"{name!r} fits several devices; choose one of {', '.join(d.key for d in found)}")
    names = ", ".join(d.key for d in known)
    raise InputError(
        f"{name!r} is no device; choose cpu or cuda for one that is here, or to simulate one of {names}; or give the "
        f"numbers of another, such as {_EXAMPLE!r}"
    )


def _by_numbers(text: str) -> Device:
    """Return the device that somebody describes by its numbers."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (3, 4) or (len(parts) == 4 and not parts[3].endswith("memory")):
        raise InputError(
            f"cannot read {text!r} as a device: it takes its memory, its TFLOPS and the rate of its link to the host, "
            f"such as {_EXAMPLE!r}, and then if you like the rate of its own memory, such as '1000 GB/s memory'"
        )
    memory = parse_bytes(parts[0])
    flops = _quantity(text, parts[1], _FLOPS, "TFLOPS, such as '80 TFLOPS'")
    link = _quantity(text, parts[2], _RATES, "the rate of the link to the host, such as '25 GB/s'")
    own = flops / 1e12 * _GB_PER_TFLOPS * 1e9
    if len(parts) == 4:
        own = _quantity(text, parts[3].removesuffix("memory").strip(), _RATES, "a rate, such as '1000 GB/s memory'")
    rates = {Number.HALF: flops, Number.TF32: flops * _TF32_SHARE, Number.FP32: flops * _FP32_SHARE}
    name = (
        f"a device by its numbers: {flops / 1e12:g} TFLOPS in 16 bits ({_TF32_SHARE:.0%} of that in tf32, "
        f"{_FP32_SHARE:.0%} in fp32), {link / 1e9:g} GB/s to the host, {own / 1e9:g} GB/s of its own memory"
    )
    return Device(text, name, memory, rates, own, link, link)


def _quantity(text: str, part: str, units: dict[str, float], wanted: str) -> float:
    match = _QUANTITY.fullmatch(part)
    unit = None if match is None else units.get(match[2].upper())
    if match is None or unit is None or not 0 < float(match[1]) < 1e6:
        raise InputError(
            f"cannot read {part!r} in the device {text!r}: here stands {wanted}; a device is described such as "
            f"{_EXAMPLE!r}"
        )
    return float(match[1]) * unit


def simulated(name: str | None) -> Device | None:
    """Return the device that a name or numbers describe; None for a real one ("cpu", "cuda" or "cuda:0") or None.

    Raises:
        InputError: it is neither.

    >>> simulated("cuda:1") is None
    True
    >>> simulated("k40c").home().name
    'host'
    """
    return None if name is None or name.partition(":")[0] in ("cpu", "cuda") else device(name)
