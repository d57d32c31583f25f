"""Kernels in C for x86 processors with AVX-512 VNNI, compiled on the machine that runs them, also for its AMX.

`library` compiles, caches and loads the C files of this folder as one shared library; each wrapper beside them takes
torch tensors and declares the functions that it calls. Where the library can't be had (`library.available`), nothing
here is used and torch computes everything.
"""
