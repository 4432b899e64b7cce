// Pages, the unit of mapping and of direct I/O.

#pragma once

#include <cstdint>

namespace outofcore {

constexpr int64_t kPage = 4096;

constexpr int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace outofcore
