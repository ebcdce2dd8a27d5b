// capturing.cpp - kernels that see the runs of named operators.
#include "recompute/capturing.hpp"

#include "moves/plan_cursor.hpp"
#include "python/failures.hpp"
#include "recompute/operator_choices.hpp"
#include "recompute/recipes.hpp"
#include "recompute/regions.hpp"
#include "recompute/standby.hpp"
#include "running/operator_clock.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>

namespace swapkit {

struct CaptureTable {
    // A captured run of an operator.
    struct Row {
        const Named *named;
        std::uint32_t run;     // number among this operator's runs since the event
        std::uint32_t results; // bit mask of the results to capture,
        std::uint32_t count;   // if there are so many; else all
    };

    std::vector<std::size_t> first; // by event: the first row after so many events; and the end
    std::vector<Row> rows;
};

namespace {

const c10::DispatchKeySet below_select(c10::DispatchKeySet::FULL_AFTER,
                                       c10::DispatchKey::BackendSelect);

// ---- the cursor ---------------------------------------------------------------------------------

struct Count {
    const Named *named;
    std::uint32_t runs;
};

// Used by its own thread only. It owns the table; `follower` may dangle.
struct Cursor {
    std::shared_ptr<const CaptureTable> table;
    const Follower *follower = nullptr;
    std::uint64_t position = 0;
    std::size_t row = 0, end = 0;
    std::vector<Count> counts; // of runs since the event

    void stop() { row = end = 0; }
    // Count a run of an operator and return its row; the end: there is none.
    std::size_t count(const Named *named);
};

thread_local Cursor cursor;

// Operators that this thread has run and that write to tensors autograd has already saved.
thread_local std::uint64_t fills = 0;

std::size_t Cursor::count(const Named *named) {
    auto known = std::find_if(counts.begin(), counts.end(),
                              [named](const Count &each) { return each.named == named; });
    if (known == counts.end()) {
        known = counts.insert(counts.end(), {.named = named, .runs = 0});
    }
    std::uint32_t run = known->runs++;
    for (std::size_t at = row; at < end; at++) {
        const CaptureTable::Row &wanted = table->rows[at];
        if (wanted.named == named && wanted.run == run) {
            return at;
        }
    }
    return end;
}

// ---- one run ------------------------------------------------------------------------------------

// The hooks whose follower has set the cursor and still is at its event, borrowed; null: none.
Packer *expecting() {
    Packer *packer = innermost_packer();
    if (packer == nullptr || !packer->is_following() || is_in_backward()) {
        return nullptr;
    }
    const Follower *follower = packer->mover->follower;
    if (follower != cursor.follower ||
        !follower_is_at(follower, cursor.table.get(), cursor.position)) {
        cursor.stop(); // another step, or another thread's events
        return nullptr;
    }
    return packer;
}

// On whose behalf a run is captured.
struct Claim {
    Captor captor;
    std::size_t row = 0;      // for a plan: of the cursor's table
    Region *region = nullptr; // for a region
};

// The capture of one operator run, from before the run until after it.
class Capture : Unmovable {
  public:
    Capture(const Named *named, Claim claim, c10::DispatchKeySet keys, const Stack &stack)
        : claim_(claim), table_(claim.captor == Captor::plan ? cursor.table : nullptr) {
        WithPython python;
        packer_ = Ref<Packer>::share(asked());
        if (packer_) {
            locked(named, [&] { begin(named, keys, stack); });
        }
    }

    // Return whether the results were captured.
    bool end(const Stack &stack) {
        if (!recipe_) {
            return false;
        }
        WithPython python;
        RecipeRef recipe = std::move(recipe_);
        bool is_captured = false;
        locked(recipe->named, [&] {
            std::vector<at::Tensor> made = tensors_made(recipe->named, stack);
            std::vector<Ref<Group>> groups;
            if (recipe_end(recipe.get(), made, wanted(made.size()), terms(), &groups)) {
                is_captured = !groups.empty();
                carry(made, std::move(groups));
            }
        });
        packer_ = Ref<Packer>();
        return is_captured;
    }

    ~Capture() {
        if (packer_) {
            WithPython python;
            recipe_ = RecipeRef(); // the operator has raised
            packer_ = Ref<Packer>();
        }
    }

  private:
    // Do something with the lock held; its exceptions are not raised.
    template <class Do> void locked(const Named *named, Do &&act) {
        Deeper ours;
        OwnOperators unseen;
        Locked lock(packer_->mover);
        try {
            if (lock) {
                act();
            }
        } catch (const std::exception &) {
            raise_current();
        }
        swallow(named);
    }

    // The hooks that the run is captured for; null: it is not captured after all.
    Packer *asked() const {
        switch (claim_.captor) {
        case Captor::region:
            return region_kept(claim_.region);
        case Captor::user:
            return choosing_packer();
        case Captor::plan:
            return expecting();
        default:
            return standing_by();
        }
    }

    void begin(const Named *named, c10::DispatchKeySet keys, const Stack &stack) {
        Keeping keeping = {.mover = packer_->mover,
                           .terms = &packer_->terms,
                           .captor = claim_.captor,
                           .region = claim_.region};
        Ref<Mover> mover; // for the operator's device
        if (claim_.captor == Captor::user) {
            mover = prepare_chosen(named, packer_->mover, stack);
            if (!mover) {
                return;
            }
            keeping.mover = mover.get();
        }
        recipe_ = recipe_begin(named, keys, stack, keeping);
    }

    // The terms of recomputed results. Those of users' choices stay unless there is a budget.
    Terms terms() const {
        Terms found = packer_->terms;
        if (claim_.captor == Captor::user && found.action != Action::automatic) {
            found.action = Action::keep;
        }
        return found;
    }

    void carry(const std::vector<at::Tensor> &made, std::vector<Ref<Group>> groups) const {
        switch (claim_.captor) {
        case Captor::region:
            region_carry(claim_.region, made, std::move(groups));
            break;
        case Captor::user:
            carry_chosen(std::move(groups));
            break;
        case Captor::plan:
            follower_carry(packer_->mover->follower, table_.get(), claim_.row, std::move(groups));
            break;
        default:
            carry_captured(packer_->mover, std::move(groups));
        }
    }

    // Which of `count` results to capture.
    std::vector<bool> wanted(std::size_t count) const {
        std::vector<bool> results(count, true);
        if (table_ != nullptr && table_->rows[claim_.row].count == count) {
            for (std::size_t at = 0; at < count; at++) {
                results[at] = (table_->rows[claim_.row].results >> at & 1) != 0;
            }
        }
        return results;
    }

    Claim claim_;
    std::shared_ptr<const CaptureTable> table_; // null: not for a plan
    RecipeRef recipe_;
    Ref<Packer> packer_;
};

// ---- the kernel ---------------------------------------------------------------------------------

// Settle the recipes of the storages that an operator is about to change. Throws on failure.
void settle_written(const Named *named, const c10::IValue *arguments) {
    std::vector<c10::StorageImpl *> changed = written_storages(named, arguments);
    if (std::none_of(changed.begin(), changed.end(), may_settle)) {
        return;
    }
    WithPython python;
    Deeper ours;
    OwnOperators unseen;
    if (!settle(changed, false)) {
        bool is_out_of_memory = PyErr_ExceptionMatches(links.out_of_memory) != 0;
        swallow(named);
        TORCH_CHECK_WITH(OutOfMemoryError, !is_out_of_memory,
                         "swapkit: no memory to keep the recomputed results of an operand of ",
                         named->op.schema().name(), " before it changes the operand in place");
        TORCH_CHECK(false, "swapkit: cannot keep the recomputed results of an operand of ",
                    named->op.schema().name(), " before it changes the operand in place");
    }
}

class Kernel final : public c10::OperatorKernel {
  public:
    explicit Kernel(const Named *named) : named_(named) {}

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
        if (op.schema().arguments().size() != named_->arguments) { // redefined
            op.redispatchBoxed(keys & below_select, stack);
            return;
        }
        keys = named_->former ? keys : keys & below_select;
        if (named_->may_write()) {
            about_to_write(named_->given(*stack));
        }
        bool is_idle = cursor.row == cursor.end && !stands_anyone_by() &&
                       open_region() == nullptr && !is_anything_chosen();
        if (C10_LIKELY(is_idle || Deeper::depth() > 0)) {
            named_->run(keys, stack);
            return;
        }
        if (is_anything_chosen()) {
            UsingChosen use(named_);
            run_as_chosen(chosen_for(named_, *stack), keys, stack);
        } else {
            run_as_chosen(nullptr, keys, stack);
        }
    }

  private:
    void run_as_chosen(const Chosen *chosen, c10::DispatchKeySet keys, Stack *stack) const {
        if (Region *region = open_region()) {
            run_inside(region, keys, stack);
        } else if (chosen != nullptr && !chosen->recomputes) {
            run_marked(*chosen, keys, stack);
        } else if (chosen != nullptr && named_->can_repeat) {
            (void)capture({.captor = Captor::user}, keys, stack);
        } else {
            run_unchosen(keys, stack);
        }
    }

    void about_to_write(const c10::IValue *arguments) const {
        // Inside another operator, below autograd, such a change is invisible: of a view of its
        // own.
        bool is_unseen = named_->moves_view && Deeper::depth() > 0;
        if (!is_unseen && may_settle_any()) {
            settle_written(named_, arguments);
        }
        fills += named_->fills_saved ? 1 : 0;
    }

    // Run an operator that no user's choice applies to.
    void run_unchosen(c10::DispatchKeySet keys, Stack *stack) const {
        if (named_->can_repeat && cursor.row != cursor.end) {
            std::size_t row = cursor.count(named_);
            if (row != cursor.end) {
                (void)capture({.captor = Captor::plan, .row = row}, keys, stack);
                return;
            }
        }
        if (named_->can_repeat && stands_anyone_by()) {
            (void)capture({.captor = Captor::standby}, keys, stack);
            return;
        }
        Deeper inside;
        named_->run(keys, stack);
    }

    // Run the operator, and mark its results.
    void run_marked(const Chosen &chosen, c10::DispatchKeySet keys, Stack *stack) const {
        std::vector<at::Tensor> viewed; // by the results
        if (named_->gives_view) {
            viewed = tensors_given(named_, *stack);
        }
        run_unchosen(keys, stack);
        WithPython python;
        mark_chosen(chosen, named_, viewed, *stack);
    }

    bool capture(Claim claim, c10::DispatchKeySet keys, Stack *stack) const {
        Capture capture(named_, claim, keys, *stack);
        if (claim.captor == Captor::region || claim.captor == Captor::user) {
            count_run(); // after packing the operands, which are events
        }
        {
            Deeper inside;
            named_->run(keys, stack);
        }
        return capture.end(*stack);
    }

    // Count a run in the plan's cursor that is captured for the user instead.
    void count_run() const {
        if (named_->can_repeat && cursor.row != cursor.end) {
            (void)cursor.count(named_);
        }
    }

    // Run the operator in a user's region.
    void run_inside(Region *region, c10::DispatchKeySet keys, Stack *stack) const {
        bool is_kept = region_keeps(region, named_);
        bool can_repeat = named_->can_repeat || region_refills(region, named_, *stack);
        std::vector<c10::StorageImpl *> changed = region_writes(region, named_, *stack);
        if (!is_kept && can_repeat && !is_in_backward()) {
            bool is_done = capture({.captor = Captor::region, .region = region}, keys, stack);
            if (!is_done || !named_->gives_written) {
                region_written(region, changed);
            }
            return;
        }
        count_run();
        {
            Deeper inside;
            named_->run(keys, stack);
        }
        region_written(region, changed);
        if (is_kept) {
            WithPython python;
            region_note_kept(region, tensors_made(named_, *stack));
        }
    }

    const Named *named_;
};

// ---- for Python ---------------------------------------------------------------------------------

class Silent : public c10::WarningHandler {
  public:
    void process(const c10::Warning &warning) override { (void)warning; }
};

// Guarded by the GIL. Never freed, like the kernels.
auto &names = *new std::deque<Named>;

bool returns_alias(const c10::OperatorHandle &op) {
    const auto &returned = op.schema().returns();
    return std::any_of(returned.begin(), returned.end(),
                       [](const c10::Argument &each) { return each.alias_info() != nullptr; });
}

bool read_places(PyObject *tuple, std::vector<std::size_t> *out) {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(tuple); at++) {
        out->push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, at)));
    }
    return PyErr_Occurred() == nullptr;
}

// name_operator(function, (name, overload), (can_repeat, may_be_random, fills_saved,
// gives_written, reads_written), (declared, undeclared, barred, flag, chance)): see the runs of an
// operator from now on, and return its number. Call it only once per operator.
PyObject *name_operator(PyObject *, PyObject *args) {
    PyObject *function, *declared, *undeclared, *barred;
    const char *name, *overload;
    int can_repeat, may_be_random, fills_saved, gives_written, reads_written;
    Py_ssize_t flag, chance;
    if (PyArg_ParseTuple(args, "O(ss)(ppppp)(O!O!O!nn):name_operator", &function, &name, &overload,
                         &can_repeat, &may_be_random, &fills_saved, &gives_written, &reads_written,
                         &PyTuple_Type, &declared, &PyTuple_Type, &undeclared, &PyTuple_Type,
                         &barred, &flag, &chance) == 0) {
        return nullptr;
    }
    auto &dispatcher = c10::Dispatcher::singleton();
    auto op = dispatcher.findSchema({name, overload});
    if (!op) {
        return PyErr_Format(PyExc_KeyError, "torch has no operator %s.%s", name, overload);
    }
    Named named = {.op = *op,
                   .function = Py_NewRef(function),
                   .arguments = op->schema().arguments().size(),
                   .former = std::nullopt,
                   .declared = {},
                   .undeclared = {},
                   .barred = {},
                   .flag = flag,
                   .chance = chance,
                   .can_repeat = can_repeat != 0,
                   .may_be_random = may_be_random != 0,
                   .fills_saved = fills_saved != 0,
                   .gives_view = PyTuple_GET_SIZE(declared) == 0 && returns_alias(*op),
                   .moves_view = op->hasTag(at::Tag::inplace_view),
                   .gives_written = gives_written != 0,
                   .reads_written = reads_written != 0};
    if (!read_places(declared, &named.declared) || !read_places(undeclared, &named.undeclared) ||
        !read_places(barred, &named.barred)) {
        return nullptr;
    }
    if (op->hasKernelForDispatchKey(c10::DispatchKey::BackendSelect)) {
        named.former.emplace(op->getComputedKernelForDispatchKey(c10::DispatchKey::BackendSelect));
    }
    const Named &kept = names.emplace_back(std::move(named));
    // Torch warns when a kernel replaces another one. Our kernel calls the former one.
    Silent silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    // Never unregistered: other threads may be inside a kernel.
    static auto &registered = *new std::deque<c10::RegistrationHandleRAII>;
    registered.push_back(dispatcher.registerImpl(
        {name, overload}, c10::DispatchKey::BackendSelect,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(&kept)), std::nullopt,
        nullptr, "swapkit: recomputed operators"));
    return PyLong_FromSize_t(names.size() - 1);
}

// fills_run(): return how many named operators this thread has run that write to tensors autograd
// has already saved, as rrelu does to its noise.
std::uint64_t fills_run() { return fills; }

// settle(tensors, is_over, only_chosen): settle the recipes that read or make the memory of these
// tensors. `only_chosen`: only recipes of users' choices for operators.
bool settle_tensors(const Items &tensors, bool is_over, bool only_chosen) {
    std::vector<c10::StorageImpl *> changed;
    for (PyObject *tensor : tensors) {
        c10::TensorImpl *impl = nullptr;
        if (!impl_of(tensor, &impl)) {
            return false;
        }
        if (impl->has_storage()) {
            changed.push_back(impl->unsafe_storage().unsafeGetStorageImpl());
        }
    }
    return settle_uncaptured(std::move(changed), is_over,
                             only_chosen ? Settled::chosen : Settled::all);
}

const Functions capture_functions{
    PyMethodDef{"name_operator", shielded<name_operator>, METH_VARARGS, nullptr},
    module_function<"settle", settle_tensors>(), module_function<"fills_run", fills_run>()};

} // namespace

int &Deeper::depth() {
    static thread_local int depth = 0;
    return depth;
}

void capture_from(const Follower *follower, const std::shared_ptr<const CaptureTable> &table,
                  std::uint64_t position) {
    SWAPKIT_ASSERT(has_python());
    if (table == nullptr || position + 1 >= table->first.size()) {
        cursor.stop();
        return;
    }
    cursor.row = table->first[position];
    cursor.end = table->first[position + 1];
    if (cursor.row == cursor.end) {
        return;
    }
    if (cursor.table != table) {
        cursor.table = table;
    }
    cursor.follower = follower;
    cursor.position = position;
    cursor.counts.clear();
}

std::shared_ptr<const CaptureTable> capture_table(const Bytes &bytes, std::size_t events) {
    struct Row {
        std::int64_t event, named, run, results, count;
    };
    auto table = std::make_shared<CaptureTable>();
    std::vector<Row> rows;
    if (!bytes.read_rows(&rows)) {
        return nullptr;
    }
    table->first.assign(events + 2, 0);
    std::int64_t latest = 0;
    for (const Row &row : rows) {
        bool is_sound = latest <= row.event && row.event <= static_cast<std::int64_t>(events) &&
                        0 <= row.named && row.named < static_cast<std::int64_t>(names.size());
        if (!is_sound) {
            PyErr_SetString(PyExc_ValueError, "a row names an unknown event or operator");
            return nullptr;
        }
        latest = row.event;
        table->first[static_cast<std::size_t>(row.event) + 1]++;
        table->rows.push_back({.named = &names[static_cast<std::size_t>(row.named)],
                               .run = static_cast<std::uint32_t>(row.run),
                               .results = static_cast<std::uint32_t>(row.results),
                               .count = static_cast<std::uint32_t>(row.count)});
    }
    for (std::size_t at = 1; at < table->first.size(); at++) {
        table->first[at] += table->first[at - 1];
    }
    return table;
}

bool settle_uncaptured(std::vector<c10::StorageImpl *> changed, bool is_over, Settled which) {
    std::erase_if(changed, [](const c10::StorageImpl *each) {
        return !may_settle_any() || !may_settle(each);
    });
    Deeper ours;
    return changed.empty() || settle(changed, is_over, which);
}

const Named *named_at(std::size_t number) {
    if (number < names.size()) {
        return &names[number];
    }
    if (PyErr_Occurred() == nullptr) {
        PyErr_SetString(PyExc_ValueError, "unknown operator number");
    }
    return nullptr;
}

std::size_t capture_count(const CaptureTable &table) { return table.rows.size(); }

} // namespace swapkit
