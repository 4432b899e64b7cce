// A 64-bit checksum of bytes, for data read back from a home and for writes that no op reported. Lines of 64 bytes form
// chunks of 16. In a chunk, NH of UMAC (Black et al., *UMAC: Fast and Secure Message Authentication*, CRYPTO 1999) with
// 64-bit words sums products of keyed words: different chunks collide for one in 2^64 choices of keys. Each sum is
// mixed with keys of the chunk's position and folded to 64 bits as in wyhash (Wang Yi). Chunks are added, not chained,
// because chained states can merge; so checksums of consecutive ranges add up. The keys are constants: the checksum
// detects accidents, not attackers.

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

// SplitMix64 (Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014).
constexpr uint64_t splitmix64(uint64_t number) {
  uint64_t z = number * kGolden;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

constexpr std::array<uint64_t, kLines * kWords> make_keys() {
  std::array<uint64_t, kLines * kWords> keys{};
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = splitmix64(i + 1);
  return keys;
}
inline constexpr std::array<uint64_t, kLines * kWords> kKeys = make_keys();

inline uint64_t load_word(const char* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline Wide add_line(const char* at, const uint64_t* keys, Wide sum) {
  for (int64_t i = 0; i < kWords; i += 2)
    sum += static_cast<Wide>(load_word(at + 8 * i) + keys[i]) * (load_word(at + 8 * i + 8) + keys[i + 1]);
  return sum;
}
// Not inlined, because the loop needs registers that the caller occupies.
__attribute__((noinline)) inline Wide sum_lines(const char* at, int64_t step, int64_t count) {
  Wide sum = 0;
  for (int64_t i = 0; i < count; ++i) sum = add_line(at + i * step, kKeys.data() + i * kWords, sum);
  return sum;
}

inline uint64_t fold_product(uint64_t a, uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// `number` is the chunk's index, from 0.
inline uint64_t mix_chunk(Wide sum, uint64_t number) {
  const auto low = static_cast<uint64_t>(sum), high = static_cast<uint64_t>(sum >> 64);
  const uint64_t key = kWords * kLines + 1 + 2 * number;
  return fold_product(low ^ splitmix64(key), high ^ splitmix64(key + 1));
}

}  // namespace checksum

// Returns the checksum of the first 64 bytes of every `step` bytes (at least 64; by default, of all `count` bytes).
// `before` is the offset of these bytes in a longer range, in whole chunks: checksums of consecutive ranges add up.
inline uint64_t sum_of(const char* bytes, int64_t count, int64_t step = kLine, int64_t before = 0) {
  using namespace checksum;
  const int64_t whole = count < kLine ? 0 : (count - kLine) / step + 1;  // lines
  uint64_t sum = splitmix64(static_cast<uint64_t>(before + count)) - splitmix64(static_cast<uint64_t>(before));
  uint64_t number = static_cast<uint64_t>(before / (kLines * kLine));
  int64_t summed_lines = 0;
  for (; summed_lines + kLines <= whole; summed_lines += kLines)
    sum += mix_chunk(sum_lines(bytes + summed_lines * step, step, kLines), number++);
  if (summed_lines * step >= count) return sum;
  Wide tail = sum_lines(bytes + summed_lines * step, step, whole - summed_lines);
  if (const int64_t at = whole * step; at < count) {  // the last line is partial
    char last[kLine] = {};
    std::memcpy(last, bytes + at, static_cast<size_t>(count - at));
    tail = add_line(last, kKeys.data() + (whole - summed_lines) * kWords, tail);
  }
  return sum + mix_chunk(tail, number);
}

// Returns the checksum of up to four pages of a slot: the first, the last, and two chosen by the slot's offset.
inline uint64_t sampled_sum(const char* bytes, int64_t count, int64_t slot) {
  constexpr uint32_t kSpread = 2654435761u;  // multiples spread over 32 bits (Knuth, TAOCP vol. 3, section 6.4)
  const int64_t pages = whole_pages(count) / kPage;
  if (pages == 0) return 0;
  const auto between = [&](int64_t k) {
    const auto spread = static_cast<uint32_t>((slot / kPage + k) * kSpread);
    return static_cast<int64_t>((static_cast<checksum::Wide>(spread) * static_cast<uint64_t>(pages)) >> 32);
  };
  uint64_t sum = 0;
  for (const int64_t page : {int64_t{0}, pages - 1, between(1), between(2)}) {
    const int64_t at = page * kPage;
    sum = (sum << 13 | sum >> 51) ^ sum_of(bytes + at, std::min(kPage, count - at));
  }
  return sum;
}

}  // namespace outofcore
