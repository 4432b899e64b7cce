// The checksum of followed loops as a library, for test_checksum.py.

#include "checksum.h"

extern "C" __attribute__((visibility("default"))) uint64_t sum_of(const char* bytes, int64_t count, int64_t step) {
  return follow::sum_of(bytes, count, step);
}
