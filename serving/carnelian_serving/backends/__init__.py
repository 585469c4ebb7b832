"""Triton backends written in Python, for a tritonserver that has no C++ ones."""
