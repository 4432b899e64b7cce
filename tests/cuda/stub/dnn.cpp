// cuDNN: handles, descriptors, and work that takes time without computing. Every configuration has a plan. With
// STUB_DNN_MIB, which is read each time, it also has a better plan that needs so many MiB of scratch memory.

#include "shared.h"

#include <cudnn_version.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API STUB_EXPORT

namespace {
struct Handle {
  void* stream = nullptr;
};
constexpr int kExecutionFailed = 5000;
}  // namespace

API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(int) { return "an error of the stub's cuDNN"; }
API void cudnnGetLastErrorString(char* text, size_t bytes) {
  if (bytes != 0) text[0] = 0;
}
API int cudnnGetProperty(int which, int* value) {
  *value = which == 0 ? CUDNN_MAJOR : which == 1 ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return 0;
}
API int cudnnCreate(void** made) {
  *made = new Handle;
  return 0;
}
API int cudnnDestroy(void* handle) {
  delete static_cast<Handle*>(handle);
  return 0;
}
API int cudnnSetStream(void* handle, void* stream) {
  static_cast<Handle*>(handle)->stream = stream;
  return 0;
}
API int cudnnGetStream(void* handle, void** stream) {
  *stream = static_cast<Handle*>(handle)->stream;
  return 0;
}

#define DESCRIPTOR(name)                   \
  API int cudnnCreate##name(void** made) { \
    *made = std::calloc(1, 1024);          \
    return 0;                              \
  }                                        \
  API int cudnnDestroy##name(void* made) { \
    std::free(made);                       \
    return 0;                              \
  }
DESCRIPTOR(TensorDescriptor)
DESCRIPTOR(FilterDescriptor)
DESCRIPTOR(ConvolutionDescriptor)
DESCRIPTOR(ActivationDescriptor)
DESCRIPTOR(DropoutDescriptor)
DESCRIPTOR(RNNDescriptor)
DESCRIPTOR(RNNDataDescriptor)
DESCRIPTOR(PoolingDescriptor)
DESCRIPTOR(SpatialTransformerDescriptor)
DESCRIPTOR(CTCLossDescriptor)

#define WORK(name)                                                                                         \
  API int name(void* handle) {                                                                             \
    if (stub_failure() != 0) return kExecutionFailed;                                                      \
    stub_issue(static_cast<Handle*>(handle)->stream, "library", 10e-6, nullptr, nullptr, nullptr);         \
    return 0;                                                                                              \
  }
WORK(cudnnBatchNormalizationForwardTrainingEx)
WORK(cudnnBatchNormalizationBackwardEx)
WORK(cudnnBatchNormalizationForwardInference)
WORK(cudnnConvolutionForward)
WORK(cudnnConvolutionBackwardData)
WORK(cudnnConvolutionBackwardFilter)
WORK(cudnnBackendExecute)

// Work uses no scratch memory.
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, size_t* bytes) {
  *bytes = 0;
  return 0;
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* bytes) {
  *bytes = 0;
  return 0;
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, void*, void*,
                                                          size_t* bytes) {
  *bytes = 0;
  return 0;
}

// Recurrent networks are computed without cuDNN (replay.cpp): with a size above that of any parameters, PyTorch does
// not use cuDNN's layout.
API int cudnnGetRNNWeightSpaceSize(void*, void*, size_t* bytes) {
  *bytes = size_t{1} << 50;
  return 0;
}
API int cudnnDropoutGetStatesSize(void*, size_t* bytes) {
  *bytes = 1 << 20;
  return 0;
}

// The graph API. Descriptors of configurations and of plans begin with the bytes of scratch memory.
namespace {
constexpr int kInteger = 3, kDescriptor = 15;  // CUDNN_TYPE_INT64, CUDNN_TYPE_BACKEND_DESCRIPTOR
constexpr int kConfigurations = 202, kOfPlan = 401, kScratch = 402;  // of CUDNN_ATTR_ENGINEHEUR and CUDNN_ATTR_EXECUTION_PLAN
int64_t scratch_of_first() {
  const char* value = std::getenv("STUB_DNN_MIB");
  return value == nullptr ? 0 : static_cast<int64_t>(std::atoi(value)) << 20;
}
}  // namespace
API int cudnnBackendCreateDescriptor(int, void** made) {
  *made = std::calloc(1, 256);
  return 0;
}
API int cudnnBackendDestroyDescriptor(void* made) {
  std::free(made);
  return 0;
}
API int cudnnBackendInitialize(void*) { return 0; }
API int cudnnBackendFinalize(void*) { return 0; }
API int cudnnBackendSetAttribute(void* descriptor, int name, int, int64_t, const void* values) {
  if (name == kOfPlan) std::memcpy(descriptor, *static_cast<void* const*>(values), sizeof(int64_t));
  return 0;
}
API int cudnnBackendGetAttribute(void* descriptor, int name, int type, int64_t wanted, int64_t* count, void* values) {
  if (const int64_t scratch = scratch_of_first(); name == kConfigurations && scratch != 0) {
    if (count != nullptr) *count = values == nullptr ? 2 : std::min<int64_t>(wanted, 2);  // the number written
    if (values != nullptr && wanted > 0) std::memcpy(*static_cast<void**>(values), &scratch, sizeof scratch);
    return 0;
  }
  if (name == kScratch && values != nullptr && wanted > 0) {
    if (count != nullptr) *count = 1;
    std::memcpy(values, descriptor, sizeof(int64_t));
    return 0;
  }
  if (count != nullptr) *count = type == kDescriptor || type == kInteger ? 1 : 0;
  if (type == kInteger && values != nullptr && wanted != 0) std::memset(values, 0, 8);
  return 0;
}
