"""Builds the operator `gmm` for torch: `python setup.py build_ext --inplace`."""

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

import swapkit

is_cuda = torch.version.cuda is not None and CUDA_HOME is not None
make_extension = CUDAExtension if is_cuda else CppExtension

setup(
    name="gmm",
    ext_modules=[
        make_extension(
            "gmm",
            ["gmm.cpp", "grouped_matmul.cu" if is_cuda else "grouped_matmul.cpp"],
            # What SmartSwap's include, link and LD_LIBRARY_PATH lines are here:
            include_dirs=[swapkit.include_path(compat=True)],
            library_dirs=[swapkit.library_path()],
            libraries=["swapkit"],
            runtime_library_dirs=[swapkit.library_path()],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
