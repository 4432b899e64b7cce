"""Tests of the checksum that detects damage and untracked writes: every change must change the sum."""

from __future__ import annotations

import ctypes
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from effort import examples, is_exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from native_checks import FOLDER
from strategies import LIMITS

from outofcore.compiling import COMPILERS, compile_library

PAGE = 4096
LINE = 64
LANES = 8
SAMPLED = PAGE + LINE

Sum = Callable[..., int]


@pytest.fixture(scope="module")
def sum_of(tmp_path_factory: pytest.TempPathFactory) -> Sum:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler")
    target = tmp_path_factory.mktemp("checksum") / "checksum.so"
    compile_library({Path(__file__).with_name("checksum_check.cpp"): ("-O3", f"-I{FOLDER}")}, target)
    function = ctypes.CDLL(str(target)).sum_of
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p, *3 * (ctypes.c_int64,))
    return lambda data, step=LINE, before=0: function(data.ctypes.data, data.nbytes, step, before)


def random_words(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 2**64, count, np.uint64)


def blocks() -> list[np.ndarray]:
    count = 16 * PAGE // 8
    few = np.zeros(count, np.uint64)
    few[::100] = 1
    float_ones = np.ones(2 * count, np.float32).view(np.uint64)
    return [random_words(count), np.zeros(count, np.uint64), float_ones, few, np.arange(count, dtype=np.uint64)]


def halves_swapped(words: np.ndarray, unit: int) -> np.ndarray:
    return words.reshape(-1, 2, unit)[:, ::-1].reshape(-1)


def one_swap(words: np.ndarray, unit: int) -> np.ndarray:
    changed = words.reshape(-1, unit).copy()
    changed[[1, -2]] = changed[[-2, 1]]
    return changed.reshape(-1)


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float64 negated": lambda words: words ^ np.uint64(1 << 63),
    "float32 negated": lambda words: words ^ np.uint64(1 << 63 | 1 << 31),
    "float16 negated": lambda words: words ^ np.uint64(0x8000800080008000),
    "inverted": lambda words: ~words,
    "zeroed": lambda words: words * np.uint64(0),
    "filled": lambda words: words * np.uint64(0) + np.uint64(0x3F8000003F800000),
    "last page zeroed": lambda words: np.concatenate([words[: -PAGE // 8], words[-PAGE // 8 :] * np.uint64(0)]),
    "one added to words": lambda words: words + np.uint64(1),
    "top bit added to words": lambda words: words + np.uint64(1 << 62),
    "one added to bytes": lambda words: (words.view(np.uint8) + np.uint8(1)).view(np.uint64),
    "doubled": lambda words: words * np.uint64(2),
    "bytes swapped": lambda words: words.byteswap(),
    **{
        f"shifted by {n} words": lambda words, n=n: np.roll(words, n) for n in (1, LANES, 128, PAGE // 8, 4 * PAGE // 8)
    },
    **{f"runs of {n} words swapped": lambda words, n=n: halves_swapped(words, n) for n in (1, 2, 4, 8, 64, 128, 512)},
    **{f"two runs of {n} words swapped": lambda words, n=n: one_swap(words, n) for n in (1, 8, 128, 512)},
    "lanes reversed": lambda words: words.reshape(-1, LANES)[:, ::-1].reshape(-1),
    "order reversed": lambda words: words[::-1].copy(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_structured_change_gives_another_sum(sum_of: Sum, name: str) -> None:
    for words in blocks():
        changed = np.ascontiguousarray(CHANGES[name](words))
        assert changed.nbytes == words.nbytes
        if not np.array_equal(changed, words):
            assert sum_of(changed) != sum_of(words)


def test_structured_changes_give_distinct_sums(sum_of: Sum) -> None:
    for words in blocks():
        contents = {np.ascontiguousarray(change(words)).tobytes() for change in CHANGES.values()}
        assert len({sum_of(np.frombuffer(content, np.uint64)) for content in contents}) == len(contents)


def test_every_flipped_bit_gives_another_sum(sum_of: Sum) -> None:
    places = range(0, PAGE // 8, 1 if is_exhaustive() else 5)
    for words in (random_words(PAGE // 8), np.zeros(PAGE // 8, np.uint64)):
        sums = {sum_of(words)}
        for place, bit in itertools.product(places, range(64)):
            words[place] ^= np.uint64(1 << bit)
            sums.add(sum_of(words))
            words[place] ^= np.uint64(1 << bit)
        assert len(sums) == 1 + 64 * len(places)


def test_every_pair_of_equal_flipped_bits_gives_another_sum(sum_of: Sum) -> None:
    words = random_words(PAGE // 8)
    unchanged = sum_of(words)
    for lane in range(LANES) if is_exhaustive() else (0, 3):
        places = range(lane, len(words), LANES if is_exhaustive() else 4 * LANES)
        for first, second in itertools.combinations(places, 2):
            for bit in range(64):
                words[[first, second]] ^= np.uint64(1 << bit)
                assert sum_of(words) != unchanged, (first, second, bit)
                words[[first, second]] ^= np.uint64(1 << bit)


@pytest.mark.parametrize("bit", [0, 31, 62, 63])
@pytest.mark.parametrize("apart", [1, 2, LANES, 128])
def test_halves_of_sums_collide_as_rarely_as_random_ones(sum_of: Sum, bit: int, apart: int) -> None:
    """Of 65,536 sums with 16 words flipped in each combination, few pairs share any 32-bit part."""
    count = 16 if is_exhaustive() else 12
    for words in (random_words(16 * 128), np.zeros(16 * 128, np.uint64)):
        patterns = np.arange(1 << count, dtype=np.uint64)[:, None] >> np.arange(count, dtype=np.uint64) & np.uint64(1)
        places, sums = np.arange(count) * apart, np.empty(len(patterns), np.uint64)
        for index, flips in enumerate(patterns << np.uint64(bit)):
            words[places] ^= flips
            sums[index] = sum_of(words)
            words[places] ^= flips
        for low in range(0, 33, 8):
            parts = sums >> np.uint64(low) & np.uint64(0xFFFFFFFF)
            assert len(parts) - len(np.unique(parts)) <= 6  # 0.5 are expected, of 65,536


def test_lengths_give_distinct_sums(sum_of: Sum) -> None:
    data = np.zeros(3000, np.uint8)
    assert len({sum_of(data[:count]) for count in range(3000)}) == 3000


def test_last_bytes_count_at_any_length(sum_of: Sum) -> None:
    data = random_words(400).view(np.uint8)
    for count in range(1, 1200):
        unchanged = sum_of(data[:count])
        for place in (0, count // 2, count - 1):
            data[place] ^= 0x80
            assert sum_of(data[:count]) != unchanged
            data[place] ^= 0x80
        data[count] ^= 0x80
        assert sum_of(data[:count]) == unchanged


def test_sums_of_parts_add_up_to_the_sum_of_the_whole(sum_of: Sum) -> None:
    data = random_words(PAGE).view(np.uint8)
    for count in (0, 1, 1023, 1024, 1025, 5000, len(data)):
        for part in (1024, 3 * 1024):
            parts = [sum_of(data[at : min(at + part, count)], before=at) for at in range(0, count, part)]
            assert sum(parts) % 2**64 == sum_of(data[:count])


def test_unaligned_bytes_have_the_same_sum(sum_of: Sum) -> None:
    words = random_words(PAGE // 8)
    moved = np.zeros(PAGE + 8, np.uint8)
    for offset in range(8):
        moved[offset : offset + PAGE] = words.view(np.uint8)
        assert sum_of(moved[offset : offset + PAGE]) == sum_of(words)


def test_sampled_sum_sees_the_first_line_of_each_step(sum_of: Sum) -> None:
    words = random_words(64 * PAGE // 8)
    unchanged, changed = sum_of(words, SAMPLED), sum_of(words ^ np.uint64(1 << 63), SAMPLED)
    assert changed != unchanged
    for at in range(0, words.nbytes, SAMPLED):
        for place in range(at // 8, at // 8 + LANES):
            words[place] ^= np.uint64(1 << 63)
            assert sum_of(words, SAMPLED) != unchanged
            words[place] ^= np.uint64(1 << 63)
        for place in (at // 8 + LANES, at // 8 - 1):  # between the samples
            if 0 <= place < len(words):
                words[place] ^= np.uint64(1)
                assert sum_of(words, SAMPLED) == unchanged
                words[place] ^= np.uint64(1)


@settings(LIMITS, max_examples=examples(500))
@given(
    data=st.binary(min_size=1, max_size=3 * 1024),
    changes=st.lists(st.tuples(st.integers(0, 3 * 1024 - 1), st.integers(0, 255)), min_size=1, max_size=8),
    repeats=st.integers(1, 5),
)
def test_sums_are_equal_only_for_equal_bytes(
    sum_of: Sum, data: bytes, changes: list[tuple[int, int]], repeats: int
) -> None:
    before = np.frombuffer(data * repeats, np.uint8)
    after = before.copy()
    for place, value in changes:
        after[place % len(after)] = value
    assert (sum_of(after) == sum_of(before)) == np.array_equal(after, before)
