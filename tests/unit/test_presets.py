"""Tests of simulated devices: presets by name, and devices described by numbers."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outofcore.cli.app import app
from outofcore.errors import InputError, UnitError
from outofcore.presets import Number, device, devices, simulated
from outofcore.units import GIB


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100-80gb-pcie5"),
        ("H100", "h100-80gb-pcie5"),
        ("a10", "a10-24gb"),
        ("l4", "l4-24gb"),
        ("L40S", "l40s-48gb"),
        ("t4", "t4-16gb"),
        ("3090", "rtx3090-24gb"),
        ("RTX 4090", "rtx4090-24gb"),
        ("a100-40gb", "a100-40gb-pcie4"),
        ("b200", "b200-180gb-pcie5"),
    ],
)
def test_device_is_found_by_a_prefix_of_its_name(name: str, key: str) -> None:
    assert device(name).key == key
    assert simulated(name) == device(name)


def test_each_key_finds_its_own_device() -> None:
    assert [device(preset.key) for preset in devices()] == list(devices())
    assert all(preset.memory_bytes > 0 and preset.flops[Number.FP32] > 0 for preset in devices())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100", "matches several devices"),
        ("v100", "matches several"),
        ("", "is no device"),
        ("x", "numbers of another"),
    ],
)
def test_unknown_or_ambiguous_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        device(name)


def test_device_from_numbers_has_these_numbers() -> None:
    described = device("24GiB, 80 TFLOPS, 25 GB/s")
    assert described.memory_bytes == 24 * GIB
    assert described.flops == {Number.HALF: 80e12, Number.TF32: 40e12, Number.FP32: 20e12}
    assert described.in_bytes_per_s == described.out_bytes_per_s == 25e9
    assert described.memory_bytes_per_s == 480e9
    assert "80 TFLOPS in 16 bits" in described.describe()
    with_memory_rate = device("80GB,1.2 PFLOPS,50GB/s,3 TB/s memory")
    assert (with_memory_rate.memory_bytes, with_memory_rate.memory_bytes_per_s) == (80 * 10**9, 3e12)
    assert with_memory_rate.flops[Number.HALF] == pytest.approx(1.2e15)
    assert with_memory_rate.home().in_seconds(50 * 10**9) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("24GiB, 80 TFLOPS", InputError, "give its memory"),
        ("24GiB, 80 TFLOPS, 25 GB/s, 900 GB/s", InputError, "give its memory"),
        ("24GiB, 80 TFLOPS, 25 GB/s, 900 GB/s memory, x", InputError, "give its memory"),
        ("24 apples, 80 TFLOPS, 25 GB/s", UnitError, "as a byte count"),
        ("24GiB, 80, 25 GB/s", InputError, "cannot read '80' in the device"),
        ("24GiB, 0 TFLOPS, 25 GB/s", InputError, "cannot read '0 TFLOPS'"),
        ("24GiB, -8 TFLOPS, 25 GB/s", InputError, "cannot read '-8 TFLOPS'"),
        ("24GiB, 80 TFLOPS, 25 Gbit/s", InputError, "the rate of the link"),
        ("24GiB, 25 GB/s, 80 TFLOPS", InputError, "expected TFLOPS"),
        ("24GiB, 80 TFLOPS, 25 GB/s, fast memory", InputError, "cannot read 'fast'"),
    ],
)
def test_unreadable_numbers_are_named(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        device(text)


@pytest.mark.parametrize("flag", ["--gpu", "--device"])
def test_list_option_prints_the_devices(flag: str) -> None:
    result = CliRunner().invoke(app, ["plan", flag, "list"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 1 + len(devices())
    for preset, line in zip(devices(), lines[1:], strict=True):
        assert line.split()[0] == preset.key
        assert preset.name in line
    assert "23.5 GiB" in result.output
    assert "165 TFLOPS" in result.output
