// plan_cursor_type.cpp - the Python type `Follower`, and reading the tables of a plan.
#include "moves/plan_cursor.hpp"

#include "moves/plan_tables.hpp"

#include <cstring>

namespace swapkit {

namespace {

Follower *as_follower(PyObject *self) { return reinterpret_cast<Follower *>(self); }

// Copy a table that Python has built. False: an exception is set.
template <class Row> bool read_rows(const Py_buffer &bytes, std::vector<Row> *out) {
    static_assert(sizeof(Row) % sizeof(std::int64_t) == 0);
    auto length = static_cast<std::size_t>(bytes.len);
    if (length % sizeof(Row) != 0) {
        PyErr_SetString(PyExc_ValueError, "a table has an incomplete row");
        return false;
    }
    out->resize(length / sizeof(Row));
    if (length > 0) {
        std::memcpy(out->data(), bytes.buf, length);
    }
    return true;
}

bool is_sound(const Body &body) {
    auto count = static_cast<std::int64_t>(body.storages.size());
    auto is_one = [count](std::int64_t storage) { return 0 <= storage && storage < count; };
    bool are_older = true; // otherwise `former` chains could be endless
    for (std::int64_t storage = 0; storage < count; storage++) {
        std::int64_t former = body.storages[static_cast<std::size_t>(storage)].former;
        are_older = are_older && no_storage <= former && former < storage;
    }
    return are_older &&
           std::all_of(body.events.begin(), body.events.end(),
                       [&](const Expected &event) {
                           return event.storage == no_storage || is_one(event.storage);
                       }) &&
           std::all_of(body.continuing.begin(), body.continuing.end(),
                       [&](const Due &due) { return is_one(due.storage); });
}

bool read_body(const Py_buffer (&tables)[3], Body *body) {
    if (!read_rows(tables[0], &body->events) || !read_rows(tables[1], &body->storages) ||
        !read_rows(tables[2], &body->continuing)) {
        return false;
    }
    if (!is_sound(*body)) {
        PyErr_SetString(PyExc_ValueError, "a table names an unknown storage");
        return false;
    }
    body->progress.resize(body->storages.size());
    return true;
}

// Follower(mover, owner, events, storages, continuing): the last three are bytes, rows of 64-bit
// numbers.
PyObject *follower_make(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *mover, *owner;
    Py_buffer tables[3] = {};
    if (PyArg_ParseTuple(args, "O!Oy*y*y*:Follower", &mover_type, &mover, &owner, &tables[0],
                         &tables[1], &tables[2]) == 0) {
        return nullptr;
    }
    Ref<> made = Ref<>::steal(type->tp_alloc(type, 0));
    bool is_read = false;
    if (made) {
        Follower *follower = as_follower(made.get());
        follower->mover = reinterpret_cast<Mover *>(Py_NewRef(mover));
        follower->owner = Py_NewRef(owner);
        follower->body = new Body;
        is_read = read_body(tables, follower->body);
    }
    for (Py_buffer &table : tables) {
        PyBuffer_Release(&table);
    }
    return is_read ? made.release() : nullptr;
}

// capture(rows): set which operators are recomputed, from the next step on.
PyObject *follower_capture_rows(PyObject *self, PyObject *argument) {
    Body *body = as_follower(self)->body;
    Py_buffer rows = {};
    if (PyObject_GetBuffer(argument, &rows, PyBUF_SIMPLE) != 0) {
        return nullptr;
    }
    std::shared_ptr<const CaptureTable> table = capture_table(rows, body->events.size());
    PyBuffer_Release(&rows);
    if (table == nullptr) {
        return nullptr;
    }
    body->captures = std::move(table);
    body->captured.assign(capture_count(*body->captures), 0);
    Py_RETURN_NONE;
}

// captured(): return the number of captures of each row.
PyObject *follower_captured(PyObject *self, PyObject *) {
    const std::vector<std::uint64_t> &counts = as_follower(self)->body->captured;
    Ref<> list = Ref<>::steal(PyList_New(static_cast<Py_ssize_t>(counts.size())));
    for (std::size_t at = 0; list && at < counts.size(); at++) {
        PyObject *count = PyLong_FromUnsignedLongLong(counts[at]);
        if (count == nullptr) {
            return nullptr;
        }
        PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(at), count);
    }
    return list.release();
}

// reset(): begin a step. Here and below the lock is held.
PyObject *follower_reset(PyObject *self, PyObject *) {
    Follower *follower = as_follower(self);
    follower_end(follower);
    follower->body->next_due = 0;
    follower->position = follower->late = follower->refused = follower->moved_bytes = 0;
    follower->mover->books->agenda.events = 0;
    follower->is_on = 1;
    follower_capture(follower);
    Py_RETURN_NONE;
}

// end(): stop following until a step begins.
PyObject *follower_stop(PyObject *self, PyObject *) {
    follower_end(as_follower(self));
    Py_RETURN_NONE;
}

// set_untracked(is_untracked): set whether modules are not tracked on this thread. At most one
// thread is untracked.
PyObject *follower_set_untracked(PyObject *self, PyObject *argument) {
    Follower *follower = as_follower(self);
    if (argument == Py_True) {
        follower->untracked_thread = PyThread_get_thread_ident();
    } else if (follower->untracked_thread == PyThread_get_thread_ident()) {
        follower->untracked_thread = 0;
    }
    Py_RETURN_NONE;
}

// site(): return (tag, index) of the next event if it is a first save, else None.
PyObject *follower_site(PyObject *self, PyObject *) {
    const Follower *follower = as_follower(self);
    const std::vector<Expected> &events = follower->body->events;
    if (follower->is_on == 0 || follower->position >= events.size() ||
        events[follower->position].kind != Event::first_save) {
        Py_RETURN_NONE;
    }
    const Expected &event = events[follower->position];
    return Py_BuildValue("LL", static_cast<long long>(event.tag),
                         static_cast<long long>(event.index));
}

// recompute(storage): recompute a storage of the plan now if it was saved, and there is room.
PyObject *follower_recompute(PyObject *self, PyObject *argument) {
    Follower *follower = as_follower(self);
    std::size_t storage = PyLong_AsSize_t(argument);
    if (PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    const std::vector<Progress> &progress = follower->body->progress;
    auto group = Ref<Group>::share(storage < progress.size() ? progress[storage].group : nullptr);
    int is_made = follower->is_on != 0 && group ? recompute_early(follower->mover, group.get()) : 1;
    follower->refused += is_made == 0 ? 1 : 0;
    return is_made < 0 ? nullptr : Py_NewRef(Py_None);
}

int follower_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(as_object(as_follower(self)->mover));
    Py_VISIT(as_follower(self)->owner);
    return 0;
}

int follower_clear(PyObject *self) {
    Py_CLEAR(as_follower(self)->owner);
    return 0;
}

void follower_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Follower *follower = as_follower(self);
    if (follower->body != nullptr) {
        follower_end(follower);
    }
    delete follower->body;
    Py_XDECREF(follower->owner);
    Py_XDECREF(as_object(follower->mover));
    Py_TYPE(self)->tp_free(self);
}

PyMethodDef follower_methods[] = {
    {"capture", shielded<follower_capture_rows>, METH_O, nullptr},
    {"captured", shielded<follower_captured>, METH_NOARGS, nullptr},
    {"reset", shielded<follower_reset>, METH_NOARGS, nullptr},
    {"end", shielded<follower_stop>, METH_NOARGS, nullptr},
    {"set_untracked", follower_set_untracked, METH_O, nullptr},
    {"recompute", shielded<follower_recompute>, METH_O, nullptr},
    {"site", follower_site, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef follower_members[] = {
    {"is_on", T_BOOL, offsetof(Follower, is_on), READONLY, nullptr},
    {"position", T_ULONGLONG, offsetof(Follower, position), READONLY, nullptr},
    {"late", T_ULONGLONG, offsetof(Follower, late), READONLY, nullptr},
    {"refused", T_ULONGLONG, offsetof(Follower, refused), READONLY, nullptr},
    {"moved_bytes", T_ULONGLONG, offsetof(Follower, moved_bytes), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

} // namespace

PyTypeObject follower_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.Follower",
    .tp_basicsize = sizeof(Follower),
    .tp_dealloc = follower_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Follows a plan: does what is due at each event of a step.",
    .tp_traverse = follower_traverse,
    .tp_clear = follower_clear,
    .tp_methods = follower_methods,
    .tp_members = follower_members,
    .tp_new = follower_make,
};

} // namespace swapkit
