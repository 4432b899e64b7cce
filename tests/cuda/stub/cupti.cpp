// CUPTI, never ready, so that profilers see no work on the device. NVIDIA's own hangs in its first call with the driver
// of the stub and CUDA 13.2.

namespace {
constexpr int kNotInitialized = 15;  // CUPTI_ERROR_NOT_INITIALIZED
}

// For the missing entry points.
extern "C" int stub_default(const char*, char*) { return kNotInitialized; }
extern "C" __attribute__((visibility("default"))) int cuptiGetResultString(int, const char** told) {
  *told = "the stub has no CUPTI";
  return 0;
}
