// Compares what a captured step has read with what is there now, and tells which code runs while it is captured.
//
// Called by ctypes with Python's lock held. The functions of Python's stable interface are declared here, as its headers
// need not be installed.

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

// As ``Kind`` in words.py.
enum Kind : int64_t {
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
  PyObject* value;  // null: there is nothing
  int64_t count;    // of items, where these are compared
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

// By the code that has run, whether each of its calls is to be told of.
std::unordered_map<PyObject*, bool> seen;

int on_event(PyObject* tell, PyFrameObject* frame, int event, PyObject*) {
  constexpr int kCallEvent = 0;
  if (event != kCallEvent) return 0;
  PyObject* code = PyFrame_GetCode(frame);
  const auto found = seen.find(code);
  if (found != seen.end() && !found->second) {
    Py_DecRef(code);
    return 0;
  }
  PyObject* answer = PyObject_CallFunctionObjArgs(tell, frame, nullptr);
  if (answer != nullptr) seen[code] = PyObject_IsTrue(answer) == 1;
  Py_DecRef(code);
  if (answer == nullptr) return -1;
  Py_DecRef(answer);
  return 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The first entry from ``start`` on that is not what it was; ``count`` if all are.
EXPORT int64_t outofcore_first_change(const Entry* entries, int64_t count, int64_t start) {
  for (int64_t i = start; i < count; ++i) {
    if (!is_unchanged(entries[i])) return i;
  }
  return count;
}

// The first entry with a word whose value has changed, or -1. Where a word has changed and none of its entries has, the
// word is stored anew.
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
EXPORT void outofcore_forget_code() { seen.clear(); }

// Has ``tell(frame)`` called when code runs in this thread that has not run yet, and again as often as its answer is
// true. It keeps what runs alive. Null: no longer.
EXPORT void outofcore_tell_of_code(PyObject* tell) { PyEval_SetProfile(tell == nullptr ? nullptr : on_event, tell); }
