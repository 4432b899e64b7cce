// The copies of a step on the CPU, each queue of them in a thread of its own, or all in the ops' thread: see copying.py.
//
// A copy waits until other queues have come as far as it needs, moves its pieces between the arena and a home, and tells
// how far its queue is. Nothing here needs Python: what computes is not held up by the interpreter's lock, and copies go on
// whoever has it.

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

// As in copying.py, which fills these in.
struct Wait {
  int64_t queue, number;
};
// What lies in a row both in the arena and at a home.
struct Piece {
  int64_t address;  // in the arena
  int64_t bytes;
  int64_t outside;  // an offset in the file, or an address
  int64_t slot;   // its offset at the home, by which pages are picked for its sum
  int64_t sum;    // its row in the table of sums; negative: nothing is compared
  int32_t descriptor;  // as in a transfer
  outofcore::Cache cache;
};
struct Copy {
  int64_t index, number;  // of the instruction; its place in its queue, from 1
  int64_t first_piece, pieces, first_wait, waits;
  int32_t awaited, writes;
};
struct Sum {
  int64_t bytes;  // negative: nothing was written there in this step
  uint64_t found;
  int64_t full;  // whether it is of all bytes, or of a few pages
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
  int64_t threaded;  // 0: a copy is made by whoever waits for it
};

// As ``_Failure`` in copying.py, beside those of a transfer.
constexpr int64_t kDamaged = -2;  // what came is not what was written
constexpr int64_t kStopped = -3;  // somebody else gave the step up

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
  // What Python's perf_counter() is on Linux.
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

// The thread of a queue, and what it is asked to do: all copies of a step.
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

  bool reached(int64_t queue, int64_t number) const { return done[static_cast<size_t>(queue)].load() >= number; }

  // 0: reached; 1: the time is over; 2: the step was given up.
  int wait(int64_t queue, int64_t number, double seconds) {
    if (reached(queue, number)) return 0;
    if (!work.threaded) return make(queue, number) ? 0 : 2;
    std::unique_lock<std::mutex> lock(mutex);
    Sleeper sleeper;
    sleeper.queue = queue;
    sleeper.number = number;
    sleepers.push_back(&sleeper);
    ++asleep;
    const auto ready = [&] { return reached(queue, number) || failed.load(); };
    bool woken = true;
    if (seconds < 0) {
      sleeper.woken.wait(lock, ready);
    } else {
      woken = sleeper.woken.wait_for(lock, std::chrono::duration<double>(seconds), ready);
    }
    --asleep;
    sleepers.erase(std::find(sleepers.begin(), sleepers.end(), &sleeper));
    if (reached(queue, number)) return 0;
    return woken ? 2 : 1;
  }

  void publish(int64_t queue, int64_t number) {
    done[static_cast<size_t>(queue)].store(number);
    // Whoever falls asleep counts itself first, and then looks again.
    if (asleep.load() == 0) return;
    const std::lock_guard<std::mutex> guard(mutex);
    for (Sleeper* sleeper : sleepers)
      if (sleeper->queue == queue && sleeper->number <= number) sleeper->woken.notify_one();
  }

  // Waits until copies may begin; false: the step was given up.
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

  // Gives the step up; whether it was not given up before.
  bool fail(const Failure& how) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (failed.load()) return false;
    failure = how;
    failed.store(true);
    for (Sleeper* sleeper : sleepers) sleeper->woken.notify_one();
    gate.notify_all();
    return true;
  }

  // Fills in what a piece failed with, and the bytes that were moved before.
  static void move(const Piece& piece, bool writes, char* bounce, Failure& how) {
    Transfer moved{piece.address, piece.bytes, piece.outside, piece.descriptor, writes, piece.cache, 0, 0, bounce};
    outofcore::transfer(moved);
    how.code = moved.failure;
    how.done = moved.done;
  }

  static uint64_t sum_of(const Piece& piece, bool full) {
    const auto* at = reinterpret_cast<const char*>(piece.address);
    return full ? outofcore::sum_of(at, piece.bytes) : outofcore::sampled_sum(at, piece.bytes, piece.slot);
  }

  void copy(const Copy& one, char* bounce) {
    for (int64_t at = one.first_piece; at < one.first_piece + one.pieces; ++at) {
      const Piece& piece = work.pieces[at];
      Sum* sum = piece.sum < 0 ? nullptr : &work.sums[piece.sum];
      if (sum != nullptr && one.writes) {
        sum->bytes = piece.bytes;
        sum->found = sum_of(piece, sum->full);
      }
      Failure how{one.index, at, 0, 0};
      move(piece, one.writes, bounce, how);
      if (how.code == 0 && sum != nullptr && !one.writes && sum->bytes == piece.bytes &&
          sum->found != sum_of(piece, sum->full))
        how = {one.index, at, 0, kDamaged};
      if (how.code != 0) {
        fail(how);
        return;
      }
    }
  }

  // Makes copies in this thread until a queue is as far, each after what it waits for; false: the step was given up. All
  // are between the arena and the caller's memory, which cannot fail.
  bool make(int64_t queue, int64_t number) {
    const Queue* end = work.queues + work.count;
    const Queue* found = std::find_if(work.queues, end, [&](const Queue& one) { return one.number == queue; });
    while (!failed.load() && !reached(queue, number)) {
      if (found == end) return false;  // an op, which comes later in this thread
      const Copy& one = found->first[done[static_cast<size_t>(queue)].load()];
      for (int64_t k = one.first_wait; k < one.first_wait + one.waits; ++k)
        if (!make(work.waits[k].queue, work.waits[k].number)) fail({one.index, one.first_piece, 0, kEnded});
      if (failed.load()) break;
      starts[one.index] = now();
      copy(one, nullptr);
      ends[one.index] = now();
      done[static_cast<size_t>(queue)].store(one.number);
    }
    return !failed.load();
  }

  void run(const Queue& queue, char* bounce) {
    for (int64_t at = 0; at < queue.copies; ++at) {
      const Copy& one = queue.first[at];
      for (int64_t k = one.first_wait; k < one.first_wait + one.waits; ++k)
        if (wait(work.waits[k].queue, work.waits[k].number, -1) != 0) return;
      if (!enter()) return;
      starts[one.index] = now();
      copy(one, bounce);
      exit();
      if (failed.load() && failure.copy == one.index) return;  // it was not made
      ends[one.index] = now();
      publish(queue.number, one.number);
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
  int64_t running = 0, moving = 0;  // queues at work; copies under way
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

// Threads come with the first step that needs them.
EXPORT Copying* outofcore_copying_new(int64_t queues) noexcept try {
  return new Copying(queues);
} catch (...) {
  return nullptr;
}

// Nothing is under way. Ends the threads.
EXPORT void outofcore_copying_free(Copying* copying) noexcept { delete copying; }

// Begins a step, of which nothing is done yet. 0: the copies are begun; else what the system says: it gives no thread, or
// no memory for one. What is given stays as it is until outofcore_copying_idle says so.
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
    for (auto& done : all.done) done.store(0);
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
  return copying->reached(queue, number);
}
// 0: the queue is as far; 1: the seconds are over; 2: the step was given up.
EXPORT int outofcore_copying_wait(Copying* copying, int64_t queue, int64_t number, double seconds) noexcept {
  return copying->wait(queue, number, seconds);
}
EXPORT void outofcore_copying_publish(Copying* copying, int64_t queue, int64_t number) noexcept {
  copying->publish(queue, number);
}
// Gives the step up; 1: it was not given up before.
EXPORT int outofcore_copying_stop(Copying* copying) noexcept { return copying->fail({-1, -1, 0, kStopped}); }
// Lets no copy begin from now on, and returns when those under way have ended; or lets them begin again.
EXPORT int outofcore_copying_pause(Copying* copying, int is_on) noexcept {
  std::unique_lock<std::mutex> lock(copying->mutex);
  copying->paused = is_on != 0;
  if (is_on == 0) copying->gate.notify_all();
  else copying->gate.wait(lock, [&] { return copying->moving == 0; });
  return 0;
}
// 0: all copies are made, or the step was given up and no thread is at work any more; 1: the seconds are over.
EXPORT int outofcore_copying_idle(Copying* copying, double seconds) noexcept {
  const Work& work = copying->work;
  for (int64_t k = 0; k < work.count && !work.threaded; ++k) copying->make(work.queues[k].number, work.queues[k].copies);
  std::unique_lock<std::mutex> lock(copying->mutex);
  const bool rests = copying->idle.wait_for(lock, std::chrono::duration<double>(seconds),
                                            [&] { return copying->running == 0; });
  return rests ? 0 : 1;
}
// Why the step was given up, as copy, piece, bytes moved and what happened; all 0: it was not.
EXPORT void outofcore_copying_failure(Copying* copying, int64_t* told) noexcept {
  const std::lock_guard<std::mutex> guard(copying->mutex);
  const Failure& failure = copying->failure;
  told[0] = failure.copy, told[1] = failure.piece, told[2] = failure.done, told[3] = failure.code;
}
