// cuBLAS, and with STUB_LT cuBLASLt: handles, layouts, and products that take time without computing.

#include "settings.h"
#include "shared.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API STUB_EXPORT

namespace {
struct Handle {
  void* stream = nullptr;
  int math = 0, pointers = 0;
};
Handle* handle_of(void* handle) { return static_cast<Handle*>(handle); }
constexpr int kExecutionFailed = 13, kInvalidValue = 7;

int product(void* stream, double rows, double columns, double inner, double batch) {
  if (stub_failure() != 0) return kExecutionFailed;
  stub_issue(stream, "library", 2 * rows * columns * inner * batch / stub::settings().flops, nullptr, nullptr, nullptr);
  return 0;
}
}  // namespace

#ifndef STUB_LT

API int cublasCreate_v2(void** made) {
  *made = new Handle;
  return 0;
}
API int cublasDestroy_v2(void* handle) {
  delete handle_of(handle);
  return 0;
}
API int cublasSetStream_v2(void* handle, void* stream) {
  handle_of(handle)->stream = stream;
  return 0;
}
API int cublasGetStream_v2(void* handle, void** stream) {
  *stream = handle_of(handle)->stream;
  return 0;
}
API int cublasSetWorkspace_v2(void*, void* memory, size_t bytes) {
  return bytes != 0 && stub_is_device(memory) == 0 ? kInvalidValue : 0;
}
API int cublasSetMathMode(void* handle, int mode) {
  handle_of(handle)->math = mode;
  return 0;
}
API int cublasGetMathMode(void* handle, int* mode) {
  *mode = handle_of(handle)->math;
  return 0;
}
API int cublasSetPointerMode_v2(void* handle, int mode) {
  handle_of(handle)->pointers = mode;
  return 0;
}
API int cublasGetPointerMode_v2(void* handle, int* mode) {
  *mode = handle_of(handle)->pointers;
  return 0;
}
API int cublasGetProperty(int, int* value) {
  *value = 13;
  return 0;
}
API int cublasGetVersion_v2(void*, int* version) {
  *version = 130100;
  return 0;
}

// Only the leading arguments matter: the caller cleans up the rest.
#define GEMM(name) \
  API int name(void* handle, int, int, int m, int n, int k) { return product(handle_of(handle)->stream, m, n, k, 1); }
GEMM(cublasSgemm_v2)
GEMM(cublasDgemm_v2)
GEMM(cublasCgemm_v2)
GEMM(cublasZgemm_v2)
GEMM(cublasGemmEx)
GEMM(cublasSgemmEx)

#define GEMM_BATCHED(name)                                                                                               \
  API int name(void* handle, int, int, int m, int n, int k, const void*, const void*, int, int64_t, const void*, int,    \
               int64_t, const void*, void*, int, int64_t, int batch) {                                                   \
    return product(handle_of(handle)->stream, m, n, k, batch);                                                           \
  }
GEMM_BATCHED(cublasSgemmStridedBatched)
GEMM_BATCHED(cublasDgemmStridedBatched)
GEMM_BATCHED(cublasCgemmStridedBatched)
GEMM_BATCHED(cublasZgemmStridedBatched)
API int cublasGemmStridedBatchedEx(void* handle, int, int, int m, int n, int k, const void*, const void*, int, int, int64_t,
                                   const void*, int, int, int64_t, const void*, void*, int, int, int64_t, int batch) {
  return product(handle_of(handle)->stream, m, n, k, batch);
}

#define GEMV(name) \
  API int name(void* handle, int, int m, int n) { return product(handle_of(handle)->stream, m, n, 1, 1); }
GEMV(cublasSgemv_v2)
GEMV(cublasDgemv_v2)
GEMV(cublasCgemv_v2)
GEMV(cublasZgemv_v2)

#define DOT(name) \
  API int name(void* handle, int n) { return product(handle_of(handle)->stream, n, 1, 1, 1); }
DOT(cublasSdot_v2)
DOT(cublasDdot_v2)
DOT(cublasDotEx)
DOT(cublasCdotu_v2)
DOT(cublasZdotu_v2)
DOT(cublasCdotc_v2)
DOT(cublasZdotc_v2)

#else  // cuBLASLt

namespace {
struct Layout {
  uint64_t rows, columns;
  int32_t batch = 1;
};
struct Description {
  int transposed = 0;  // the first matrix
};
// As cublasLtMatmulHeuristicResult_t.
struct Algorithm {
  uint64_t opaque[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};
constexpr int kTransA = 3, kBatchCount = 5;  // CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
}  // namespace

API size_t cublasLtGetVersion() { return 130100; }
API size_t cublasLtGetCudartVersion() { return 13000; }
API int cublasLtCreate(void** made) {
  *made = new Handle;
  return 0;
}
API int cublasLtDestroy(void* handle) {
  delete handle_of(handle);
  return 0;
}
API int cublasLtMatmulDescCreate(Description** made, int, int) {
  *made = new Description;
  return 0;
}
API int cublasLtMatmulDescDestroy(Description* description) {
  delete description;
  return 0;
}
API int cublasLtMatmulDescSetAttribute(Description* description, int which, const void* value, size_t) {
  if (which == kTransA) description->transposed = *static_cast<const int*>(value);
  return 0;
}
API int cublasLtMatrixLayoutCreate(Layout** made, int, uint64_t rows, uint64_t columns, int64_t) {
  *made = new Layout{rows, columns};
  return 0;
}
API int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return 0;
}
API int cublasLtMatrixLayoutSetAttribute(Layout* layout, int which, const void* value, size_t) {
  if (which == kBatchCount) layout->batch = *static_cast<const int32_t*>(value);
  return 0;
}
API int cublasLtMatmulPreferenceCreate(void** made) {
  *made = std::calloc(1, 256);
  return 0;
}
API int cublasLtMatmulPreferenceDestroy(void* preference) {
  std::free(preference);
  return 0;
}
API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Algorithm* results, int* found) {
  std::memset(results, 0, sizeof *results);
  results->waves = 1;
  *found = 1;
  return 0;
}
API int cublasLtMatmul(void*, Description* how, const void*, const void*, const Layout* a, const void*, const Layout*,
                       const void*, const void*, const Layout*, void*, const Layout* out, const void*, void*, size_t,
                       void* stream) {
  const auto inner = static_cast<double>(how->transposed != 0 ? a->rows : a->columns);
  return product(stream, static_cast<double>(out->rows), static_cast<double>(out->columns), inner, out->batch);
}

#endif
