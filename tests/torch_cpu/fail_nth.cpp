// Makes the n-th system call of a kind fail, for faults_everywhere.py, which preloads this library (LD_PRELOAD).
//
// Calls are counted while ``fail_arm`` is in effect. Requests for memory count if they are of 4 KiB or more and come from
// PyTorch's allocator, from native code of the package or by way of ctypes; the interpreter has its own. Files count if they lie in the folder that ``fail_watch`` names, or in memory (memfd).
//
// A short transfer ends between two pages. Direct I/O then refuses what does not begin and end at a page, as on a disk
// whose sectors are as large.

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>

#define VISIBLE __attribute__((visibility("default")))
#define EXPORT extern "C" VISIBLE

namespace {

// As ``Kind`` in faults_everywhere.py.
enum Kind : int { kNothing, kAllocation, kObject, kWrite, kRead, kThread, kOpen, kShort, kInterrupted };

constexpr size_t kPage = 4096, kLarge = 4096;
constexpr int kFrames = 16;

std::atomic<int> armed{kNothing};
std::atomic<bool> paused{false};
std::atomic<long> seen{0}, fired{0};
long first = 0, last = 0;  // of the calls that fail
int code = 0;
char folder[4096], package[4096];
void* frames[kFrames];
int frame_count = 0;
thread_local bool inside = false;  // of this library: what it calls itself does not count

struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
#define NEXT(name) \
  static auto* const real = next<decltype(::name)>(#name)

bool lies_in(const void* address, const char* part) {
  Dl_info found;
  return *part != 0 && dladdr(address, &found) != 0 && found.dli_fname != nullptr &&
         strstr(found.dli_fname, part) != nullptr;
}
// PyTorch's allocator, the package itself, and ctypes for its Python code: not the interpreter, nor other libraries.
bool is_concerned(const void* caller) {
  return lies_in(caller, "libc10.") || lies_in(caller, "libffi") || lies_in(caller, package);
}
// Whether native code of the package is who asks: itself, or by way of one template that another library has as well.
__attribute__((noinline)) bool package_asks() {
  void* callers[4];
  const int count = backtrace(callers, 4);
  for (int i = 2; i < count; ++i)
    if (lies_in(callers[i], package)) return true;
  return false;
}

bool watched(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return false;
  path[length] = 0;
  return strncmp(path, folder, strlen(folder)) == 0 || strncmp(path, "/memfd:", 7) == 0;
}

// Counts one call; whether it is to fail.
bool strikes() {
  const long number = seen.fetch_add(1) + 1;
  if (number < first || number > last) return false;
  if (fired.fetch_add(1) == 0) {
    frame_count = backtrace(frames, kFrames);
    backtrace_symbols_fd(frames, frame_count, STDERR_FILENO);  // the process may end by it
  }
  return true;
}
bool counts(Kind kind) {
  return armed.load(std::memory_order_relaxed) == kind && !inside && !paused.load(std::memory_order_relaxed);
}

bool memory_fails(size_t bytes, const void* caller) {
  if (!counts(kAllocation) || bytes < kLarge) return false;
  const Inside guard;
  if (!is_concerned(caller) || !strikes()) return false;
  errno = code;
  return true;
}
bool object_fails(size_t bytes) {
  const bool all = counts(kObject);
  if (!all && (!counts(kAllocation) || bytes < kLarge)) return false;
  const Inside guard;
  if (!package_asks() || !strikes()) return false;
  errno = ENOMEM;
  return true;
}
bool file_fails(Kind kind, int file) {
  if (!counts(kind) && !counts(kInterrupted)) return false;
  const Inside guard;
  if (!watched(file) || !strikes()) return false;
  errno = armed == kInterrupted ? EINTR : code;
  return true;
}

// How many bytes of a transfer are made; 0: all.
size_t shortened(int file, size_t count) {
  if (!counts(kShort)) return 0;
  const Inside guard;
  if (!watched(file) || count < 1024 || !strikes()) return 0;
  return std::max<size_t>(count / 2 / kPage * kPage + 512, 512);
}
bool misaligned(int file, const void* at, size_t count, off_t offset) {
  if (!counts(kShort)) return false;
  const Inside guard;
  if (!watched(file) || (fcntl(file, F_GETFL) & O_DIRECT) == 0) return false;
  if (reinterpret_cast<uintptr_t>(at) % kPage == 0 && count % kPage == 0 && offset % kPage == 0) return false;
  errno = EINVAL;
  return true;
}

template <class Call>
ssize_t transferred(Kind kind, int file, void* at, size_t count, off_t offset, Call&& call) {
  if (file_fails(kind, file)) return -1;
  if (misaligned(file, at, count, offset)) return -1;
  const size_t kept = shortened(file, count);
  if (kept == 0) return call(count);
  const size_t whole = std::min(count, (kept + kPage - 1) / kPage * kPage);
  const ssize_t done = call(whole);
  if (done < static_cast<ssize_t>(kept)) return done;
  if (kind == kRead) memset(static_cast<char*>(at) + kept, 0xAB, done - kept);  // of this nothing was promised
  return static_cast<ssize_t>(kept);
}

}  // namespace

EXPORT void fail_watch(const char* in_folder, const char* in_package) {
  strncpy(folder, in_folder, sizeof folder - 1);
  strncpy(package, in_package, sizeof package - 1);
  void* unused[2];
  backtrace(unused, 2);  // loads what it needs
}
// Has the calls from one number on to another fail, counted from 1.
EXPORT void fail_arm(int kind, long from, long to, int error) {
  armed = kNothing;
  first = from, last = to, code = error;
  seen = 0, fired = 0;
  armed = kind;
}
EXPORT void fail_disarm() { armed = kNothing; }
// Neither counts calls nor has them fail until it is called with 0: they are made by the test itself.
EXPORT void fail_pause(int on) { paused = on != 0; }
EXPORT long fail_fired() { return fired; }
EXPORT long fail_seen() { return seen; }
// Who made the first call that failed, one per line.
EXPORT void fail_where(char* text, size_t room) {
  const Inside guard;
  size_t used = 0;
  text[0] = 0;
  for (int i = 0; i < frame_count && used + 256 < room; ++i) {
    Dl_info found{};
    dladdr(frames[i], &found);
    const char* name = found.dli_fname == nullptr ? "?" : strrchr(found.dli_fname, '/');
    name = name == nullptr ? found.dli_fname : name + (*name == '/');
    used += static_cast<size_t>(snprintf(text + used, 256, "%s+%#zx %s\n", name,
                                         static_cast<size_t>(static_cast<char*>(frames[i]) - static_cast<char*>(found.dli_fbase)),
                                         found.dli_sname == nullptr ? "" : found.dli_sname));
  }
}

// ---- memory --------------------------------------------------------------------------------------------------------

EXPORT void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  NEXT(mmap);
  if (memory_fails(bytes, __builtin_return_address(0))) return MAP_FAILED;
  return real(at, bytes, protection, flags, file, offset);
}
EXPORT void* mmap64(void* at, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  NEXT(mmap64);
  if (memory_fails(bytes, __builtin_return_address(0))) return MAP_FAILED;
  return real(at, bytes, protection, flags, file, offset);
}
EXPORT void* mremap(void* at, size_t before, size_t bytes, int flags, ...) noexcept {
  static auto* const real = next<void*(void*, size_t, size_t, int, void*)>("mremap");
  va_list rest;
  va_start(rest, flags);
  void* to = (flags & MREMAP_FIXED) != 0 ? va_arg(rest, void*) : nullptr;
  va_end(rest);
  if (memory_fails(bytes, __builtin_return_address(0))) return MAP_FAILED;
  return real(at, before, bytes, flags, to);
}
EXPORT int mprotect(void* at, size_t bytes, int protection) noexcept {
  NEXT(mprotect);
  if (memory_fails(bytes, __builtin_return_address(0))) return -1;
  return real(at, bytes, protection);
}
EXPORT int posix_memalign(void** at, size_t alignment, size_t bytes) noexcept {
  NEXT(posix_memalign);
  if (memory_fails(bytes, __builtin_return_address(0))) return ENOMEM;
  return real(at, alignment, bytes);
}
EXPORT void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  NEXT(aligned_alloc);
  if (memory_fails(bytes, __builtin_return_address(0))) return nullptr;
  return real(alignment, bytes);
}
VISIBLE void* operator new(size_t bytes) {
  if (object_fails(bytes)) throw std::bad_alloc();
  void* found = malloc(bytes == 0 ? 1 : bytes);
  if (found == nullptr) throw std::bad_alloc();
  return found;
}
VISIBLE void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return object_fails(bytes) ? nullptr : malloc(bytes == 0 ? 1 : bytes);
}
VISIBLE void operator delete(void* at) noexcept { free(at); }
VISIBLE void operator delete(void* at, size_t) noexcept { free(at); }

// ---- files ---------------------------------------------------------------------------------------------------------

#define TRANSFERS(name, kind, pointer)                                                                        \
  EXPORT ssize_t name(int file, pointer at, size_t count, off_t offset) {                                     \
    NEXT(name);                                                                                               \
    return transferred(kind, file, const_cast<void*>(static_cast<const void*>(at)), count, offset,            \
                       [&](size_t part) { return real(file, at, part, offset); });                            \
  }
TRANSFERS(pread, kRead, void*)
TRANSFERS(pread64, kRead, void*)
TRANSFERS(pwrite, kWrite, const void*)
TRANSFERS(pwrite64, kWrite, const void*)

// Of several buffers none is made shorter; the package gives one.
#define GATHERS(name, kind)                                                                                   \
  EXPORT ssize_t name(int file, const iovec* buffers, int number, off_t offset) {                             \
    NEXT(name);                                                                                               \
    if (number != 1) return file_fails(kind, file) ? -1 : real(file, buffers, number, offset);                \
    return transferred(kind, file, buffers->iov_base, buffers->iov_len, offset, [&](size_t part) {            \
      const iovec one{buffers->iov_base, part};                                                               \
      return real(file, &one, 1, offset);                                                                     \
    });                                                                                                       \
  }
GATHERS(preadv, kRead)
GATHERS(preadv64, kRead)
GATHERS(pwritev, kWrite)
GATHERS(pwritev64, kWrite)

EXPORT ssize_t read(int file, void* at, size_t count) {
  NEXT(read);
  return file_fails(kRead, file) ? -1 : real(file, at, count);
}
EXPORT ssize_t write(int file, const void* at, size_t count) {
  NEXT(write);
  return file_fails(kWrite, file) ? -1 : real(file, at, count);
}
EXPORT int ftruncate(int file, off_t bytes) noexcept {
  NEXT(ftruncate);
  return file_fails(kWrite, file) ? -1 : real(file, bytes);
}
EXPORT int ftruncate64(int file, off_t bytes) noexcept {
  NEXT(ftruncate64);
  return file_fails(kWrite, file) ? -1 : real(file, bytes);
}
EXPORT int fallocate(int file, int mode, off_t offset, off_t bytes) {
  NEXT(fallocate);
  return file_fails(kWrite, file) ? -1 : real(file, mode, offset, bytes);
}
EXPORT int fallocate64(int file, int mode, off_t offset, off_t bytes) {
  NEXT(fallocate64);
  return file_fails(kWrite, file) ? -1 : real(file, mode, offset, bytes);
}
EXPORT int posix_fallocate(int file, off_t offset, off_t bytes) {
  NEXT(posix_fallocate);
  return file_fails(kWrite, file) ? errno : real(file, offset, bytes);
}
EXPORT int posix_fallocate64(int file, off_t offset, off_t bytes) {
  NEXT(posix_fallocate64);
  return file_fails(kWrite, file) ? errno : real(file, offset, bytes);
}

namespace {
bool open_fails(const char* path) {
  if (!counts(kOpen)) return false;
  const Inside guard;
  if (strncmp(path, folder, strlen(folder)) != 0 && strncmp(path, "/proc/self/fd/", 14) != 0) return false;
  if (!strikes()) return false;
  errno = code;
  return true;
}
}  // namespace

#define OPENS(name)                                                       \
  EXPORT int name(const char* path, int flags, ...) {                     \
    NEXT(name);                                                           \
    va_list rest;                                                         \
    va_start(rest, flags);                                                \
    const mode_t mode = va_arg(rest, mode_t);                             \
    va_end(rest);                                                         \
    return open_fails(path) ? -1 : real(path, flags, mode);               \
  }
OPENS(open)
OPENS(open64)
EXPORT int memfd_create(const char* name, unsigned flags) noexcept {
  NEXT(memfd_create);
  return open_fails(folder) ? -1 : real(name, flags);
}

// ---- threads -------------------------------------------------------------------------------------------------------

EXPORT int pthread_create(pthread_t* made, const pthread_attr_t* how, void* (*run)(void*), void* argument) {
  NEXT(pthread_create);
  if (counts(kThread)) {
    const Inside guard;
    if (strikes()) return EAGAIN;
  }
  return real(made, how, run, argument);
}
