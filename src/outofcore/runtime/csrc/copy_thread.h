// Threads that make copies in request order: one for each queue of a compiled step (copying.cpp), for each direction of
// an eager loop (follow/blocks.h), and for each direction between files and a GPU (lanes.cpp). They never take Python's
// lock. `ask` does not allocate, because CUDA host functions call it.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace outofcore {

class CopyThread {
 public:
  // A request. It may be posted again as soon as it runs.
  struct Job {
    Job* next;  // while queued
  };

  explicit CopyThread(void (*run)(Job&)) : run_(run) {}
  // Finishes the queued jobs. No more may be posted.
  ~CopyThread() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      ends_ = true;
    }
    asked_.notify_one();
    thread_.join();
  }
  CopyThread(const CopyThread&) = delete;

  // Starts the thread unless it runs. Returns 0, or the errno.
  int start() {
    if (thread_.joinable()) return 0;
    // Python's threads handle signals.
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int status = 0;
    try {
      thread_ = std::thread([this] { serve(); });
      pthread_setname_np(thread_.native_handle(), "outofcore-copy");
    } catch (const std::system_error& error) {
      status = error.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return status;
  }

  void ask(Job& job) {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      job.next = nullptr;
      (first_ == nullptr ? first_ : last_->next) = &job;
      last_ = &job;
    }
    asked_.notify_one();
  }

 private:
  void serve() {
    for (;;) {
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        asked_.wait(lock, [this] { return first_ != nullptr || ends_; });
        if (first_ == nullptr) return;
        job = first_;
        first_ = job->next;
      }
      run_(*job);
    }
  }

  void (*const run_)(Job&);
  std::mutex mutex_;  // taken last; no calls while it is held
  std::condition_variable asked_;
  Job *first_ = nullptr, *last_ = nullptr;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace outofcore
