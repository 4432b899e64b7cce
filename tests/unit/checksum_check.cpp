// The checksum as a library, for test_checksum.py.

#include "checksum.h"

extern "C" __attribute__((visibility("default"))) uint64_t sum_of(const char* bytes, int64_t count, int64_t step,
                                                                      int64_t before) {
  return outofcore::sum_of(bytes, count, step, before);
}
