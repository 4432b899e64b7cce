// A 64-bit checksum of bytes: what is read back must be what was written, and a write that no op made is noticed.
//
// Bytes are read in lines of 64, and 16 lines make a chunk. Two steps mix a chunk:
//
// - Inside a chunk each word gets the key of its position. Pairs of words are multiplied, and the products of 128 bits
//   are added. This is NH of UMAC (Black et al., *UMAC: Fast and Secure Message Authentication*, CRYPTO 1999) with words of
//   64 bits: two chunks that differ have the same sum for one in 2^64 choices of the keys, whatever the difference is.
// - Each sum gets keys of its chunk's position. Its halves are multiplied, and the product is folded to 64 bits, as in
//   wyhash (Wang Yi). Folded sums are added.
//
// Chunks are added, not chained: in a chain of 64-bit states that differ, each further chunk could make them the same. So
// sums of parts add up to that of the whole.
//
// The keys are constants, the same in every process. Code that knows them could write what goes unnoticed; code that does
// not know them cannot, and neither can a disk.

#pragma once

#include "pages.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace outofcore {

constexpr int64_t kLine = 64;

namespace checksum {

constexpr int64_t kWords = kLine / 8, kLines = 16;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
using Wide = unsigned __int128;

// The output of SplitMix64 (Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014).
constexpr uint64_t drawn(uint64_t number) {
  uint64_t z = number * kGolden;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

constexpr std::array<uint64_t, kLines * kWords> make_keys() {
  std::array<uint64_t, kLines * kWords> keys{};
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = drawn(i + 1);
  return keys;
}
inline constexpr std::array<uint64_t, kLines * kWords> kKeys = make_keys();

inline uint64_t word(const char* at) {
  uint64_t found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

inline Wide line(const char* at, const uint64_t* keys, Wide sum) {
  for (int64_t i = 0; i < kWords; i += 2)
    sum += static_cast<Wide>(word(at + 8 * i) + keys[i]) * (word(at + 8 * i + 8) + keys[i + 1]);
  return sum;
}
// Not inlined: its loop needs the registers that the caller holds.
__attribute__((noinline)) inline Wide lines(const char* at, int64_t step, int64_t count) {
  Wide sum = 0;
  for (int64_t i = 0; i < count; ++i) sum = line(at + i * step, kKeys.data() + i * kWords, sum);
  return sum;
}

inline uint64_t folded(uint64_t a, uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// `number`: of the chunk, from 0.
inline uint64_t chunk(Wide sum, uint64_t number) {
  const auto low = static_cast<uint64_t>(sum), high = static_cast<uint64_t>(sum >> 64);
  const uint64_t key = kWords * kLines + 1 + 2 * number;
  return folded(low ^ drawn(key), high ^ drawn(key + 1));
}

}  // namespace checksum

// The checksum of the first 64 of every `step` bytes, which is at least 64; by default of all `count` bytes.
//
// Sums of parts of bytes add up to that of all: `before` says how many come before a part, in whole chunks.
inline uint64_t sum_of(const char* bytes, int64_t count, int64_t step = kLine, int64_t before = 0) {
  using namespace checksum;
  const int64_t whole = count < kLine ? 0 : (count - kLine) / step + 1;  // lines
  uint64_t sum = drawn(static_cast<uint64_t>(before + count)) - drawn(static_cast<uint64_t>(before));
  uint64_t number = static_cast<uint64_t>(before / (kLines * kLine));
  int64_t done = 0;
  for (; done + kLines <= whole; done += kLines) sum += chunk(lines(bytes + done * step, step, kLines), number++);
  if (done * step >= count) return sum;
  Wide rest = lines(bytes + done * step, step, whole - done);
  if (const int64_t at = whole * step; at < count) {  // the last line lacks bytes
    char last[kLine] = {};
    std::memcpy(last, bytes + at, static_cast<size_t>(count - at));
    rest = line(last, kKeys.data() + (whole - done) * kWords, rest);
  }
  return sum + chunk(rest, number);
}

// The checksum of a few pages of a slot at an offset of its home: the first, the last, and two between that the offset
// picks.
inline uint64_t sampled_sum(const char* bytes, int64_t count, int64_t slot) {
  constexpr uint32_t kSpread = 2654435761u;  // its multiples are spread over 32 bits (Knuth, TAOCP vol. 3, section 6.4)
  const int64_t pages = whole_pages(count) / kPage;
  if (pages == 0) return 0;
  const auto between = [&](int64_t k) {
    const auto spread = static_cast<uint32_t>((slot / kPage + k) * kSpread);
    return static_cast<int64_t>((static_cast<checksum::Wide>(spread) * static_cast<uint64_t>(pages)) >> 32);
  };
  uint64_t found = 0;
  for (const int64_t page : {int64_t{0}, pages - 1, between(1), between(2)}) {
    const int64_t at = page * kPage;
    found = (found << 13 | found >> 51) ^ sum_of(bytes + at, std::min(kPage, count - at));
  }
  return found;
}

}  // namespace outofcore
