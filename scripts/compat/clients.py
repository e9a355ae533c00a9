"""The clients that `make compat` runs, with their pinned versions. The first package of each is the one in the table."""

from dataclasses import dataclass
from enum import Enum


class Runtime(Enum):
    PYTHON = "Python"
    NODE = "JavaScript"


@dataclass(frozen=True, slots=True)
class ClientChecks:
    """A check script of ours, run with the client's packages and nothing of Onward."""

    name: str
    runtime: Runtime
    packages: tuple[str, ...]
    """As `pip install` and `npm install` take them."""
    script: str
    """In `checks/`."""

    @property
    def version(self) -> str:
        """Name and version of the client's package."""
        return self.packages[0]


def _python(name: str, script: str, *packages: str) -> ClientChecks:
    return ClientChecks(name, Runtime.PYTHON, packages, script)


def _node(name: str, script: str, *packages: str) -> ClientChecks:
    return ClientChecks(name, Runtime.NODE, packages, script)


CLIENTS = (
    _python("openai-python", "openai_python.py", "openai==3.51.0"),
    _node("openai-js", "openai_js.mjs", "openai@7.55.0", "zod@4.6.7"),
    _python("anthropic-python", "anthropic_python.py", "anthropic==2.10.0"),
    _node("anthropic-js", "anthropic_js.mjs", "@anthropic-ai/sdk@1.10.0"),
    _node("vercel-ai", "vercel_ai.mjs", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    _python("langchain", "langchain_checks.py", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    _python(
        "llama-index",
        "llama_index_checks.py",
        "llama-index-llms-openai-like==0.8.1",
        "llama-index-embeddings-openai-like==0.4.0",
    ),
    _python("pydantic-ai", "pydantic_ai_checks.py", "pydantic-ai-slim[openai,anthropic]==2.68.0"),
    _python("openai-agents", "openai_agents_checks.py", "openai-agents==0.24.0"),
    _python("instructor", "instructor_checks.py", "instructor==1.17.0"),
    _python("dspy", "dspy_checks.py", "dspy[numpy]==3.4.1"),
    _python("outlines", "outlines_checks.py", "outlines==1.3.3", "openai==3.51.0"),
    _python("guidance", "guidance_checks.py", "guidance==0.3.1", "openai==3.51.0"),
    _python("haystack", "haystack_checks.py", "haystack-ai==3.4.0"),
    _python("semantic-kernel", "semantic_kernel_checks.py", "semantic-kernel==1.45.0"),
    _python("lm-eval", "lm_eval_checks.py", "lm-eval[api]==0.4.13", "transformers==5.23.0"),
)
BASE_CHECKS = frozenset({"plain", "streamed", "tools", "structured", "embeddings", "errors"})
"""Each client's script reports at least these."""
