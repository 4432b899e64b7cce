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

#define FIELD(type, member) {#member, offsetof(type, member), sizeof(type::member)}
#define CONSTANT(name) {#name, static_cast<int64_t>(name), 0}
#define VALUE(type, name) {#name, static_cast<int64_t>(type::name), 0}
