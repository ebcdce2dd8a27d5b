// writes.cpp - who is told of operators that change something in place.
#include "writes.hpp"

#include "failures.hpp"
#include "links.hpp"
#include "operators.hpp"

#include <utility>

namespace swapkit {

namespace {

// Owned, and for good: a thread that ends may not have the interpreter any more.
thread_local PyObject *watcher = nullptr;

// What the watcher runs itself is not told.
class Unwatched {
  public:
    Unwatched() : former_(std::exchange(watcher, nullptr)) {}
    ~Unwatched() { watcher = former_; }
    Unwatched(const Unwatched &) = delete;
    Unwatched &operator=(const Unwatched &) = delete;
    PyObject *get() const { return former_; }

  private:
    PyObject *former_;
};

// watch_writes(watcher): let it be told on this thread from now on, as watcher(function);
// None: nobody is. Who was until now.
PyObject *watch_writes(PyObject *, PyObject *argument) {
    PyObject *next = argument == Py_None ? nullptr : Py_NewRef(argument);
    PyObject *former = std::exchange(watcher, next);
    return former == nullptr ? Py_NewRef(Py_None) : former;
}

} // namespace

bool is_watched() { return watcher != nullptr; }

void tell_write(const Named *named) {
    WithPython python;
    Deeper ours;
    OwnOperators unseen;
    Unwatched meanwhile;
    if (Ref<>::steal(PyObject_CallOneArg(meanwhile.get(), named->function))) {
        return;
    }
    swallow(named);
    TORCH_CHECK(false, "swapkit: what ", named->op.schema().name(),
                " changes in a part that runs twice could not be noted");
}

PyMethodDef writes_functions[] = {
    {"watch_writes", shielded<watch_writes>, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace swapkit
