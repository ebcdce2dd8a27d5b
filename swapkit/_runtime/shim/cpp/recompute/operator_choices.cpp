// operator_choices.cpp - users' choices for the operators of the current module.
#include "recompute/operator_choices.hpp"

#include "python/failures.hpp"
#include "recompute/capturing.hpp"
#include "saved/carried.hpp"
#include "saved/storage_choices.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

namespace swapkit {

namespace {

constexpr std::size_t few_carried = 64; // sweep at each operator up to this many groups

struct ChoiceTable {
    std::vector<Chosen> kinds; // what is the same for the operators of a kind; owns the placements
    std::unordered_map<const Named *, Chosen> chosen;
};

// Immutable, except for the counts.
struct Choices {
    PyObject ob_base;
    ChoiceTable *table;
};

// An open table or carrier, on the list of its thread. Only that thread changes the list. Another
// thread may set `is_over`; the owner then removes the entry when it next checks the list.
struct Open {
    Choices *choices;  // owned; null: only a carrier
    PyObject *tracker; // owned: knows the current module
    Open *outer;       // of the same thread
    long tag;          // of the module
    bool may_recompute;
    std::atomic<bool> is_over; // set with the GIL, read without it
};

struct Choosing {
    PyObject ob_base;
    Choices *choices;  // owned; null: only a carrier
    PyObject *tracker; // owned
    Open *open;        // null: not entered, or already exited
    bool may_recompute;
};

// The groups captured on a thread since its outermost carrier began.
struct Carrier {
    unsigned depth = 0;
    Ref<Mover> mover; // of one of the groups: all movers have the same lock
    Carried groups{true};
};

// Pointers, not objects with destructors: a thread may end without the interpreter.
thread_local Open *open_here = nullptr;     // all
thread_local Open *choosing_here = nullptr; // the innermost with a table
thread_local Carrier *carrier = nullptr;
thread_local unsigned uses = 0; // kernels that use the list now

// The tag of the current module. -1: an exception is set.
long current_tag(PyObject *tracker) {
    Ref<> tag = call_method<"current">(tracker);
    return tag ? PyLong_AsLong(tag.get()) : -1;
}

// ---- the table ----------------------------------------------------------------------------------

void choices_free(Choices *choices) {
    if (ChoiceTable *table = choices->table) {
        for (Chosen &kind : table->kinds) {
            Py_XDECREF(kind.terms.placement);
        }
        delete table;
    }
}

// Read pairs (recomputes, choice or None).
bool read_kinds(ChoiceTable *table, const Items &kinds) {
    for (PyObject *each : kinds) {
        int recomputes;
        PyObject *placement;
        if (PyArg_ParseTuple(each, "pO", &recomputes, &placement) == 0) {
            return false;
        }
        Chosen &kind = table->kinds.emplace_back(Chosen{});
        kind.kind = table->kinds.size() - 1;
        kind.recomputes = recomputes != 0;
        kind.swaps = placement != Py_None;
        if (kind.swaps && !terms_read(placement, &kind.terms)) {
            return false;
        }
    }
    return true;
}

// Read rows (number of the operator, its kind).
bool read_kind_places(ChoiceTable *table, const Bytes &bytes) {
    struct Row {
        std::int64_t named, kind;
    };
    std::vector<Row> rows;
    if (!bytes.read_rows(&rows)) {
        return false;
    }
    for (const Row &row : rows) {
        const Named *named = named_at(static_cast<std::size_t>(row.named));
        auto kind = static_cast<std::size_t>(row.kind);
        if (kind >= table->kinds.size()) {
            PyErr_SetString(PyExc_ValueError, "a row names an unknown kind");
        }
        if (PyErr_Occurred() != nullptr) {
            return false;
        }
        table->chosen.emplace(named, table->kinds[kind]);
    }
    return true;
}

// Choices(kinds, places)
bool choices_make(Choices *choices, const Items &kinds, const Bytes &places) {
    ChoiceTable *table = choices->table = new ChoiceTable;
    bool is_read = read_kinds(table, kinds) && read_kind_places(table, places);
    for (auto &each : table->chosen) {
        each.second.table = as_object(choices);
    }
    return is_read;
}

// seen(): return for each kind the number of operator runs, and of those whose choice is not void.
Ref<> choices_seen(const Choices *choices) {
    const ChoiceTable *table = choices->table;
    struct Runs {
        unsigned long long all, held;
    };
    std::vector<Runs> runs(table->kinds.size());
    for (const auto &each : table->chosen) {
        const Chosen &chosen = each.second;
        runs[chosen.kind].all += chosen.seen;
        runs[chosen.kind].held += chosen.is_void ? 0 : chosen.seen;
    }
    return list_of(runs, [](const Runs &each) {
        return Ref<>::steal(Py_BuildValue("(KK)", each.all, each.held));
    });
}

Type choices_type(Life<Choices, MadeBy<choices_make>, Freed<choices_free>>(), "Choices",
                  "The users' choices for the operators of a module.",
                  method<"seen", choices_seen>());

// ---- where a table holds ------------------------------------------------------------------------

void carry_begin() {
    if (carrier == nullptr) {
        carrier = new Carrier;
    }
    carrier->depth++;
}

// False: an exception is set.
bool carry_end() {
    if (carrier == nullptr || --carrier->depth > 0) {
        return true;
    }
    Carrier *ended = std::exchange(carrier, nullptr);
    Ref<Mover> mover = std::move(ended->mover);
    if (!mover) {
        delete ended;
        return true;
    }
    Locked lock(mover.get());
    if (!lock) { // interrupted: drop the groups with the next carrier's
        carrier = ended;
        carrier->mover = std::move(mover);
        return false;
    }
    ended->groups.drop();
    delete ended;
    return true;
}

void find_choosing() {
    choosing_here = open_here;
    while (choosing_here != nullptr && choosing_here->choices == nullptr) {
        choosing_here = choosing_here->outer;
    }
}

// Remove the innermost entry that is over from this thread's list and return it; null: none.
Open *take_over() {
    Open **at = &open_here;
    while (*at != nullptr && !(*at)->is_over) {
        at = &(*at)->outer;
    }
    Open *over = *at;
    if (over != nullptr) {
        *at = over->outer;
        find_choosing();
    }
    return over;
}

// Remove all entries that are over from this thread's list. If a kernel uses the list, the next
// check removes them. False: an exception is set.
bool clear_over() {
    if (uses > 0) {
        return true;
    }
    bool is_done = true;
    for (Open *over = take_over(); over != nullptr; over = is_done ? take_over() : nullptr) {
        is_done = over->choices == nullptr || watch_end();
        is_done = carry_end() && is_done;
        Py_XDECREF(as_object(over->choices));
        Py_DECREF(over->tracker);
        delete over;
    }
    return is_done;
}

// End an open table; if it is on this thread's list, remove it at once. False: an exception is set.
bool close_choosing(Choosing *choosing) {
    if (Open *open = std::exchange(choosing->open, nullptr)) {
        open->is_over = true;
    }
    return clear_over();
}

// Choosing(table or None, tracker, may_recompute)
bool choosing_make(Choosing *choosing, PyObject *choices, PyObject *tracker, bool may_recompute) {
    if (choices != Py_None && Py_TYPE(choices) != &choices_type) {
        PyErr_Format(PyExc_TypeError, "expected Choices or None, not %R", choices);
        return false;
    }
    choosing->choices =
        choices == Py_None ? nullptr : reinterpret_cast<Choices *>(Py_NewRef(choices));
    choosing->tracker = Py_NewRef(tracker);
    choosing->may_recompute = may_recompute;
    return true;
}

Ref<Choosing> choosing_enter(Choosing *choosing) {
    if (choosing->open != nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "this Choosing is already entered");
        return {};
    }
    bool has_table = choosing->choices != nullptr;
    long tag =
        has_table ? current_tag(choosing->tracker) : 0; // of the module that has just started
    if (PyErr_Occurred() != nullptr || !clear_over()) {
        return {};
    }
    Py_XINCREF(as_object(choosing->choices));
    choosing->open = open_here = new Open{.choices = choosing->choices,
                                          .tracker = Py_NewRef(choosing->tracker),
                                          .outer = open_here,
                                          .tag = tag,
                                          .may_recompute = choosing->may_recompute,
                                          .is_over = false};
    if (has_table) {
        choosing_here = choosing->open;
        watch_begin();
    }
    carry_begin();
    return Ref<Choosing>::share(choosing);
}

void choosing_free(Choosing *choosing) {
    if (choosing->open != nullptr) { // an interruption may have skipped `__exit__`
        PutAside failure;
        if (!close_choosing(choosing)) {
            PyErr_WriteUnraisable(as_object(choosing));
        }
    }
}

// runs(): return whether the module's own operators run here, not those of a submodule.
int choosing_runs(const Choosing *choosing) {
    if (!clear_over()) {
        return -1;
    }
    const Open *open = choosing->open;
    if (open == nullptr || choosing_here != open) {
        return 0;
    }
    long wanted = open->tag, tag = current_tag(choosing->tracker);
    return PyErr_Occurred() != nullptr ? -1 : int{tag == wanted};
}

Type choosing_type(
    Life<Choosing, MadeBy<choosing_make>, Freed<choosing_free>,
         Owned<&Choosing::choices, &Choosing::tracker>>(),
    "Choosing", "A context manager that applies choices for operators on its thread.",
    method<"__enter__", choosing_enter>(),
    method<"__exit__", [](Choosing *choosing, Unread) { return close_choosing(choosing); }>(),
    method<"runs", choosing_runs>());

// Whether a tensor only stands for one while a graph is traced: such operators are no real runs.
bool has_no_bytes(const at::Tensor &tensor) { return tensor.is_meta(); }

// ---- operator definitions -----------------------------------------------------------------------

std::atomic<std::uint64_t> definitions{0};

// Called under the dispatcher's own lock.
class DefinitionCounter final : public c10::OpRegistrationListener {
  public:
    void onOperatorRegistered(const c10::OperatorHandle &op) override {
        (void)op;
        definitions++;
    }
    void onOperatorDeregistered(const c10::OperatorHandle &op) override {
        (void)op;
        definitions++;
    }
};

// operators_known(): return a number that changes whenever an operator is defined or removed.
std::uint64_t operators_known() {
    // Never freed, like the kernels.
    static auto &listener =
        *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(
            std::make_unique<DefinitionCounter>()));
    (void)listener;
    return definitions.load();
}

const Functions chosen_functions{module_function<"operators_known", operators_known>()};

} // namespace

// ---- operators ----------------------------------------------------------------------------------

bool is_anything_chosen() { return choosing_here != nullptr; }

UsingChosen::UsingChosen(const Named *named) {
    if (uses == 0 && choosing_here->is_over) {
        WithPython python;
        if (!clear_over()) {
            swallow(named);
        }
    }
    uses++;
}
UsingChosen::~UsingChosen() { uses--; }

Packer *choosing_packer() {
    if (!c10::GradMode::is_enabled() || is_in_backward()) {
        return nullptr;
    }
    Packer *packer = innermost_packer();
    return packer == nullptr || packer->is_inert != 0 ? nullptr : packer;
}

const Chosen *chosen_for(const Named *named, const Stack &stack) {
    const Open *here = choosing_here;
    if (here == nullptr || here->is_over) {
        return nullptr;
    }
    auto found = here->choices->table->chosen.find(named);
    if (found == here->choices->table->chosen.end()) {
        return nullptr;
    }
    std::vector<at::Tensor> given = tensors_given(named, stack);
    if (std::any_of(given.begin(), given.end(), has_no_bytes)) {
        return nullptr;
    }
    WithPython python;
    long tag = current_tag(here->tracker);
    if (PyErr_Occurred() != nullptr) {
        put_off(named);
        return nullptr;
    }
    if (tag != here->tag || here->is_over) {
        return nullptr;
    }
    Chosen &chosen = found->second;
    chosen.seen++;
    bool swaps = chosen.swaps && !chosen.is_void;
    bool holds = swaps || (chosen.recomputes && here->may_recompute);
    if (!holds || choosing_packer() == nullptr) {
        return nullptr;
    }
    if (swaps && !send_pending()) {
        swallow(named);
    }
    return &chosen;
}

Ref<Mover> prepare_chosen(const Named *named, Mover *mover, const Stack &stack) {
    std::vector<at::Tensor> given = tensors_given(named, stack);
    for (const at::Tensor &each : given) {
        if (!void_swap(key_of(*each.unsafeGetTensorImpl()))) {
            return {};
        }
    }
    if (!send_pending()) {
        return {};
    }
    if (carrier != nullptr && carrier->groups.count() <= few_carried) {
        carrier->groups.sweep(); // results that can no longer be saved must not keep operands
    }
    return given.empty() ? Ref<Mover>::share(mover) : mover_for(mover, given.front().device());
}

void carry_chosen(std::vector<Ref<Group>> groups) {
    if (carrier == nullptr || groups.empty()) {
        return;
    }
    carrier->mover = Ref<Mover>::share(groups.front()->mover);
    carrier->groups.add(std::move(groups));
}

void mark_chosen(const Chosen &chosen, const Named *named, const std::vector<at::Tensor> &viewed,
                 const Stack &stack) {
    std::vector<Key> made;
    for (const at::Tensor &each : tensors_made(named, stack)) {
        if (!has_no_bytes(each)) {
            made.push_back(key_of(*each.unsafeGetTensorImpl()));
        }
    }
    if (named->gives_view) { // a view does not yet share its tensor's version counter
        std::vector<Key> views = std::exchange(made, {});
        for (const at::Tensor &each : viewed) {
            Key key = key_of(*each.unsafeGetTensorImpl());
            if (std::any_of(views.begin(), views.end(),
                            [key](Key view) { return view.storage == key.storage; })) {
                made.push_back(key);
            }
        }
    }
    for (Key key : made) {
        if (key.storage != nullptr) {
            key.version += named->declared.empty() ? 0 : 1; // torch bumps the version later
            add_mark(key, chosen.terms, chosen.table, &chosen.is_void);
        }
    }
}

} // namespace swapkit
