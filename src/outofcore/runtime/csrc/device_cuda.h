// The CUDA part of allocator.h: PyTorch's CUDA allocator, and how an arena's memory is released. PyTorch allocates
// through c10::cuda::CUDACachingAllocator::get(), which can be replaced. Our allocator answers allocate() and forwards
// all else. Tested with the stub of tests/cuda/stub with torch 2.11, 2.14 and 2.15, and on a GPU with 2.11.

#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace device {

namespace caching = c10::cuda::CUDACachingAllocator;
using Stock = caching::CUDAAllocator;
using Pool = c10::MempoolId_t;
using Index = c10::DeviceIndex;

// Methods newer than torch 2.11 are detected on the stock allocator.
template <typename T>
void mark_capture(T& stock, Index device, bool begins) {
  if constexpr (requires { stock.markCaptureBegin(device); })
    begins ? stock.markCaptureBegin(device) : stock.markCaptureEnd(device);
}
template <typename T>
c10::DataPtr allocate_at(T& stock, size_t bytes, void* address) {
  if constexpr (requires { stock.allocateWithAddress(bytes, address); })
    return stock.allocateWithAddress(bytes, address);
  else
    TORCH_CHECK(false, "this version of PyTorch cannot allocate at a given address");
}
template <typename T>
std::shared_ptr<c10::GatheredContext> context_for(T& stock, const void* pointer) {
  if constexpr (requires { stock.getContextForPointer(pointer); }) return stock.getContextForPointer(pointer);
  return nullptr;
}
template <typename T>
bool takes_metadata(T& stock) {
  if constexpr (requires { stock.supportsUserMetadata(); }) return stock.supportsUserMetadata();
  return false;
}
template <typename T>
void annotate(T& stock, const void* pointer, const std::string& metadata) {
  if constexpr (requires { stock.annotateMemory(pointer, metadata); }) stock.annotateMemory(pointer, metadata);
}

enum class MemoryOwner {
  kOurs,
  kStock,      // the stock allocator, with its own deleter
  kForwarded,  // the stock allocator, with our deleter
};

struct Allocator : Stock {
  Stock* below = nullptr;

  // c10::Allocator
  void copy_data(void* to, const void* from, size_t bytes) const override { below->copy_data(to, from, bytes); }

  // c10::DeviceAllocator
  bool initialized() override { return below->initialized(); }
  void emptyCache(Pool pool) override { below->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Index device) override {
    return below->getDeviceStats(device);
  }
  void resetAccumulatedStats(Index device) override { below->resetAccumulatedStats(device); }
  void resetPeakStats(Index device) override { below->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(Index device) override { return below->getMemoryInfo(device); }

  // CUDAAllocator. The stock allocator's recordStream ignores memory with a foreign deleter.
  void* raw_alloc(size_t bytes) override { return below->raw_alloc(bytes); }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return below->raw_alloc_with_stream(bytes, stream);
  }
  void raw_delete(void* pointer) override { below->raw_delete(pointer); }
  void init(int devices) override { below->init(devices); }
  double getMemoryFraction(Index device) override { return below->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Index device) override { below->setMemoryFraction(fraction, device); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(Index device) override {
    return below->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { below->enable(value); }
  bool isEnabled() const override { return below->isEnabled(); }
  void cacheInfo(Index device, size_t* largest) override { below->cacheInfo(device, largest); }
  void* getBaseAllocation(void* pointer, size_t* size) override { return below->getBaseAllocation(pointer, size); }
  using Stock::recordStream;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    switch (record_stream(data, stream.stream())) {
      case MemoryOwner::kOurs: return;
      case MemoryOwner::kStock: return below->recordStream(data, stream);
      case MemoryOwner::kForwarded: {
        c10::DataPtr plain(data.get(), data.get(), below->raw_deleter(), data.device());
        below->recordStream(plain, stream);
        plain.release_context();
      }
    }
  }
  caching::SnapshotInfo snapshot(Pool pool, bool traces) override { return below->snapshot(pool, traces); }
  void beginAllocateToPool(Index device, Pool pool, std::function<bool(cudaStream_t)> filter) override {
    below->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Index device, Pool pool) override { below->endAllocateToPool(device, pool); }
  virtual void markCaptureBegin(Index device) { mark_capture(*below, device, true); }
  virtual void markCaptureEnd(Index device) { mark_capture(*below, device, false); }
  void releasePool(Index device, Pool pool) override { below->releasePool(device, pool); }
  int getPoolUseCount(Index device, Pool pool) override { return below->getPoolUseCount(device, pool); }
  void createOrIncrefPool(Index device, Pool pool, std::shared_ptr<Stock> allocator) override {
    below->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(Index device, Pool pool, bool use) override { below->setUseOnOOM(device, pool, use); }
  void setNoSplit(Index device, Pool pool) override { below->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(Index device, Pool pool, const std::unordered_set<void*>& expected) override {
    return below->checkPoolLiveAllocations(device, pool, expected);
  }
  caching::ShareableHandle shareIpcHandle(void* pointer) override { return below->shareIpcHandle(pointer); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return below->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return below->isHistoryEnabled(); }
  virtual std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) {
    return context_for(*below, pointer);
  }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, size_t entries, caching::RecordContext when,
                     bool clear, const std::vector<std::string>& skip) override {
    below->recordHistory(enabled, recorder, entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
    below->recordAnnotation(pairs);
  }
  void pushCompileContext(std::string& context) override { below->pushCompileContext(context); }
  void popCompileContext() override { below->popCompileContext(); }
  virtual bool supportsUserMetadata() { return takes_metadata(*below); }
  void setUserMetadata(const std::string& metadata) override { below->setUserMetadata(metadata); }
  std::string getUserMetadata() override { return below->getUserMetadata(); }
  virtual void annotateMemory(const void* pointer, const std::string& metadata) {
    annotate(*below, pointer, metadata);
  }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    below->attachOutOfMemoryObserver(std::move(observer));
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    below->attachOomRejectionObserver(std::move(observer));
  }
#endif
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    below->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(Index device, Index other) override { below->enablePeerAccess(device, other); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream,
                          bool peers) override {
    return below->memcpyAsync(to, to_device, from, from_device, bytes, stream, peers);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(Index device, Pool pool) override {
    return below->getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(Index device, std::shared_ptr<caching::AllocatorState> state) override {
    return below->setCheckpointPoolState(device, std::move(state));
  }
  virtual c10::DataPtr allocateWithAddress(size_t bytes, void* address) { return allocate_at(*below, bytes, address); }
  std::string name() override { return below->name(); }

 protected:
  // Returns the owner of memory that a stream uses, and records the stream if it is ours.
  virtual MemoryOwner record_stream(const c10::DataPtr& data, void* stream) = 0;
};

inline c10::Allocator* installed_allocator() { return caching::allocator.load(); }
inline void install(c10::Allocator* allocator) { caching::allocator.store(static_cast<Stock*>(allocator)); }
inline bool is_pytorchs(c10::Allocator*) { return true; }
inline void set_stock(Allocator& allocator, c10::Allocator* stock) { allocator.below = static_cast<Stock*>(stock); }
inline c10::Device current() { return c10::Device(c10::DeviceType::CUDA, c10::cuda::current_device()); }

// An arena is one allocation of the stock allocator, so it counts in its statistics and limits.
inline void release_arena(c10::Allocator* stock, uintptr_t base, uintptr_t) {
  static_cast<Stock*>(stock)->raw_delete(reinterpret_cast<void*>(base));
}

}  // namespace device
