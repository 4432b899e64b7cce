// Fingerprints of memory, at the speed at which it can be read: see fingerprints.py.
//
// Each of four lanes takes 16 of 64 bytes, mixes them with a secret and with what it has so far, multiplies the two
// halves and folds the 128 bits of the product. What comes first counts otherwise than what comes later, so bytes that
// change places are noticed. The secrets are drawn anew in each process: no contents collide in all of them.

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kLanes = 4;

inline uint64_t word(const char* at) {
  uint64_t found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

inline uint64_t mixed(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

// ``secrets``: two for each lane and two more.
EXPORT uint64_t outofcore_fingerprint(const void* data, int64_t bytes, const uint64_t* secrets) noexcept {
  const auto* at = static_cast<const char*>(data);
  uint64_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = secrets[kLanes + lane];
  int64_t left = bytes;
  for (; left >= 16 * kLanes; left -= 16 * kLanes, at += 16 * kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      // Added, not only multiplied: a product of nothing would forget what came before.
      lanes[lane] = (lanes[lane] << 29 | lanes[lane] >> 35) +
                    mixed(word(at + 16 * lane) ^ secrets[lane], word(at + 16 * lane + 8) ^ lanes[lane]);
    }
  }
  char rest[16 * kLanes] = {};
  std::memcpy(rest, at, static_cast<size_t>(left));
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = (lanes[lane] << 29 | lanes[lane] >> 35) +
                  mixed(word(rest + 16 * lane) ^ secrets[lane], word(rest + 16 * lane + 8) ^ lanes[lane]);
  }
  uint64_t found = mixed(static_cast<uint64_t>(bytes) ^ secrets[2 * kLanes], secrets[2 * kLanes + 1]);
  for (int lane = 0; lane < kLanes; ++lane) {
    found = mixed(found ^ lanes[lane], secrets[kLanes + lane]) + (lanes[lane] << 17 | lanes[lane] >> 47);
  }
  return found;
}
