// CUPTI of a device that is not there: it is never ready, so profilers see no work on the device. NVIDIA's own never comes
// back from its first call, if its driver is the stub and CUDA is 13.2.

namespace {
constexpr int kNotInitialized = 15;  // CUPTI_ERROR_NOT_INITIALIZED
}

// Of the entry points that are not here.
extern "C" int stub_default(const char*, char*) { return kNotInitialized; }
extern "C" __attribute__((visibility("default"))) int cuptiGetResultString(int, const char** told) {
  *told = "the stub has no CUPTI";
  return 0;
}
