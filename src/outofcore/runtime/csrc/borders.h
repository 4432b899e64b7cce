// What C++ and Python both have: structs that Python fills in, enums, and counters. Each file tells of its own, and
// test_native_build.py compares them with Python's, name by name.

#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace borders {

struct Member {
  const char* name;
  int64_t at, bytes;  // of a struct; of an enum its value, and 0
};

// Lines of a type's name, and a member's with its numbers.
inline std::string& told() {
  static std::string& lines = *new std::string;
  return lines;
}

struct Border {
  Border(const std::string& type, std::initializer_list<Member> members) {
    for (const Member& member : members)
      told() += type + ' ' + member.name + ' ' + std::to_string(member.at) + ' ' + std::to_string(member.bytes) + '\n';
  }
};

}  // namespace borders

// Each after the other, with the type.
#define BORDER_EACH(what, type, ...) __VA_OPT__(BORDER_EXPAND(BORDER_MORE(what, type, __VA_ARGS__)))
#define BORDER_MORE(what, type, name, ...) what(type, name), __VA_OPT__(BORDER_AGAIN BORDER_NONE(what, type, __VA_ARGS__))
#define BORDER_AGAIN() BORDER_MORE
#define BORDER_NONE ()
#define BORDER_EXPAND(...) BORDER_MANY(BORDER_MANY(BORDER_MANY(BORDER_MANY(__VA_ARGS__))))  // for up to 80 names
#define BORDER_MANY(...) BORDER_FOUR(BORDER_FOUR(BORDER_FOUR(BORDER_FOUR(__VA_ARGS__))))
#define BORDER_FOUR(...) BORDER_ONE(BORDER_ONE(BORDER_ONE(BORDER_ONE(__VA_ARGS__))))
#define BORDER_ONE(...) __VA_ARGS__
#define BORDER_FIELD(type, member) {#member, offsetof(type, member), sizeof(type::member)}
#define BORDER_VALUE(type, name) {#name, static_cast<int64_t>(type::name), 0}
#define BORDER_CONSTANT(type, name) {#name, name, 0}

#define STRUCT(type, ...) {#type, {BORDER_EACH(BORDER_FIELD, type, __VA_ARGS__)}}
// ``name``: under which Python's is compared.
#define ENUM(name, type, ...) {name, {BORDER_EACH(BORDER_VALUE, type, __VA_ARGS__)}}
#define CONSTANTS(name, ...) {name, {BORDER_EACH(BORDER_CONSTANT, , __VA_ARGS__)}}
