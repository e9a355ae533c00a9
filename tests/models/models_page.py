"""The tables of docs/models.md, made from what the tests serve.

python -m tests.models.models_page      writes them anew
"""

import re
from pathlib import Path

from onward.models.device_support import IMPLEMENTED, needed_fields
from onward.models.families.registry import BY_ARCHITECTURE
from tests.models import family_models

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
NAMES = {
    "llama": "Llama 1 to 3, SmolLM2, TinyLlama", "mistral": "Mistral 7B, Mistral Nemo", "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3 (dense)", "granite": "Granite 3", "smollm3": "SmolLM3", "gemma": "Gemma 1", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)", "phi3": "Phi-3, Phi-3.5, Phi-4", "olmo2": "OLMo 2", "gpt2": "GPT-2",
    "gptneox": "GPT-NeoX, Pythia", "mixtral": "Mixtral", "qwen2moe": "Qwen1.5-MoE, Qwen2-MoE", "qwen3moe": "Qwen3-MoE",
    "gptoss": "gpt-oss", "glm4moe": "GLM-4.5, GLM-4.5-Air",
}  # fmt: skip
DEVICES = {
    "cpu float": "CPU: float32, bfloat16, float16", "cpu int8": "CPU: int8", "cuda": "CUDA: bfloat16",
}  # fmt: skip


def cases_of(architecture: str) -> list[str]:
    return [name for name in family_models.CASES if family_models.make(name).config.architecture == architecture]


def missing_fields(architecture: str, kind: str) -> list[str]:
    """What models of this family may need and the device does not have."""
    configs = [family_models.make(name).config for name in cases_of(architecture)]
    return sorted({field for config in configs for field in needed_fields(config)} - IMPLEMENTED[kind])


def int8_error_percent(architecture: str) -> float:
    """The largest of the family's cases."""
    return 100 * max(family_models.int8_error(family_models.make(name)) for name in cases_of(architecture))


def families_table() -> str:
    lines = [f"| models | `architectures` | {' | '.join(DEVICES.values())} |", "|---|---|" + "---|" * len(DEVICES)]
    for architecture, family in BY_ARCHITECTURE.items():
        cells = []
        for kind in DEVICES:
            missing = missing_fields(architecture, kind)
            cells.append("yes" if not missing else "without " + ", ".join(f"`{field}`" for field in missing))
        lines.append(f"| {NAMES[architecture]} | `{family.hf_name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_table() -> str:
    lines = ["| family | int8: mean error of a logit, as a share of the spread of logits |", "|---|---|"]
    lines += [f"| {architecture} | {int8_error_percent(architecture):.0f} % |" for architecture in BY_ARCHITECTURE]
    return "\n".join(lines)


TABLES = {"families": families_table, "accuracy": accuracy_table}


def tables_in(text: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- table: (\w+) -->\n(.*?)\n<!-- end -->", text, re.DOTALL))


def main() -> None:
    text = PAGE.read_text()
    for name, make in TABLES.items():
        table = f"<!-- table: {name} -->\n{make()}\n<!-- end -->"
        text = re.sub(rf"<!-- table: {name} -->\n.*?<!-- end -->", lambda _, t=table: t, text, flags=re.DOTALL)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
