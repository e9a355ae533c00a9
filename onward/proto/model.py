"""What every process must know about the model, without opening its weights.

A prepared model is a folder with a `manifest.json` (one `PreparedModel`), written once by `models.loader.model_store`. The
api reads the tokenizer and the template named there, the worker maps the weights, and nobody parses the original files
again.
"""

import msgspec

from onward.proto.field_types import Count, Factor, ModelParameter, UnitInterval, WallSecond


class RopeScaling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Llama-3 kind: low frequencies are stretched, high ones kept, with a ramp between."""

    factor: ModelParameter
    low_freq_factor: ModelParameter
    high_freq_factor: ModelParameter
    original_max_position_embeddings: Count


class ModelConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """One dense decoder; the families differ only in these values."""

    architecture: str
    """`llama`, `qwen2` or `qwen3`."""
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    max_position_embeddings: Count
    rms_norm_eps: ModelParameter
    rope_theta: ModelParameter
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    """Qwen2."""
    qk_norm: bool = False
    """Qwen3: RMSNorm over each head of q and k, before rope."""


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """For requests that do not say. None: nobody has."""

    temperature: Factor | None = None
    top_p: UnitInterval | None = None
    top_k: Count | None = None
    min_p: UnitInterval | None = None
    repetition_penalty: Factor | None = None


class PreparedModel(msgspec.Struct, frozen=True):
    name: str
    """The id that clients use."""
    folder: str
    config: ModelConfig
    dtype: str
    """`float32`, `bfloat16` or `float16`: what is not quantized."""
    quantization: str
    """`int8`, `fp8` (made while the weights are loaded) or `none`."""
    fingerprint: str
    weights: list[str]
    """safetensors files, relative to the folder (or absolute, where the checkpoint is used as it is). Empty: dummy."""
    tokenizer: str | None
    """`tokenizer.json`; None for a model that is spoken to in token ids only."""
    chat_template: str | None
    """The template's text."""
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[Count]
    created_s: WallSecond = 0
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    is_deterministic: bool = False
    """On CUDA: a token's bits depend on its history alone, not on its batch nor on how the history was cut into chunks."""

    @property
    def is_exact(self) -> bool:
        """Whether the same seed gives the same tokens, whatever else is in the batch: so a stream that is computed again
        after a preemption, a crash or a resume continues with the tokens that it would have had."""
        return self.quantization == "int8" or self.is_deterministic

    @property
    def resume_guarantee(self) -> str:
        if self.is_exact:
            return "resumed streams are bit-exact: they continue with the tokens that an undisturbed stream has"
        return "resumed streams keep the tokens that were sent; later ones may differ from an undisturbed stream's"


class TokenizerFiles(msgspec.Struct, frozen=True):
    """All that decides which token ids a text or a chat becomes."""

    tokenizer: str | None
    """The contents of `tokenizer.json`."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
