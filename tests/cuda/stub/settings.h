// Settings of the stub, read once from the environment. README.md has the table.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace stub {

// When a stream runs its tasks.
enum class Order {
  kInline,   // at once
  kLazy,     // as late, as early or as oddly as marks allow: drawn from a seed, on the waiting thread; repeatable
  kThreads,  // on a thread for each stream, with pauses
};

inline double number(const char* name, double otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != 0 ? std::atof(value) : otherwise;
}

inline Order order_asked_for() {
  const char* value = std::getenv("STUB_MODE");
  const std::string_view asked = value == nullptr ? "" : value;
  return asked == "lazy" ? Order::kLazy : asked == "threads" ? Order::kThreads : Order::kInline;
}

struct Settings {
  Order order = order_asked_for();
  uint64_t seed = static_cast<uint64_t>(number("STUB_SEED", 0));
  size_t memory = static_cast<size_t>(number("STUB_MEM_MIB", 8192)) << 20;
  size_t pinnable = static_cast<size_t>(number("STUB_PIN_MIB", 1 << 20)) << 20;
  // Of the device's clock: bytes per second, seconds.
  double into = number("STUB_H2D_GBS", 3) * 1e9;
  double out = number("STUB_D2H_GBS", 3) * 1e9;
  double within = number("STUB_D2D_GBS", 2000) * 1e9;
  double flops = number("STUB_TFLOPS", 1) * 1e12;
  double kernel = number("STUB_KERNEL_US", 2) * 1e-6;
  double pause = number("STUB_DELAY_US", 300) * 1e-6;  // maximum pause of a thread before a task
  bool poison = number("STUB_POISON", 0) != 0;
  bool numbers = number("STUB_NUMBERS", 1) != 0;
  bool quiet = number("STUB_QUIET", 0) != 0;
  // Planted faults: each hits every n-th of its kind; 0: off.
  uint64_t lose_wait = static_cast<uint64_t>(number("STUB_LOSE_WAIT", 0));
  uint64_t flip_bit = static_cast<uint64_t>(number("STUB_FLIP_BIT", 0));
};

inline const Settings& settings() {
  static const Settings read;
  return read;
}

}  // namespace stub
