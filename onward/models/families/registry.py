"""All families, and a checkpoint's tensors as one of them names them."""

from collections.abc import Collection, Mapping
from typing import Any

from onward.errors import StartupError
from onward.models.families import gemma, gpt2, llama, olmo2, phi3
from onward.models.families.config_fields import ConfigFields, unsupported
from onward.models.families.family import Family, TensorSource
from onward.models.tensor_names import EMBED, LM_HEAD, expected_tensors
from onward.proto.model import ModelConfig

_ALL = [*llama.FAMILIES, *gemma.FAMILIES, *phi3.FAMILIES, *olmo2.FAMILIES, *gpt2.FAMILIES]
BY_HF_NAME = {family.hf_name: family for family in _ALL}
BY_ARCHITECTURE = {family.architecture: family for family in _ALL}

_CANONICAL_LAYERS = "model.layers."
_IGNORED_EVERYWHERE = (".rotary_emb.inv_freq",)
"""Older checkpoints store what follows from the config."""


def parse_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Raises at the first field that is missing, wrong, or not computed here. Sizes are checked by the caller."""
    family = _find_family(raw)
    fields = ConfigFields(raw)
    if raw.get("quantization_config"):
        method = fields.section("quantization_config").get("quant_method")
        raise unsupported(f"quantization_config (method {method or 'unknown'})")
    values = family.parse(fields)
    fields.refuse_unread(family.architecture)
    return ModelConfig(architecture=family.architecture, **values)


def _find_family(raw: Mapping[str, Any]) -> Family:
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise StartupError("config.json: `architectures` must be a list")
    for name in names:
        if isinstance(name, str) and name in BY_HF_NAME:
            return BY_HF_NAME[name]
    given = ", ".join(map(str, names)) or f"none (model_type {raw.get('model_type')!r})"
    raise StartupError(
        f"the model's architecture is not supported: {given[:200]}; supported are {', '.join(BY_HF_NAME)}"
    )


def tensor_sources(config: ModelConfig, stored: Collection[str]) -> dict[str, TensorSource]:
    """Where each canonical tensor is in a checkpoint that stores tensors of these names."""
    family = BY_ARCHITECTURE[config.architecture]
    prefix = next((p for p in family.prefixes if _source(family, p, EMBED, (), config).name in stored), None)
    prefix = family.prefixes[0] if prefix is None else prefix
    return {
        name: _source(family, prefix, name, shape, config) for name, shape in expected_tensors(config).items()
    }  # fmt: skip


def _source(family: Family, prefix: str, name: str, shape: tuple[int, ...], config: ModelConfig) -> TensorSource:
    layer, rest = "", name
    if name.startswith(_CANONICAL_LAYERS):
        number, _, rest = name.removeprefix(_CANONICAL_LAYERS).partition(".")
        layer = f"{family.layer_prefix}{number}."
    source = family.locate(rest, shape, config)
    before = "" if name == LM_HEAD else prefix
    return source._replace(name=f"{before}{layer}{source.name}")


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a stored tensor says nothing that counts: a tied head is its embedding again."""
    family = BY_ARCHITECTURE[config.architecture]
    if config.tie_word_embeddings:
        heads = [prefix + family.locate(LM_HEAD, (), config).name for prefix in ("", *family.prefixes)]
        if name in heads:
            return True
    return name.startswith(family.unserved) or name.endswith(_IGNORED_EVERYWHERE + family.ignored)
