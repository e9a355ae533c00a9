"""Onward: an LLM inference server with exact stream recovery.

Importing the package is cheap, because every process of an instance imports it. Only the worker may import torch.
"""

from typing import TYPE_CHECKING

from onward.version import __version__

if TYPE_CHECKING:
    from onward.llm import LLM, SamplingOptions

__all__ = ["LLM", "SamplingOptions", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("LLM", "SamplingOptions"):
        from onward import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'onward' has no attribute {name!r}")
