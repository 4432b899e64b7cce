// Types shared by C++ and Python: structs that Python fills in, enums, and counters. Each file lists its own, and
// test_native_build.py compares names, offsets, sizes and values with Python's.

#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace borders {

struct Member {
  const char* name;
  int64_t at, bytes;  // offset and size in a struct; value and 0 in an enum
};

// One line per member: type, name and numbers.
inline std::string& listing() {
  static std::string& lines = *new std::string;
  return lines;
}

struct Border {
  Border(const std::string& type, std::initializer_list<Member> members) {
    for (const Member& member : members)
      listing() +=
          type + ' ' + member.name + ' ' + std::to_string(member.at) + ' ' + std::to_string(member.bytes) + '\n';
  }
};

}  // namespace borders

// Applies `what` to each name, with the type.
#define BORDER_EACH(what, type, ...) __VA_OPT__(BORDER_EXPAND(BORDER_MORE(what, type, __VA_ARGS__)))
#define BORDER_MORE(what, type, name, ...) what(type, name), __VA_OPT__(BORDER_AGAIN BORDER_NONE(what, type, __VA_ARGS__))
#define BORDER_AGAIN() BORDER_MORE
#define BORDER_NONE ()
#define BORDER_EXPAND(...) BORDER_MANY(BORDER_MANY(BORDER_MANY(BORDER_MANY(__VA_ARGS__))))  // up to 80 names
#define BORDER_MANY(...) BORDER_FOUR(BORDER_FOUR(BORDER_FOUR(BORDER_FOUR(__VA_ARGS__))))
#define BORDER_FOUR(...) BORDER_ONE(BORDER_ONE(BORDER_ONE(BORDER_ONE(__VA_ARGS__))))
#define BORDER_ONE(...) __VA_ARGS__
#define BORDER_FIELD(type, member) {#member, offsetof(type, member), sizeof(type::member)}
#define BORDER_VALUE(type, name) {#name, static_cast<int64_t>(type::name), 0}
#define BORDER_CONSTANT(type, name) {#name, name, 0}

#define STRUCT(type, ...) {#type, {BORDER_EACH(BORDER_FIELD, type, __VA_ARGS__)}}
// `name`: that of the Python type.
#define ENUM(name, type, ...) {name, {BORDER_EACH(BORDER_VALUE, type, __VA_ARGS__)}}
#define CONSTANTS(name, ...) {name, {BORDER_EACH(BORDER_CONSTANT, , __VA_ARGS__)}}
