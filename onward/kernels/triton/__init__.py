"""Kernels for CUDA devices, written in Triton. Nothing here is imported unless the worker runs on such a device.

Each has a slow float64 reference in `kernels.torch_reference`. Kernels are independent of models, requests and steps.
"""
