// Compares the values that a captured step has read with the current ones, and reports code that runs during a capture.
//
// ctypes calls these functions with the global interpreter lock held. Functions of Python's stable ABI are declared here
// because its headers may not be installed.

#include <cstdint>
#include <unordered_map>

extern "C" {
struct PyObject;
struct PyFrameObject;
using Py_tracefunc = int (*)(PyObject*, PyFrameObject*, int, PyObject*);
void Py_DecRef(PyObject*);
void PyErr_Clear();
PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
int64_t PyDict_Size(PyObject*);
int64_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, int64_t);
PyObject* PyTuple_GetItem(PyObject*, int64_t);
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
int PyObject_IsTrue(PyObject*);
PyObject* PyCell_Get(PyObject*);
PyObject* PyFrame_GetCode(PyFrameObject*);
void PyEval_SetProfile(Py_tracefunc, PyObject*);
}

namespace {

// Equals ``EntryKind`` in words.py.
enum EntryKind : int64_t {
  kItem = 0,
  kAttribute = 1,
  kCell = 2,
  kList = 3,
  kSize = 4,
  kType = 5,
  kCall = 6,
};

struct Entry {
  int64_t kind;
  PyObject* owner;
  PyObject* key;
  PyObject* value;  // null if the value does not exist
  int64_t count;    // number of items, for kList and kSize
};

// A word in memory that changes whenever one of the entries from ``begin`` to ``end`` does.
struct Word {
  const int64_t* address;
  int64_t before;
  int64_t begin;
  int64_t end;
};

bool is_same_new(PyObject* now, const Entry& entry) {
  if (now == nullptr) {
    PyErr_Clear();
    return entry.value == nullptr;
  }
  Py_DecRef(now);
  return now == entry.value;
}

bool is_same_list(const Entry& entry) {
  if (PyList_Size(entry.owner) != entry.count) return false;
  for (int64_t i = 0; i < entry.count; ++i) {
    if (PyList_GetItem(entry.owner, i) != PyTuple_GetItem(entry.value, i)) return false;
  }
  return true;
}

bool is_unchanged(const Entry& entry) {
  switch (entry.kind) {
    case kItem: {
      PyObject* now = PyDict_GetItemWithError(entry.owner, entry.key);
      if (now == nullptr) PyErr_Clear();
      return now == entry.value;
    }
    case kAttribute:
      return is_same_new(PyObject_GetAttr(entry.owner, entry.key), entry);
    case kCell:
      return is_same_new(PyCell_Get(entry.owner), entry);
    case kList:
      return is_same_list(entry);
    case kSize:
      return PyDict_Size(entry.owner) == entry.count;
    case kType: {
      PyObject* now = PyObject_Type(entry.owner);
      Py_DecRef(now);
      return now == entry.value;
    }
    default: {
      PyObject* answer = PyObject_CallFunctionObjArgs(entry.value, nullptr);
      if (answer == nullptr) {
        PyErr_Clear();
        return false;
      }
      const bool same = PyObject_IsTrue(answer) == 1;
      Py_DecRef(answer);
      return same;
    }
  }
}

// The code that has run, and whether each of its calls must be reported.
std::unordered_map<PyObject*, bool> reported_code;

int on_event(PyObject* callback, PyFrameObject* frame, int event, PyObject*) {
  constexpr int kCallEvent = 0;
  if (event != kCallEvent) return 0;
  PyObject* code = PyFrame_GetCode(frame);
  const auto entry = reported_code.find(code);
  if (entry != reported_code.end() && !entry->second) {
    Py_DecRef(code);
    return 0;
  }
  PyObject* answer = PyObject_CallFunctionObjArgs(callback, frame, nullptr);
  if (answer != nullptr) reported_code[code] = PyObject_IsTrue(answer) == 1;
  Py_DecRef(code);
  if (answer == nullptr) return -1;
  Py_DecRef(answer);
  return 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Returns the index of the first changed entry from ``start`` on, or ``count``.
EXPORT int64_t outofcore_first_change(const Entry* entries, int64_t count, int64_t start) {
  for (int64_t i = start; i < count; ++i) {
    if (!is_unchanged(entries[i])) return i;
  }
  return count;
}

// Returns the index of the first changed entry that has a word, or -1. A word that changed without its entries is stored.
EXPORT int64_t outofcore_first_change_by_words(const Entry* entries, Word* words, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Word& word = words[i];
    const int64_t now = *word.address;
    if (now == word.before) continue;
    const int64_t changed = outofcore_first_change(entries, word.end, word.begin);
    if (changed < word.end) return changed;
    word.before = now;
  }
  return -1;
}

// Forgets which code has run.
EXPORT void outofcore_forget_code() { reported_code.clear(); }

// Calls ``callback(frame)`` when new code runs in this thread, and for later calls of that code while the callback
// returns true. The callback must keep the code alive. Null stops this.
EXPORT void outofcore_tell_of_code(PyObject* callback) {
  PyEval_SetProfile(callback == nullptr ? nullptr : on_event, callback);
}
