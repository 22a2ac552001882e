"""A whole forward pass as one call into C++: the decision is ADR 6, this is the code.

C++ is one noun a file: types, simd, gemm, rows, attention (compiled once per instruction set through table.h), plan,
pack, team, step, api. Python builds it (build.py) and calls it (library.py).
"""
