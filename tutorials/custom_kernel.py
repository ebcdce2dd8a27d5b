"""
A kernel of your own in C++
===========================

swapkit sees every operator that torch runs. It does not see a kernel that a C++ function runs on
a tensor's memory. A few lines announce it: its operands are held while it runs, what it
overwrites is known, and reports call its memory by its name. The same lines work in a CUDA
source.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import swapkit

swapkit.install(device="cpu")

# %%
# The operator
# ------------
#
# ``swapkit.hpp`` is a header. The operator announces itself in its scope: which tensors it reads,
# and which it made. ``TORCH_LIBRARY`` makes it callable from Python; torch's dispatcher then also
# calls it under autocast, in ``torch.compile`` and so on. The gradient is an
# ``autograd.Function``.

SOURCE = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <swapkit.hpp>
#include <torch/library.h>

at::Tensor scale_and_square(const at::Tensor &x, double scale) {
    swapkit::Operator op("scale_and_square");
    op.reads(x);
    at::Tensor y = at::empty_like(x);
    const float *in = x.const_data_ptr<float>();
    float *out = y.mutable_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); i++) { // your kernel's launch
        out[i] = static_cast<float>(scale) * in[i] * in[i];
    }
    op.outputs(y);
    return y;
}

TORCH_LIBRARY(tutorial, library) { library.def("scale_and_square", &scale_and_square); }
"""

# %%
# Building
# --------
#
# ``python -m swapkit --cflags --libs`` prints the options of the compiler.
# ``torch.utils.cpp_extension`` and CMake work as well; examples/operators in the repository has a
# file for each.


def build(source, folder):
    """Compile the operator against the installed torch; return the library."""
    options = subprocess.run(
        [sys.executable, "-m", "swapkit", "--cflags", "--libs"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    from torch.utils.cpp_extension import include_paths, library_paths

    file, library = folder / "operator.cpp", folder / "operator.so"
    file.write_text(source)
    command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", str(file), "-o", str(library)]
    command += [f"-I{path}" for path in include_paths()] + options
    command += [f"-L{path}" for path in library_paths()] + ["-ltorch", "-ltorch_cpu", "-lc10"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    subprocess.run(command, check=True)
    return library


folder = Path(tempfile.mkdtemp())
torch.ops.load_library(build(SOURCE, folder))

# %%
# A function with a gradient
# --------------------------


class ScaleAndSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.ops.tutorial.scale_and_square(x, scale)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (2 * ctx.scale) * x, None


x = torch.randn(64, requires_grad=True)
y = ScaleAndSquare.apply(x, 3.0)
torch.testing.assert_close(y, 3 * x.square())
(gradient,) = torch.autograd.grad(y.sum(), x)
torch.testing.assert_close(gradient, 6 * x)

# %%
# Under a budget
# --------------
#
# The operator is one like any other now: what it saves is swapped, and what it makes counts under
# its name.


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)

    def forward(self, x):
        return self.linear(ScaleAndSquare.apply(torch.tanh(x), 0.5))


torch.manual_seed(0)
model = torch.nn.Sequential(*[Layer() for _ in range(12)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with swapkit.budget("20MiB", model, optimizer) as session:
    for _ in range(8):
        model(torch.randn(1024, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(session)
assert session.stats.peak_bytes <= session.stats.budget_bytes
assert session.stats.swapped_out_bytes > 0

# %%
# From Python
# -----------
#
# A kernel that Python calls (through ctypes, cffi, numpy or Triton) needs an announcement only if
# it overwrites a tensor in place:

data = torch.ones(1024)
with swapkit.op("halve", data) as op:
    data.numpy()[:] /= 2
    op.outputs(data)
print(data.sum())
