"""The native engine: a whole forward pass is one call into C++ (ADR 6).

Each C++ file holds one noun: types, simd, gemm, rows, attention (compiled once per instruction set through table.h),
plan, pack, shared_weights, thread_pool, step, api. Python compiles them (build.py) and calls them (library.py).
"""
