// links.hpp - functions that the shim calls but does not link: those of the native core and of
// the hooks, and Python's.
#ifndef SWAPKIT_LINKS_HPP
#define SWAPKIT_LINKS_HPP

#include "python/python.hpp"

extern "C" {
#include "swapkit_entry.h"
#include "swapkit_hooks.h"
#include "swapkit_sched.h"
}

namespace swapkit {

#define SWAPKIT_CORE(X)                                                                            \
    X(sk_group_create)                                                                             \
    X(sk_group_destroy)                                                                            \
    X(sk_group_label)                                                                              \
    X(sk_group_state_at)                                                                           \
    X(sk_group_borrow)                                                                             \
    X(sk_group_copy_out)                                                                           \
    X(sk_group_has_copy)                                                                           \
    X(sk_group_finish_out)                                                                         \
    X(sk_group_evict)                                                                              \
    X(sk_group_unevict)                                                                            \
    X(sk_group_copy_in)                                                                            \
    X(sk_group_finish_in)                                                                          \
    X(sk_entry_alloc)                                                                              \
    X(sk_entry_free)                                                                               \
    X(sk_entry_use)                                                                                \
    X(sk_entry_unuse)                                                                              \
    X(sk_entry_pool)                                                                               \
    X(sk_entry_trim)                                                                               \
    X(sk_entry_segment_at)                                                                         \
    X(sk_entry_is_out_of_memory)                                                                   \
    X(sk_entry_error)                                                                              \
    X(sk_error_text)                                                                               \
    X(sk_pool_note)                                                                                \
    X(sk_pool_has_room)                                                                            \
    X(sk_pool_stats_get)                                                                           \
    X(sk_pool_stats_reset_peak)                                                                    \
    X(sk_pool_owns)                                                                                \
    X(sk_tag_set)                                                                                  \
    X(sk_tentative_set)

// Of libswapkit.so.
#define SWAPKIT_HOOKS(X)                                                                           \
    X(sk_op_enter)                                                                                 \
    X(sk_op_operand)                                                                               \
    X(sk_op_output)                                                                                \
    X(sk_op_leave)                                                                                 \
    X(sk_op_connect)                                                                               \
    X(sk_op_sweep)

#define SWAPKIT_PYTHON(X)                                                                          \
    X(tensor)             /* torch.Tensor */                                                       \
    X(out_of_memory)      /* torch.OutOfMemoryError */                                             \
    X(is_capturing)       /* (type) -> whether this thread's stream there records a graph */       \
    X(parameter)          /* torch.nn.Parameter */                                                 \
    X(wrap_storage)       /* (address) -> torch.UntypedStorage */                                  \
    X(error_of)           /* (status) -> the exception that it stands for */                       \
    X(note_failure)       /* (exception) -> whether a signal handler raised it; it is noted */     \
    X(note_interruption)  /* (exception, is foreign) -> True: the main thread raises it; None: */  \
                          /* this one, by its class; False: it is a failure */                     \
    X(interruptions)      /* list: what signal handlers raised where nothing may be raised */      \
    X(raise_interruption) /* () -> None; raises the first of them */                               \
    X(refuse_modified)    /* (handle): raises SavedTensorModified */                               \
    X(call_of_module)     /* the code in which torch asks for hooks of modules, */                 \
    X(call_around)        /* and that of who calls it */                                           \
    X(hide)               /* (function, ...): calls it where no mode sees what it does */          \
    X(no_function_modes)  /* torch's guards: context managers that run no Python, */               \
    X(no_dispatch_modes)                                                                           \
    X(no_transforms)                                                                               \
    X(note_settings)  /* () -> the settings that decide which bits an operator makes */            \
    X(random_state)   /* (function, device) -> the generators' state */                            \
    X(has_moved)      /* (state) -> whether numbers were drawn since */                            \
    X(again)          /* (settings or state) -> a context manager: they hold again */              \
    X(repeat)         /* (function, operands, run) -> None; calls `run`, which gives results */    \
    X(pass_retains)   /* (mover) -> None; when the pass ends: mover.forget_retained() */           \
    X(refuse_operand) /* (handle, function): raises SavedTensorModified */                         \
    X(refuse_emptied) /* (handle, function): likewise */                                           \
    X(compare_digest) /* (digest, function, tensor): likewise, RecomputeMismatch */                \
    X(refuse_overwritten) /* (function): likewise */                                               \
    X(refuse_mismatch)    /* (function, tensor): raises RecomputeMismatch */

struct Links {
#define SWAPKIT_MEMBER(name) decltype(&::name) name;
    SWAPKIT_CORE(SWAPKIT_MEMBER)
    SWAPKIT_HOOKS(SWAPKIT_MEMBER)
#undef SWAPKIT_MEMBER
#define SWAPKIT_MEMBER(name) PyObject *name;
    SWAPKIT_PYTHON(SWAPKIT_MEMBER)
#undef SWAPKIT_MEMBER
};

extern Links links;

// Raise the error of a failed call of the core; false: the call did not fail. Call this right after
// the failed call: the error text is the thread's latest.
bool raises(sk_status status);
// Raise an exception that a signal handler raised where none may be raised; false: one is set.
bool raise_interruption();

} // namespace swapkit

#endif
