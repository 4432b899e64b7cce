// The GPU part of paging.cpp. The loop's ops run on its own streams, and copies to and from pinned host memory on two
// of ours; the host never waits. Dependencies are known when work is issued (streams.h), so an evicted block's memory
// is reusable at once. A storage's address is valid in the order of the stream that was current when it was set, so
// unobserved code ordered after that stream reads the right bytes. Its writes to a window return with the next fetch by
// an op, but not with an earlier fetch ahead.

#pragma once

#include "../device_cuda.h"
#include "pinned.h"
#include "streams.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace follow {

struct CudaRuntime {
  using Handle = cudaStream_t;
  using Event = cudaEvent_t;
  c10::DeviceIndex device;

  Event make() const {
    const c10::cuda::CUDAGuard guard(device);
    Event event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void drop(Event event) const {
    if (cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();  // CUDA may be shut down at process exit
  }
  bool record(Event event, Handle stream) const {
    const cudaError_t error = cudaEventRecord(event, stream);
    const bool is_destroyed = error == cudaErrorInvalidResourceHandle || error == cudaErrorContextIsDestroyed;
    if (!is_destroyed) C10_CUDA_CHECK(error);
    if (is_destroyed) cudaGetLastError();  // or the next kernel's check would report it
    return !is_destroyed;
  }
  bool is_over(Event event) const {
    const cudaError_t error = cudaEventQuery(event);
    if (error != cudaErrorNotReady) C10_CUDA_CHECK(error);
    if (error == cudaErrorNotReady) cudaGetLastError();
    return error == cudaSuccess;
  }
  void wait(Handle stream, Event event) const { C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0)); }
  void finish() const {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
  }
};

// A stream outside PyTorch's pool. It does not synchronize with the default stream.
class OwnStream {
 public:
  explicit OwnStream(c10::DeviceIndex device) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking));
  }
  ~OwnStream() {
    if (cudaStreamDestroy(handle_) != cudaSuccess) cudaGetLastError();
  }
  OwnStream(const OwnStream&) = delete;
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

class Device {
 public:
  static constexpr c10::DeviceType kType = c10::DeviceType::CUDA;
  static constexpr c10::DispatchKey kKernels = c10::DispatchKey::CUDA;
  static constexpr int64_t kAddresses = 1;
  static constexpr int64_t addresses_to_grow() { return 0; }  // PyTorch's allocator serves the excess
  static constexpr bool kStreams = true;
  static constexpr bool kReadable = false;
  static constexpr bool kFixedLeave = false;

  using Homes = PinnedHomes;
  struct Order {
    Marks before;               // work that users of the block's memory wait for
    Marks after;                // and work that also the memory's next owner waits for
    Marks home;                 // work on its slot
    int stream = -1;            // current when it got its memory
    std::vector<int> recorded;  // streams passed to Tensor.record_stream
  };
  using Moment = cudaEvent_t;
  using Span = std::pair<Moment, Moment>;

  explicit Device(int index)
      : index_(static_cast<c10::DeviceIndex>(index)),
        for_in_(index_),
        for_out_(index_),
        streams_(CudaRuntime{index_}),
        in_(streams_.number_of(for_in_.handle())),
        out_(streams_.number_of(for_out_.handle())) {}
  ~Device() {
    for (const cudaEvent_t event : events_)
      if (cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();
  }
  Device(const Device&) = delete;

  c10::Device ours() const { return c10::Device(c10::DeviceType::CUDA, index_); }
  static bool is_ours(c10::Device device) {
    return device.type() == c10::DeviceType::CUDA &&
           device.index() == followed_device().load(std::memory_order_relaxed);
  }
  static bool is_current() { return c10::cuda::current_device() == followed_device().load(std::memory_order_relaxed); }
  void enter() const { followed_device() = index_; }

  // Whether rerunning an op on the same operands gives the same bits, regardless of free memory and concurrent work.
  // Not matrix products and convolutions: their libraries select among kernels and share workspaces.
  static bool repeats(const c10::OperatorHandle& op) {
    static const std::unordered_set<std::string> repeatable{
        "aten::_fused_rms_norm", "aten::_log_softmax", "aten::_softmax", "aten::_to_copy", "aten::amax", "aten::amin",
        "aten::bernoulli_", "aten::cat", "aten::clone", "aten::constant_pad_nd", "aten::copy_", "aten::cudnn_batch_norm",
        "aten::embedding", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::fill_", "aten::full_like",
        "aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices", "aten::mean", "aten::native_batch_norm",
        "aten::native_dropout", "aten::native_group_norm", "aten::native_layer_norm", "aten::new_zeros",
        "aten::ones_like", "aten::rand_like", "aten::repeat", "aten::stack", "aten::sum", "aten::uniform_", "aten::zero_",
        "aten::zeros_like"};
    return op.hasTag(at::Tag::pointwise) || repeatable.count(op.schema().name()) != 0;
  }
  // Some kernels sum in another order below this alignment, which PyTorch's allocator guarantees.
  static bool copies_alike(const c10::StorageImpl& storage) {
    return reinterpret_cast<uintptr_t>(storage.data()) % 512 == 0;
  }
  using Stream = c10::cuda::CUDAStream;
  Stream stream() const { return c10::cuda::getCurrentCUDAStream(index_); }
  using InOrder = c10::cuda::CUDAStreamGuard;

  // Whether cuDNN benchmarks its engines (torch.backends.cudnn.benchmark).
  static bool picks_by_trying() { return at::globalContext().benchmarkCuDNN(); }
  // The segment size of PyTorch's allocator for requests below 1 MiB, its bytes in such segments, and the free part.
  static constexpr int64_t kSegment = int64_t{2} << 20;
  int64_t bytes_of_segments() const { return of_small(stats().reserved_bytes); }
  int64_t free_in_segments() const {
    const auto now = stats();
    return of_small(now.reserved_bytes) - of_small(now.allocated_bytes);
  }
  // The budget needed for a larger arena: part of the increase is used outside it (see gpu.py).
  static int64_t min_budget_for(int64_t min_bytes, int64_t budget) {
    return min_bytes <= budget ? min_bytes : min_bytes + (min_bytes - budget) / 8 + kSegment;
  }

  // One allocation of PyTorch's, so that it counts in its statistics and limits. Throws c10::OutOfMemoryError.
  char* reserve(int64_t bytes, int64_t) {
    const c10::cuda::CUDAGuard guard(index_);
    c10::cuda::CUDACachingAllocator::emptyCache();
    char* base = static_cast<char*>(c10::cuda::CUDACachingAllocator::raw_alloc(bytes));
    Marks marks;  // earlier users of the memory
    marks.add(streams_.now(current()));
    fences_.put(base, bytes, marks);
    return base;
  }
  void unreserve(char* base, int64_t) const {
    const c10::cuda::CUDAGuard guard(index_);
    if (cudaDeviceSynchronize() != cudaSuccess) cudaGetLastError();
    if (base != nullptr) c10::cuda::CUDACachingAllocator::raw_delete(base);
  }
  static void discard(char*, int64_t) {}
  static void start_over() {}
  static void collapse(char*, int64_t) {}

  void take(Order& order, const char* at, int64_t bytes) {
    order.before = fences_.take(at, bytes);
    order.after.clear();
    order.recorded.clear();
    order.stream = current();
  }
  void give(Order& order, const char* at, int64_t bytes) {
    fences_.put(at, bytes, all_of(order));
    order.before.clear();
    order.after.clear();
    order.recorded.clear();
  }
  void use(Order& order) { streams_.wait(current(), order.before); }
  void mark_used(Order& order) { order.after.add(streams_.now(current())); }
  void take_slot(Order& order, const char* window, int64_t bytes) { order.home = fences_.take(window, bytes); }
  void give_slot(Order& order, const char* window, int64_t bytes) {
    order.home.add(streams_.now(current()));  // the current stream may have used the window
    fences_.put(window, bytes, std::move(order.home));
    order.home.clear();
  }
  void use_slot(Order& order) { streams_.wait(current(), order.home); }
  void mark_slot_used(Order& order) { order.home.add(streams_.now(current())); }
  void record(Order& order, void* handle) {
    const int stream = streams_.number_of(static_cast<cudaStream_t>(handle));
    if (std::find(order.recorded.begin(), order.recorded.end(), stream) == order.recorded.end())
      order.recorded.push_back(stream);
  }

  void save(Homes& homes, const Slot& slot, Order& order, const char* from) {
    streams_.wait(out_, all_of(order));
    streams_.wait(out_, order.home);
    issue(homes.window(slot), from, slot.bytes, cudaMemcpyDeviceToHost, out_);
    const Mark mark = streams_.now(out_);
    order.home.clear();
    order.home.add(mark);
    order.after.add(mark);
    streams_.record(out_);
  }
  void load(Homes& homes, const Slot& slot, Order& order, char* to) {
    streams_.wait(in_, order.before);
    streams_.wait(in_, order.home);
    if (more_unobserved_) unobserved_.add(streams_.now(current()));
    streams_.wait(in_, unobserved_);
    issue(to, homes.window(slot), slot.bytes, cudaMemcpyHostToDevice, in_);
    const Mark mark = streams_.now(in_);
    order.before.clear();
    order.before.add(mark);
    order.home.add(mark);
    streams_.record(in_);
    streams_.record(current());  // so that later copies depend on frees up to here only
  }
  void note_unobserved(bool more) {
    unobserved_.add(streams_.now(current()));
    more_unobserved_ |= more;
  }
  void save_foreign(Homes& homes, const Slot& slot, Order& order, const char* from, int64_t bytes) {
    const int stream = current();
    streams_.wait(stream, order.home);
    issue(homes.window(slot), from, bytes, cudaMemcpyDefault, stream);
    order.home.clear();
    order.home.add(streams_.now(stream));
  }
  void copy(char* to, const char* from, int64_t bytes) { issue(to, from, bytes, cudaMemcpyDefault, current()); }
  void move(Order& order, char* to, const char* from, int64_t bytes) {
    const int stream = current();
    streams_.wait(stream, fences_.take(to, bytes));
    streams_.wait(stream, all_of(order));
    issue(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    order.before.clear();
    order.after.clear();
    order.recorded.clear();
    order.stream = stream;
    order.before.add(streams_.now(stream));
    fences_.put(from, bytes, order.before);
  }
  void fill(char* at, int64_t bytes) {
    const int stream = current();
    streams_.wait(stream, fences_.take(at, bytes));
    C10_CUDA_CHECK(cudaMemsetAsync(at, 0xAB, bytes, streams_.handle(stream)));
    Marks marks;
    marks.add(streams_.now(stream));
    fences_.put(at, bytes, marks);
  }
  void retire(const c10::DataPtr& memory) const {
    if (memory.get() == nullptr) return;
    c10::cuda::CUDACachingAllocator::recordStream(memory, c10::cuda::getCurrentCUDAStream(index_));
  }

  void cover(Homes&, const Slot&, char*, bool) const {}
  static bool uncover(char*, int64_t) { return true; }
  void uncover_with(Homes&, const Slot&, char*, int64_t) {}
  void begin_watch(Homes&, const Slot&) const {}
  bool was_touched(Homes&, const Slot&) const { return false; }
  bool can_detect_touches(const Homes&) const { return true; }

  Moment moment() {
    if (events_.empty()) {
      const c10::cuda::CUDAGuard guard(index_);
      cudaEvent_t fresh = nullptr;
      C10_CUDA_CHECK(cudaEventCreate(&fresh));
      events_.push_back(fresh);
    }
    const Moment event = events_.back();
    restart(event);
    events_.pop_back();
    return event;
  }
  void restart(Moment event) { C10_CUDA_CHECK(cudaEventRecord(event, streams_.handle(current()))); }
  void forget(const Span& span) {
    events_.push_back(span.first);
    events_.push_back(span.second);
  }
  // The times from the end of each span to the beginning of the next. The host waits for the last span.
  std::vector<int64_t> nanos_between(const std::vector<Span>& ops) {
    C10_CUDA_CHECK(cudaEventSynchronize(ops.back().second));
    std::vector<int64_t> nanos;
    for (size_t i = 0; i + 1 < ops.size(); ++i) {
      float milliseconds = 0;
      // Ops on several streams may be incomplete.
      if (cudaEventElapsedTime(&milliseconds, ops[i].second, ops[i + 1].first) != cudaSuccess) cudaGetLastError();
      nanos.push_back(std::max<int64_t>(0, static_cast<int64_t>(milliseconds * 1e6)));
    }
    return nanos;
  }
  // The time to copy `bytes` to a home or from it. The host waits.
  int64_t nanos_of_copy(char* window, char* at, int64_t bytes, bool in) {
    const int stream = in ? in_ : out_;
    const auto event = [&](bool first) {
      cudaEvent_t recorded = nullptr;
      C10_CUDA_CHECK(cudaEventCreate(&recorded));
      C10_CUDA_CHECK(cudaEventRecord(recorded, streams_.handle(stream)));
      if (!first) C10_CUDA_CHECK(cudaEventSynchronize(recorded));
      return recorded;
    };
    const c10::cuda::CUDAGuard guard(index_);
    streams_.wait(stream, streams_.now(current()));
    const cudaEvent_t start = event(true);
    if (in)
      issue(at, window, bytes, cudaMemcpyHostToDevice, stream);
    else
      issue(window, at, bytes, cudaMemcpyDeviceToHost, stream);
    const cudaEvent_t end = event(false);
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
    C10_CUDA_CHECK(cudaEventDestroy(start));
    C10_CUDA_CHECK(cudaEventDestroy(end));
    return static_cast<int64_t>(milliseconds * 1e6);
  }

 private:
  static std::atomic<int>& followed_device() {
    static std::atomic<int> index{-1};
    return index;
  }

  c10::CachingDeviceAllocator::DeviceStats stats() const {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(index_);
  }
  static int64_t of_small(const c10::CachingAllocator::StatArray& bytes) {
    return bytes[static_cast<size_t>(c10::CachingAllocator::StatType::SMALL_POOL)].current;
  }

  int current() { return streams_.number_of(c10::cuda::getCurrentCUDAStream(index_).stream()); }
  void issue(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind, int stream) {
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, streams_.handle(stream)));
  }
  // All work on a block's memory, including unobserved work that may have been issued to its stream.
  Marks all_of(const Order& order) {
    Marks all = order.before;
    all.add(order.after);
    if (order.stream >= 0) all.add(streams_.now(order.stream));
    for (const int stream : order.recorded) all.add(streams_.now(stream));
    return all;
  }

  c10::DeviceIndex index_;
  OwnStream for_in_, for_out_;
  Streams<CudaRuntime> streams_;
  int in_, out_;
  Fences fences_;
  Marks unobserved_;                 // unobserved work that may have written to windows
  bool more_unobserved_ = false;     // more may come at any time
  std::vector<cudaEvent_t> events_;  // unused timing events
};

}  // namespace follow
