// Streams of work without a device, and the times of a simulated device clock.
//
// Each stream is a queue. The task at its head may run when its waits are over. Among the streams that may run, the
// order is as bad as CUDA allows (``Order``), so that a missing wait changes the bytes. Times are simulated: a task
// begins when it has been issued and its stream, its copy engine and its waits are ready.

#pragma once

#include "settings.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace stub {

inline double now() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + static_cast<double>(at.tv_nsec) * 1e-9;
}

// A point in a stream.
struct Point {
  bool reached = false;
  double at = 0;
};
using PointP = std::shared_ptr<Point>;

// One copy engine per direction.
enum class Engine { kNone, kInto, kOut };

struct Task {
  const char* what = "";
  double seconds = 0;  // below 0: the measured time
  Engine engine = Engine::kNone;
  std::function<void()> run;  // may be empty
  PointP wait, record;        // may be null
  double issued = 0;
};

struct Stream {
  // How eager a stream is in lazy order.
  enum Bias { kRandom, kEarly, kLate };

  uint64_t id = 0;
  unsigned flags = 0;
  int priority = 0;
  std::deque<Task> queue;
  std::vector<Task>* captured = nullptr;  // during the capture of a graph
  bool busy = false;
  double clock = 0;
  std::condition_variable turn;  // wakes its thread
  Bias bias = kRandom;
  double weight = 1;

  bool idle() const { return queue.empty() && !busy; }
  bool ready() const { return !busy && !queue.empty() && (!queue.front().wait || queue.front().wait->reached); }
};

class Streams {
 public:
  Streams() : random_(settings().seed * 7919 + 1) { default_ = make(0, 0); }

  // Streams are never freed: the program may still have their handles.
  Stream* make(unsigned flags, int priority) {
    const std::lock_guard<std::mutex> guard(mutex_);
    auto* made = new Stream;
    made->id = streams_.size() + 1;
    made->flags = flags;
    made->priority = priority;
    draw(*made);
    streams_.push_back(made);
    if (settings().order == Order::kThreads) std::thread([this, made] { work(made); }).detach();
    return made;
  }
  Stream* ordinary() const { return default_; }
  size_t count() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return streams_.size();
  }
  // The runtime guards its handles with the same lock.
  std::mutex& mutex() { return mutex_; }

  void put(Stream* stream, Task task) {
    std::unique_lock<std::mutex> lock(mutex_);
    task.issued = now();
    if (stream->captured != nullptr) {
      stream->captured->push_back(std::move(task));
      return;
    }
    stream->queue.push_back(std::move(task));
    if (++put_ % kTempered == 0)
      for (Stream* each : streams_) draw(*each);
    switch (settings().order) {
      case Order::kInline:
        while (stream->ready()) step(stream, lock);
        return;
      case Order::kLazy: return eagerly(lock);
      case Order::kThreads: call();
    }
  }
  void await(Stream* stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    until([&] { return stream->idle(); }, lock);
  }
  void await(const PointP& point) {
    std::unique_lock<std::mutex> lock(mutex_);
    until([&] { return point->reached; }, lock);
  }
  void await_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    until([&] { return std::all_of(streams_.begin(), streams_.end(), [](Stream* each) { return each->idle(); }); }, lock);
  }
  // In lazy order each query runs a task, so that polling ends.
  bool is_idle(Stream* stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!stream->idle()) nudge(lock);
    return stream->idle();
  }
  bool is_reached(const PointP& point) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!point->reached) nudge(lock);
    return point->reached;
  }

 private:
  // The number of tasks before the streams change their eagerness.
  static constexpr uint64_t kTempered = 192;

  void draw(Stream& stream) {
    stream.bias = static_cast<Stream::Bias>(random_() % 3);
    stream.weight = std::pow(10.0, std::uniform_real_distribution<double>(-2, 2)(random_));
  }
  // Runs the task at the head of a stream, without the lock.
  void step(Stream* stream, std::unique_lock<std::mutex>& lock) {
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (task.run) {
      stream->busy = true;
      ++running_;
      lock.unlock();
      const double start = now();
      task.run();
      if (task.seconds < 0) task.seconds = now() - start;
      task.run = nullptr;  // frees its captures
      lock.lock();
      stream->busy = false;
      --running_;
    }
    double start = std::max(stream->clock, task.issued);
    if (task.wait) start = std::max(start, task.wait->at);
    if (task.engine != Engine::kNone) start = std::max(start, engine(task.engine));
    stream->clock = start + task.seconds;
    if (task.engine != Engine::kNone) engine(task.engine) = stream->clock;
    if (task.record) {
      task.record->at = stream->clock;
      task.record->reached = true;
    }
    call();
    changed_.notify_all();
  }
  // Wakes the threads with runnable tasks.
  void call() {
    if (settings().order != Order::kThreads) return;
    for (Stream* each : streams_)
      if (each->ready()) each->turn.notify_one();
  }
  double& engine(Engine which) { return which == Engine::kInto ? into_ : out_; }

  // The thread of a stream.
  void work(Stream* stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::mt19937_64 random(settings().seed * 31 + stream->id);
    for (;;) {
      stream->turn.wait(lock, [&] { return stream->ready(); });
      if (settings().pause > 0 && stream->queue.front().run && random() % 2 != 0) {
        const std::chrono::duration<double> pause(settings().pause * static_cast<double>(random() % 1000) / 1000);
        stream->busy = true;
        ++running_;
        lock.unlock();
        std::this_thread::sleep_for(pause);
        lock.lock();
        stream->busy = false;
        --running_;
      }
      step(stream, lock);
    }
  }
  // Picks the next stream in lazy order, drawn by weight; null if no stream can run.
  Stream* pick() {
    std::vector<Stream*> ready;
    double sum = 0;
    for (Stream* each : streams_)
      if (each->ready()) {
        ready.push_back(each);
        sum += each->weight;
      }
    double at = std::uniform_real_distribution<double>(0, sum)(random_);
    for (Stream* each : ready)
      if ((at -= each->weight) <= 0) return each;
    return ready.empty() ? nullptr : ready.back();
  }
  void nudge(std::unique_lock<std::mutex>& lock) {
    if (settings().order != Order::kLazy) return;
    if (Stream* next = pick()) step(next, lock);
  }
  // Lets eager streams run ahead, and the others now and then.
  void eagerly(std::unique_lock<std::mutex>& lock) {
    for (bool any = true; any;) {
      any = false;
      for (size_t i = 0; i < streams_.size(); ++i) {
        Stream* each = streams_[i];
        while (each->ready() && (each->bias == Stream::kEarly || (each->bias == Stream::kRandom && random_() % 8 == 0))) {
          step(each, lock);
          any = true;
        }
      }
    }
  }
  void until(const std::function<bool()>& done, std::unique_lock<std::mutex>& lock) {
    while (!done()) {
      if (settings().order == Order::kThreads) {
        if (!changed_.wait_for(lock, std::chrono::seconds(120), done)) stuck();
      } else if (Stream* next = pick()) {
        step(next, lock);
      } else if (running_ > 0) {
        changed_.wait_for(lock, std::chrono::seconds(1));
      } else {
        stuck();
      }
    }
  }
  [[noreturn]] void stuck() {
    std::fprintf(stderr, "stub: the host waits for a point that no stream can reach\n");
    for (const Stream* each : streams_)
      std::fprintf(stderr, "stub:   stream %lu: %zu tasks, %s, first %s\n", each->id, each->queue.size(),
                   each->busy ? "at work" : "idle", each->queue.empty() ? "none" : each->queue.front().what);
    std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;  // for the host
  std::vector<Stream*> streams_;
  Stream* default_ = nullptr;
  int running_ = 0;
  uint64_t put_ = 0;
  double into_ = 0, out_ = 0;  // the clocks of the copy engines
  std::mt19937_64 random_;
};

}  // namespace stub
