"""All families. Parses a `config.json` by its family, and finds a checkpoint's tensors by the family's names."""

from collections.abc import Collection, Mapping
from typing import Any

from onward.errors import StartupError
from onward.models.checkpoint_quantization import CheckpointScheme, parse_scheme
from onward.models.families import gemma, glm_moe, gpt2, gpt_oss, llama, mixtral, olmo2, phi3, qwen_moe
from onward.models.families.config_fields import ConfigFields, unsupported
from onward.models.families.family import Family, Locate, TensorSource
from onward.models.tensor_names import EMBED, LM_HEAD, expected_tensors
from onward.proto.model import ModelConfig

_ALL = [*llama.FAMILIES, *gemma.FAMILIES, *phi3.FAMILIES, *olmo2.FAMILIES, *gpt2.FAMILIES]
_ALL += [*mixtral.FAMILIES, *qwen_moe.FAMILIES, *gpt_oss.FAMILIES, *glm_moe.FAMILIES]
BY_HF_NAME = {family.hf_name: family for family in _ALL}
BY_ARCHITECTURE = {family.architecture: family for family in _ALL}

_CANONICAL_LAYERS = "model.layers."
_IGNORED_EVERYWHERE = (".rotary_emb.inv_freq",)
"""Older checkpoints store this tensor, which follows from the config."""


def parse_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Parses a `config.json`. Raises `StartupError` at the first field that is missing, wrong or not supported. The
    caller checks sizes."""
    family = _find_family(raw)
    fields = ConfigFields(raw)
    scheme = find_scheme(raw)
    if scheme is not None and family.quantization_methods:  # its experts are not stored one by one
        read = ", ".join(family.quantization_methods)
        raise unsupported(
            f"quantization_config ({scheme.name}) of the architecture {family.architecture}; it has {read}"
        )
    fields.ignore("quantization_config")
    values = family.parse(fields)
    fields.refuse_unread(family.architecture)
    return ModelConfig(architecture=family.architecture, **values)


def find_scheme(raw: Mapping[str, Any]) -> CheckpointScheme | None:
    """Returns how weights are stored; None if they are floats, or if the family's layouts read them. Raises
    `StartupError` if the scheme is not supported."""
    return None if _is_read_by_family(raw) else parse_scheme(raw)


def has_quantized_weights(raw: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` says that weights are stored quantized. Raises `StartupError` if they are stored in
    a way that is not supported."""
    return _is_read_by_family(raw) or parse_scheme(raw) is not None


def _is_read_by_family(raw: Mapping[str, Any]) -> bool:
    method = ConfigFields(raw).section("quantization_config").get("quant_method")
    return method in _find_family(raw).quantization_methods


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
    """Returns the source of each canonical tensor in a checkpoint that stores tensors of these names."""
    family = BY_ARCHITECTURE[config.architecture]
    with_embedding = (p for p in family.prefixes if _source(family, p, family.locate, EMBED, (), config).name in stored)
    prefix = next(with_embedding, family.prefixes[0])

    def find(name: str, shape: tuple[int, ...]) -> TensorSource:
        layouts = (family.locate, *family.other_layouts)
        sources = [_source(family, prefix, locate, name, shape, config) for locate in layouts]
        return next((source for source in sources if source.name in stored), sources[0])

    return {name: find(name, shape) for name, shape in expected_tensors(config).items()}


def _source(
    family: Family, prefix: str, locate: Locate, name: str, shape: tuple[int, ...], config: ModelConfig
) -> TensorSource:
    layer, rest = "", name
    if name.startswith(_CANONICAL_LAYERS):
        number, _, rest = name.removeprefix(_CANONICAL_LAYERS).partition(".")
        layer = f"{family.layer_prefix}{number}."
    source = locate(rest, shape, config)
    before = layer if name == LM_HEAD else prefix + layer
    others = tuple((before + other, other_shape) for other, other_shape in source.others)
    return source._replace(name=before + source.name, others=others)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Returns whether a stored tensor is not needed. For example, a tied head is a copy of the embedding."""
    family = BY_ARCHITECTURE[config.architecture]
    if config.tie_word_embeddings:
        heads = [prefix + family.locate(LM_HEAD, (), config).name for prefix in ("", *family.prefixes)]
        if name in heads:
            return True
    if family.has_draft_layers and name.startswith(f"{family.layer_prefix}{config.num_layers}."):
        return True
    return name.startswith(family.unserved) or name.endswith(_IGNORED_EVERYWHERE + family.ignored)
