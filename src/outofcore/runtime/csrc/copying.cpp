// The copies of a compiled step on the CPU: each queue runs on its own thread, or all run on the ops' thread
// (copying.py). A copy waits for other queues, moves its pieces between the arena and a home, and publishes its queue's
// progress. No Python is involved, so copies and compute do not wait for the GIL.

#include "borders.h"
#include "checksum.h"
#include "copy_thread.h"
#include "file_io.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using outofcore::CopyThread;
using outofcore::kBounce;
using outofcore::kEnded;
using outofcore::kMemory;
using outofcore::kPage;
using outofcore::Transfer;

// As in copying.py.
struct Wait {
  int64_t queue, number;
};
// A range that is contiguous in the arena and at a home.
struct Piece {
  int64_t address;  // in the arena
  int64_t bytes;
  int64_t outside;     // offset in the file, or address
  int64_t slot;        // offset at the home; selects the pages of a sampled checksum
  int64_t sum;         // row in the table of checksums; negative: not verified
  int32_t descriptor;  // as in `Transfer`
  outofcore::Cache cache;
};
struct Copy {
  int64_t index, number;  // of the instruction; position in its queue, from 1
  int64_t first_piece, pieces, first_wait, waits;
  int32_t awaited, writes;
};
struct Sum {
  int64_t bytes;  // negative: not written in this step
  uint64_t found;
  int64_t full;  // whether the checksum covers all bytes or a few pages
};
struct Queue {
  int64_t number, copies;
  const Copy* first;
};
struct Work {
  const Piece* pieces;
  const Wait* waits;
  Sum* sums;
  const Queue* queues;
  int64_t count;
  int64_t threaded;  // 0: the waiting thread makes the copy
};

// As `_Failure` in copying.py, which also has the codes of transfers.
constexpr int64_t kDamaged = -2;  // the checksum of the bytes read differs
constexpr int64_t kStopped = -3;  // another thread stopped the step

const borders::Border kBorders[] = {
    STRUCT(Wait, queue, number),
    STRUCT(Piece, address, bytes, outside, slot, sum, descriptor, cache),
    STRUCT(Copy, index, number, first_piece, pieces, first_wait, waits, awaited, writes),
    STRUCT(Sum, bytes, found, full),
    STRUCT(Queue, number, copies, first),
    STRUCT(Work, pieces, waits, sums, queues, count, threaded),
    CONSTANTS("FileIo", kMemory, kBounce),
    CONSTANTS("CopyFailure", kDamaged, kStopped),
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Failure {
  int64_t copy, piece, done, code;
};

struct Sleeper {
  int64_t queue = 0, number = 0;
  std::condition_variable woken;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

struct Copying;

struct Copier : CopyThread::Job {
  explicit Copier(Copying& all) : all(all), bounce(static_cast<char*>(std::aligned_alloc(kPage, kBounce))) {
    if (bounce == nullptr) throw std::bad_alloc();
  }
  static void run(CopyThread::Job& job);

  Copying& all;
  const std::unique_ptr<char, Free> bounce;
  const Queue* queue = nullptr;
  CopyThread thread{run};
};

struct Copying {
  explicit Copying(int64_t queues) : done(static_cast<size_t>(queues)) {}

  bool has_reached(int64_t queue, int64_t number) const { return done[static_cast<size_t>(queue)].load() >= number; }

  // Returns 0 if reached, 1 on timeout, 2 if the step was stopped.
  int wait(int64_t queue, int64_t number, double seconds) {
    if (has_reached(queue, number)) return 0;
    if (!work.threaded) return copy_until(queue, number) ? 0 : 2;
    std::unique_lock<std::mutex> lock(mutex);
    Sleeper sleeper;
    sleeper.queue = queue;
    sleeper.number = number;
    sleepers.push_back(&sleeper);
    ++asleep;
    const auto ready = [&] { return has_reached(queue, number) || failed.load(); };
    bool woken = true;
    if (seconds < 0) {
      sleeper.woken.wait(lock, ready);
    } else {
      woken = sleeper.woken.wait_for(lock, std::chrono::duration<double>(seconds), ready);
    }
    --asleep;
    sleepers.erase(std::find(sleepers.begin(), sleepers.end(), &sleeper));
    if (has_reached(queue, number)) return 0;
    return woken ? 2 : 1;
  }

  void publish(int64_t queue, int64_t number) {
    done[static_cast<size_t>(queue)].store(number);
    // A waiting thread first increments `asleep` and then checks again.
    if (asleep.load() == 0) return;
    const std::lock_guard<std::mutex> guard(mutex);
    for (Sleeper* sleeper : sleepers)
      if (sleeper->queue == queue && sleeper->number <= number) sleeper->woken.notify_one();
  }

  bool enter() {
    std::unique_lock<std::mutex> lock(mutex);
    gate.wait(lock, [&] { return !paused || failed.load(); });
    if (failed.load()) return false;
    ++moving;
    return true;
  }
  void exit() {
    const std::lock_guard<std::mutex> guard(mutex);
    if (--moving == 0) gate.notify_all();
  }

  // Stops the step. Returns whether it was still running.
  bool fail(const Failure& reason) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (failed.load()) return false;
    failure = reason;
    failed.store(true);
    for (Sleeper* sleeper : sleepers) sleeper->woken.notify_one();
    gate.notify_all();
    return true;
  }

  static void move_piece(const Piece& piece, bool writes, char* bounce, Failure& result) {
    Transfer transfer{piece.address, piece.bytes, piece.outside, piece.descriptor, writes, piece.cache, 0, 0, bounce};
    outofcore::transfer(transfer);
    result.code = transfer.failure;
    result.done = transfer.done;
  }

  static uint64_t sum_of(const Piece& piece, bool full) {
    const auto* at = reinterpret_cast<const char*>(piece.address);
    return full ? outofcore::sum_of(at, piece.bytes) : outofcore::sampled_sum(at, piece.bytes, piece.slot);
  }

  void copy_pieces(const Copy& copy, char* bounce) {
    for (int64_t at = copy.first_piece; at < copy.first_piece + copy.pieces; ++at) {
      const Piece& piece = work.pieces[at];
      Sum* sum = piece.sum < 0 ? nullptr : &work.sums[piece.sum];
      if (sum != nullptr && copy.writes) {
        sum->bytes = piece.bytes;
        sum->found = sum_of(piece, sum->full);
      }
      Failure result{copy.index, at, 0, 0};
      move_piece(piece, copy.writes, bounce, result);
      if (result.code == 0 && sum != nullptr && !copy.writes && sum->bytes == piece.bytes &&
          sum->found != sum_of(piece, sum->full))
        result = {copy.index, at, 0, kDamaged};
      if (result.code != 0) {
        fail(result);
        return;
      }
    }
  }

  // Makes copies on this thread, with those they wait for, until a queue reaches a number. Returns false if the step
  // was stopped. All copies are between the arena and the caller's memory and cannot fail.
  bool copy_until(int64_t queue, int64_t number) {
    const Queue* end = work.queues + work.count;
    const Queue* source = std::find_if(work.queues, end, [&](const Queue& copy) { return copy.number == queue; });
    while (!failed.load() && !has_reached(queue, number)) {
      if (source == end) return false;  // an op, which runs later on this thread
      const Copy& copy = source->first[done[static_cast<size_t>(queue)].load()];
      for (int64_t k = copy.first_wait; k < copy.first_wait + copy.waits; ++k)
        if (!copy_until(work.waits[k].queue, work.waits[k].number)) fail({copy.index, copy.first_piece, 0, kEnded});
      if (failed.load()) break;
      starts[copy.index] = now();
      copy_pieces(copy, nullptr);
      ends[copy.index] = now();
      done[static_cast<size_t>(queue)].store(copy.number);
    }
    return !failed.load();
  }

  void run(const Queue& queue, char* bounce) {
    for (int64_t at = 0; at < queue.copies; ++at) {
      const Copy& copy = queue.first[at];
      for (int64_t k = copy.first_wait; k < copy.first_wait + copy.waits; ++k)
        if (wait(work.waits[k].queue, work.waits[k].number, -1) != 0) return;
      if (!enter()) return;
      starts[copy.index] = now();
      copy_pieces(copy, bounce);
      exit();
      if (failed.load() && failure.copy == copy.index) return;  // this copy failed
      ends[copy.index] = now();
      publish(queue.number, copy.number);
    }
  }

  std::vector<std::atomic<int64_t>> done;
  std::mutex mutex;
  std::condition_variable idle, gate;
  std::vector<Sleeper*> sleepers;
  std::atomic<int> asleep{0};
  std::atomic<bool> failed{false};
  Failure failure{};
  Work work{};
  double *starts = nullptr, *ends = nullptr;
  int64_t running = 0, moving = 0;  // active queues; copies in progress
  bool paused = false;
  std::vector<std::unique_ptr<Copier>> copiers;
};

void Copier::run(CopyThread::Job& job) {
  auto& copier = static_cast<Copier&>(job);
  copier.all.run(*copier.queue, copier.bounce.get());
  const std::lock_guard<std::mutex> guard(copier.all.mutex);
  if (--copier.all.running == 0) copier.all.idle.notify_all();
}

}  // namespace

EXPORT Copying* outofcore_copying_new(int64_t queues) noexcept try {
  return new Copying(queues);
} catch (...) {
  return nullptr;
}

// No copy may be running. Ends the threads.
EXPORT void outofcore_copying_free(Copying* copying) noexcept { delete copying; }

// Begins a step. Returns 0 or an errno. The arguments must stay valid until outofcore_copying_idle returns 0.
EXPORT int outofcore_copying_begin(Copying* copying, const Work* work, double* starts, double* ends) noexcept {
  Copying& all = *copying;
  const auto count = static_cast<size_t>(work->threaded ? work->count : 0);
  try {
    while (all.copiers.size() < count) all.copiers.push_back(std::make_unique<Copier>(all));
  } catch (...) {
    return ENOMEM;
  }
  for (size_t place = 0; place < count; ++place)
    if (const int status = all.copiers[place]->thread.start(); status != 0) return status;
  {
    const std::lock_guard<std::mutex> guard(all.mutex);
    for (auto& progress : all.done) progress.store(0);
    all.failed.store(false);
    all.failure = {};
    all.paused = false;
    all.work = *work;
    all.starts = starts;
    all.ends = ends;
    all.running = static_cast<int64_t>(count);
  }
  for (size_t place = 0; place < count; ++place) {
    Copier& copier = *all.copiers[place];
    copier.queue = &work->queues[place];
    copier.thread.ask(copier);
  }
  return 0;
}

EXPORT int outofcore_copying_reached(Copying* copying, int64_t queue, int64_t number) noexcept {
  return copying->has_reached(queue, number);
}
EXPORT int outofcore_copying_wait(Copying* copying, int64_t queue, int64_t number, double seconds) noexcept {
  return copying->wait(queue, number, seconds);
}
EXPORT void outofcore_copying_publish(Copying* copying, int64_t queue, int64_t number) noexcept {
  copying->publish(queue, number);
}
EXPORT int outofcore_copying_stop(Copying* copying) noexcept { return copying->fail({-1, -1, 0, kStopped}); }
// Stops copies from starting and waits for running ones, or lets them start again.
EXPORT int outofcore_copying_pause(Copying* copying, int is_on) noexcept {
  std::unique_lock<std::mutex> lock(copying->mutex);
  copying->paused = is_on != 0;
  if (is_on == 0) copying->gate.notify_all();
  else copying->gate.wait(lock, [&] { return copying->moving == 0; });
  return 0;
}
// Returns 0 once all copies are made or all threads of a stopped step are idle, 1 on timeout.
EXPORT int outofcore_copying_idle(Copying* copying, double seconds) noexcept {
  const Work& work = copying->work;
  for (int64_t k = 0; k < work.count && !work.threaded; ++k)
    copying->copy_until(work.queues[k].number, work.queues[k].copies);
  std::unique_lock<std::mutex> lock(copying->mutex);
  const bool is_idle = copying->idle.wait_for(lock, std::chrono::duration<double>(seconds),
                                            [&] { return copying->running == 0; });
  return is_idle ? 0 : 1;
}
// Writes why the step was stopped: copy, piece, bytes moved and error code, or zeros.
EXPORT void outofcore_copying_failure(Copying* copying, int64_t* values) noexcept {
  const std::lock_guard<std::mutex> guard(copying->mutex);
  const Failure& failure = copying->failure;
  values[0] = failure.copy, values[1] = failure.piece, values[2] = failure.done, values[3] = failure.code;
}
