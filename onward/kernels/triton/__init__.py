"""Kernels for CUDA devices, written in Triton. Nothing here is imported unless the worker runs on such a device.

Each has a slow float64 twin in `kernels.torch_reference`. They know tensors, not models, requests or steps.
"""
