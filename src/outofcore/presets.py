"""Devices to simulate: their memory, their speed, and the bandwidth of their link to the host.

Compute rates are dense peaks from data sheets; link rates are typical for large copies from pinned memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from outofcore.costs import Home
from outofcore.errors import InputError
from outofcore.units import GIB, format_bytes, parse_bytes


class Work(Enum):
    """The class of an op, which determines its achievable speed."""

    CONVOLUTION = "convolution"  # forward and backward
    MATMUL = "matmul"  # products of matrices, batched or not
    ATTENTION = "attention"  # fused attention, forward and backward
    STREAMING = "streaming"  # element by element, reductions, normalisation, pooling, updates: bound by memory


class Number(Enum):
    """The number format in which an op multiplies."""

    FP32 = "fp32"
    TF32 = "tf32"  # fp32 in memory, 10 bits of mantissa in the multiplier; PyTorch's default for convolutions
    HALF = "half"  # fp16 or bf16 with sums in fp32


# Assumed shares of the peak rate on plain cores and on tensor cores, and of the memory bandwidth, the same for all
# devices. A ResNet-50 in bf16 with NCHW images took 2.9 times as long on an H200 as they predict.
EFFICIENCY = {Work.CONVOLUTION: (0.8, 0.35), Work.MATMUL: (0.85, 0.6), Work.ATTENTION: (0.5, 0.4)}
STREAMING_EFFICIENCY = 0.8
# Between the starts of two empty kernels.
LAUNCH_SECONDS = 4e-6
_LINK_LATENCY_S = 10e-6
# Defaults for a device given by numbers: memory bandwidth in GB/s for each TFLOPS in 16 bits (recent cards have 3 to
# 13), and the shares of these TFLOPS in tf32 and fp32.
_GB_PER_TFLOPS, _TF32_SHARE, _FP32_SHARE = 6.0, 0.5, 0.25
_EXAMPLE = "24GiB, 80 TFLOPS, 25 GB/s"
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+(?:/s)?)")
_FLOPS = {"GFLOPS": 1e9, "GFLOP/S": 1e9, "TFLOPS": 1e12, "TFLOP/S": 1e12, "PFLOPS": 1e15, "PFLOP/S": 1e15}
_RATES = {"MB/S": 1e6, "GB/S": 1e9, "GIB/S": float(GIB), "TB/S": 1e12}


@dataclass(frozen=True)
class Device:
    """A device with its link to the host."""

    key: str  # its name on the command line
    name: str  # in full, with its link
    memory_bytes: int  # usable bytes, without the CUDA context
    flops: dict[Number, float]  # operations per second; a missing format runs as fp32
    memory_bytes_per_s: float  # bandwidth of its own memory
    out_bytes_per_s: float  # rate of copies from the device to pinned host memory
    in_bytes_per_s: float  # rate of copies from pinned host memory to the device

    def home(self) -> Home:
        return Home("host", None, self.out_bytes_per_s, self.in_bytes_per_s, _LINK_LATENCY_S)

    def seconds(self, work: Work, number: Number, operations: float, moved_bytes: float) -> float:
        """Estimate the seconds of an op: its launch, plus the longer of computing and moving bytes."""
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
    """Build a device from the numbers of its data sheet, less 0.5 GiB of memory for the CUDA context."""
    rates = {Number.FP32: fp32, Number.TF32: tf32, Number.HALF: half}
    link = link_gb_per_s * 1e9
    flops = {number: rate * 1e12 for number, rate in rates.items() if rate is not None}
    return Device(key, name, int((gib - 0.5) * GIB), flops, memory_gb_per_s * 1e9, link, link)


def devices() -> tuple[Device, ...]:
    """Return all preset devices.

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
        # Its clock depends on the laptop's power limit: here 1,695 MHz at 120 W.
        _device("laptop-rtx4090-16gb", "NVIDIA RTX 4090 Laptop 16 GB, PCIe 4", 16, 576, 24.0, fp32=33.0, half=66.0),
    )


def device(name: str) -> Device:
    """Return the preset device for a name such as "h100", or make a device from numbers.

    A name is a preset's key or its unique prefix. The numbers are usable memory, the dense 16-bit peak (tf32: a half of
    it, fp32: a quarter), the rate of copies with the host, and the memory bandwidth (default: 6 GB/s per TFLOPS).

    Raises:
        InputError: no preset or several match, or the numbers cannot be parsed.

    >>> device("h100").name
    'NVIDIA H100 SXM 80 GB, PCIe 5'
    >>> device("24GiB, 80 TFLOPS, 25 GB/s").memory_bytes_per_s
    480000000000.0
    >>> device("24GiB, 80 TFLOPS, 25 GB/s, 1 TB/s memory").memory_bytes_per_s
    1000000000000.0
    """
    if "," in name:
        return _parse_device(name)
    presets, key = devices(), name.lower().replace(" ", "").replace("_", "-")
    # "a10" is not an A100, and people leave "rtx" out.
    for beginning in (f"{key}-", key, f"rtx{key}") if key else ():
        matches = [preset for preset in presets if f"{preset.key}-".startswith(beginning)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise InputError(f"{name!r} matches several devices; choose one of {', '.join(d.key for d in matches)}")
    names = ", ".join(d.key for d in presets)
    raise InputError(
        f"{name!r} is no device; choose cpu or cuda for a device of this machine, or one of {names} to simulate it; "
        f"or give the numbers of another device, such as {_EXAMPLE!r}"
    )


def _parse_device(text: str) -> Device:
    """Make a device from numbers such as "24GiB, 80 TFLOPS, 25 GB/s"; raise ``InputError`` for other text."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (3, 4) or (len(parts) == 4 and not parts[3].endswith("memory")):
        raise InputError(
            f"cannot read {text!r} as a device: give its memory, its TFLOPS and the rate of its link to the host, such "
            f"as {_EXAMPLE!r}, and optionally its memory bandwidth, such as '1000 GB/s memory'"
        )
    memory = parse_bytes(parts[0])
    flops = _parse_quantity(text, parts[1], _FLOPS, "TFLOPS, such as '80 TFLOPS'")
    link = _parse_quantity(text, parts[2], _RATES, "the rate of the link to the host, such as '25 GB/s'")
    memory_rate = flops / 1e12 * _GB_PER_TFLOPS * 1e9
    if len(parts) == 4:
        memory_rate = _parse_quantity(
            text, parts[3].removesuffix("memory").strip(), _RATES, "a rate, such as '1000 GB/s memory'"
        )
    rates = {Number.HALF: flops, Number.TF32: flops * _TF32_SHARE, Number.FP32: flops * _FP32_SHARE}
    name = (
        f"a device by its numbers: {flops / 1e12:g} TFLOPS in 16 bits ({_TF32_SHARE:.0%} of that in tf32, "
        f"{_FP32_SHARE:.0%} in fp32), {link / 1e9:g} GB/s to the host, {memory_rate / 1e9:g} GB/s memory bandwidth"
    )
    return Device(text, name, memory, rates, memory_rate, link, link)


def _parse_quantity(device_text: str, part: str, units: dict[str, float], expected: str) -> float:
    """Parse a number with a unit, such as "25 GB/s"; an error quotes ``device_text`` and ``expected``."""
    match = _QUANTITY.fullmatch(part)
    unit = None if match is None else units.get(match[2].upper())
    if match is None or unit is None or not 0 < float(match[1]) < 1e6:
        raise InputError(
            f"cannot read {part!r} in the device {device_text!r}: expected {expected}; an example of a device is "
            f"{_EXAMPLE!r}"
        )
    return float(match[1]) * unit


def simulated(name: str | None) -> Device | None:
    """Return the device to simulate; None if ``name`` is a real device such as "cuda:0".

    Raises:
        InputError: the name is not a device.

    >>> simulated("cuda:1") is None
    True
    >>> simulated("k40c").home().name
    'host'
    """
    return None if name is None or name.partition(":")[0] in ("cpu", "cuda") else device(name)
