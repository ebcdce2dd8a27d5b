// backward.cpp - whether a thread runs a backward pass, for the pool.

// As torch/csrc/autograd/graph_task.h declares it, which takes long to compile.
namespace torch::autograd {
int get_current_graph_task_id(); // NOLINT(readability-identifier-naming)
} // namespace torch::autograd

extern "C" {

// The pool's callback (`sk_backward_fn`): whether autograd's engine runs on this thread. True on
// the engine's own threads, too, and in what runs again in backward. Any thread; it reads a
// variable of the thread, so the pool may hold its lock.
bool swapkit_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

} // extern "C"
