// Takes locks in the order in which they are named, lets go of those with a minus before them, and says that it did.

#define OUTOFCORE_CHECK_LOCKS
#include "../locks.h"

#include <string>

namespace {

locks::Ranked<std::recursive_mutex, locks::kLoops> loops;
locks::Ranked<std::mutex, locks::kAllocator> allocator;

template <class Lock>
void use(Lock& lock, bool takes) {
  takes ? lock.lock() : lock.unlock();
}

}  // namespace

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    const bool takes = name[0] != '-';
    if (name.find("loops") != std::string::npos) use(loops, takes);
    if (name.find("allocator") != std::string::npos) use(allocator, takes);
    if (name.find("python") != std::string::npos) locks::check(locks::kPython, false);
    if (name.find("fork") != std::string::npos) loops.reset_in_child();
  }
  std::puts("ok");
}
