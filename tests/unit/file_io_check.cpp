// Moves bytes between memory and a file in a folder, as plain copies of an array have it: any address, offset and length,
// with calls that come short, are interrupted or fail.

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdint>

namespace {
int64_t short_by = 0;     // bytes that every third call leaves out, if it can
bool always_short = false;
bool interrupts = false;  // every other call
int refuses = 0;          // the error of the first call behind those that `lets`
int64_t lets = 0;
bool takes_nothing = false;
int64_t calls = 0;
bool strict = false;  // as direct I/O is: whole pages alone
}  // namespace

static ssize_t called(int file, char* at, size_t count, off_t offset, bool writes);
static ssize_t pread_here(int file, void* at, size_t count, off_t offset) {
  return called(file, static_cast<char*>(at), count, offset, false);
}
static ssize_t pwrite_here(int file, const void* at, size_t count, off_t offset) {
  return called(file, const_cast<char*>(static_cast<const char*>(at)), count, offset, true);
}

#define pread pread_here
#define pwrite pwrite_here
#include "file_io.h"
#undef pread
#undef pwrite

#include <cstdlib>
#include <string>

#include "check.h"

using namespace outofcore;

static ssize_t called(int file, char* at, size_t count, off_t offset, bool writes) {
  ++calls;
  if (strict && ((reinterpret_cast<uintptr_t>(at) | count | static_cast<uint64_t>(offset)) % kPage) != 0) {
    errno = EINVAL;
    return -1;
  }
  if (interrupts && calls % 2 == 0) {
    errno = EINTR;
    return -1;
  }
  if (refuses != 0 && lets-- <= 0) {
    errno = refuses;
    return -1;
  }
  if (takes_nothing) return 0;
  const auto left_out = static_cast<size_t>(always_short || calls % 3 == 1 ? short_by : 0);
  const ssize_t moved = writes ? pwrite(file, at, count, offset) : pread(file, at, count, offset);
  // Of what comes beyond a short one nothing is promised.
  if (moved <= static_cast<ssize_t>(left_out)) return moved;
  if (!writes && left_out != 0) std::memset(at + moved - left_out, 0xAB, left_out);
  return moved - static_cast<ssize_t>(left_out);
}

static Transfer moved(int file, bool writes, Cache cache, char* memory, int64_t bytes, int64_t offset, char* bounce) {
  Transfer made{reinterpret_cast<int64_t>(memory), bytes, offset, file, writes, cache, 7, 7, bounce};
  transfer(made);
  return made;
}

int main(int, char** arguments) {
  constexpr int64_t kFile = 4 * kBounce + 1234;
  const std::string path = std::string(arguments[1]) + "/file";
  const int plain = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  SURE(plain >= 0);
  int direct = open(path.c_str(), O_RDWR | O_DIRECT);
  auto pages = [](int64_t bytes) {
    auto* found = static_cast<char*>(std::aligned_alloc(kPage, static_cast<size_t>(whole_pages(bytes))));
    SURE(found != nullptr);
    return found;
  };
  char *data = pages(kFile), *memory = pages(kFile + 4 * kPage), *bounce = pages(kBounce);
  for (int64_t i = 0; i < kFile; ++i) data[i] = static_cast<char>(draw());
  SURE(pwrite(plain, data, kFile, 0) == kFile);
  // Some file systems refuse direct I/O at once, others when it is tried.
  if (direct >= 0 && ::pread(direct, bounce, kPage, 0) < 0) direct = -1;
  strict = direct < 0;
  if (direct < 0) direct = plain;

  auto number = [](int64_t end) { return static_cast<int64_t>((uint64_t{draw()} << 32 | draw()) % static_cast<uint64_t>(end)); };
  for (int round = 0; round < 300; ++round) {
    const bool past = below(3) != 0;
    strict = past;
    short_by = below(2) ? 0 : below(3) == 0 ? 100 : kPage + 7;
    interrupts = below(4) == 0;
    const int64_t offset = below(2) ? number(kFile) : number(kFile / kPage) * kPage;
    const int64_t bytes = below(2) ? number(kFile - offset + 1) : std::min<int64_t>(kFile - offset, number(5 * kPage));
    const int64_t within = below(3) == 0 ? 0 : below(2) ? offset % kPage : below(static_cast<int>(kPage));
    std::memset(memory, 0x55, static_cast<size_t>(kFile + 4 * kPage));
    auto made = moved(past ? direct : plain, false, past ? kPast : below(2) ? kDropped : kKept, memory + within, bytes,
                      offset, past ? bounce : nullptr);
    SURE(made.failure == 0 && made.done == bytes);
    SURE(std::memcmp(memory + within, data + offset, static_cast<size_t>(bytes)) == 0);
    SURE(within == 0 || memory[within - 1] == 0x55);
    SURE(memory[within + bytes] == 0x55);
  }
  // Writes begin at a page, and own their last one.
  for (int round = 0; round < 300; ++round) {
    const bool past = below(3) != 0;
    strict = past;
    short_by = below(2) ? 0 : below(3) == 0 ? 100 : kPage + 7;
    interrupts = below(4) == 0;
    const int64_t offset = number(kFile / kPage) * kPage;
    const int64_t bytes = below(2) ? number(kFile - offset + 1) : std::min<int64_t>(kFile - offset, number(5 * kPage));
    const int64_t within = below(2) ? 0 : below(static_cast<int>(kPage));
    for (int64_t i = 0; i < bytes; ++i) memory[within + i] = data[offset + i] = static_cast<char>(draw());
    auto made = moved(past ? direct : plain, true, past ? kPast : below(2) ? kDropped : kKept, memory + within, bytes,
                      offset, past ? bounce : nullptr);
    SURE(made.failure == 0 && made.done == bytes);
    const int64_t begin = offset + bytes, end = std::min(whole_pages(begin), kFile);
    if (past) SURE(pwrite(plain, data + begin, static_cast<size_t>(end - begin), begin) == end - begin);
    SURE(pread(plain, memory, kFile, 0) == kFile);
    SURE(std::memcmp(memory, data, static_cast<size_t>(kFile)) == 0);
    SURE(ftruncate(plain, kFile) == 0);
  }
  strict = true;
  short_by = 0;
  interrupts = false;

  // Whole pages go straight to where they belong, by as few calls as may be.
  calls = 0;
  SURE(moved(direct, false, kPast, memory, 2 * kBounce, kPage, nullptr).failure == 0 && calls == 1);
  // Where both lie alike in their pages, all but the ends do.
  calls = 0;
  std::memset(bounce, 0x33, kBounce);
  SURE(moved(direct, false, kPast, memory + 8, 2 * kBounce, kPage + 8, bounce).failure == 0 && calls == 3);
  SURE(bounce[kPage] == 0x33);
  // What cannot be moved without a buffer, or would change a part of a page, is refused.
  SURE(moved(direct, false, kPast, memory + 8, kPage, 0, nullptr).failure == EINVAL);
  SURE(moved(direct, true, kPast, memory, kPage, 8, bounce).failure == EINVAL);
  SURE(moved(direct, false, kPast, memory, 0, 0, nullptr).failure == 0);

  // The end of the file, in the middle of a page.
  auto ended = moved(direct, false, kPast, memory, kFile, 2 * kBounce, bounce);
  SURE(ended.failure == kEnded && ended.done == kFile - 2 * kBounce);
  ended = moved(direct, false, kPast, memory + 3, kFile, 2 * kBounce + 5, bounce);
  SURE(ended.failure == kEnded && ended.done == kFile - 2 * kBounce - 5);
  SURE(moved(direct, false, kPast, memory, kFile - kPage, kPage, bounce).failure == 0);

  takes_nothing = true;
  SURE(moved(direct, true, kPast, memory, 2 * kPage, 0, nullptr).failure == kEnded);
  takes_nothing = false;
  // A call that does not come to the first page is tried once more.
  short_by = kPage - 1;
  always_short = true;
  calls = 0;
  ended = moved(direct, false, kPast, memory, kPage, 0, nullptr);
  SURE(ended.failure == kEnded && ended.done == 1 && calls == 2);
  short_by = 0;
  always_short = false;

  // What the system says, and how much was moved before.
  for (const int code : {ENOSPC, EIO}) {
    refuses = code;
    lets = 2;
    auto refused = moved(direct, true, kPast, memory + 8, 4 * kBounce, 0, bounce);
    SURE(refused.failure == code && refused.done == 2 * kBounce);
  }
  SURE(unlink(path.c_str()) == 0);
  std::puts("ok");
}
