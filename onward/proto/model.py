"""Facts about the model that every process needs, without opening its weights.

A prepared model is a folder with a `manifest.json` (one `PreparedModel`), written once by `models.loader.model_store`.
The api processes read the tokenizer and the template named there, and the worker maps the weights; no process parses
the original files again.
"""

from typing import Literal

import msgspec

from onward.proto.field_types import Count, Factor, ModelParameter, UnitInterval, WallSecond


class LinearRope(msgspec.Struct, frozen=True, tag="linear"):
    """Every frequency is divided by `factor`."""

    factor: ModelParameter


class DynamicRope(msgspec.Struct, frozen=True, tag="dynamic"):
    """A larger theta beyond the original length (NTK). Which one follows from `max_model_len`."""

    factor: ModelParameter
    original_max_position_embeddings: Count


class Llama3Rope(msgspec.Struct, frozen=True, tag="llama3"):
    """Low frequencies are stretched, high ones kept, with a ramp between."""

    factor: ModelParameter
    low_freq_factor: ModelParameter
    high_freq_factor: ModelParameter
    original_max_position_embeddings: Count


class YarnRope(msgspec.Struct, frozen=True, tag="yarn"):
    """A ramp over the dimensions between two numbers of turns; cosines and sines are multiplied with a factor."""

    factor: ModelParameter
    original_max_position_embeddings: Count
    beta_fast: ModelParameter
    beta_slow: ModelParameter
    attention_factor: ModelParameter
    truncate: bool
    """Whether the ends of the ramp are whole dimensions."""


class LongRope(msgspec.Struct, frozen=True, tag="longrope"):
    """A divisor per frequency; the long list applies if `max_model_len` exceeds the original length."""

    short_factor: tuple[ModelParameter, ...]
    long_factor: tuple[ModelParameter, ...]
    original_max_position_embeddings: Count
    attention_factor: ModelParameter


RopeScaling = LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope


class LayerKind(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties in which the layers of one model differ."""

    window: Count | None = None
    """Positions that a token attends to, its own included; None: all before it."""
    rope: Literal["global", "local", "none"] = "global"
    """`global`: `ModelConfig.rope_theta` and `rope_scaling`; `local`: those of the same names with `local_`."""
    is_dense: bool = False
    """An MLP, where other layers of the model have experts."""


class Experts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A mixture of experts: MLPs of which a router chooses some for each token. Their outputs are added, each times its
    weight."""

    num_experts: Count
    top_k: Count
    """How many each token gets: those of the largest scores, and of equal scores the ones with the lowest index."""
    intermediate_size: Count
    """Intermediate size of each expert; `ModelConfig.intermediate_size` is that of dense layers."""
    renormalize: bool = False
    """The weights of the chosen experts add up to one: a softmax of their scores. Else the softmax is over all scores."""
    router_bias: bool = False
    shared_intermediate_size: Count | None = None
    """The size of one expert more, which every token gets."""
    shared_is_gated: bool = True
    """The output of the shared expert is multiplied by the sigmoid of a product of its own (Qwen2-MoE)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How scores become weights. `sigmoid`: each score alone; `renormalize` then divides by the sum of the chosen ones."""
    selection_bias: bool = False
    """With sigmoids: a bias of each expert, added when experts are chosen, and not in their weights."""
    num_groups: Count = 1
    """With sigmoids: experts are in so many groups of equal size, one after the other."""
    top_groups: Count = 1
    """How many groups each token chooses from: those with the largest sum of their two best experts."""
    weight_multiplier: ModelParameter = 1.0
    """Factor of the weights of the chosen experts. The shared expert does not have it."""


class ClampedSwiglu(msgspec.Struct, frozen=True):
    """(clamp(up, -limit, limit) + 1) * gate * sigmoid(alpha * gate), with a gate of at most `limit` (gpt-oss)."""

    alpha: ModelParameter
    limit: ModelParameter


class ModelConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Configuration of a decoder. The families differ only in these values.

    Each default is the value of a Llama. A device refuses fields that it does not implement (`models.device_support`).
    """

    architecture: str
    """Names the family: how its checkpoints spell the tensors (`models.families`). Decides nothing else."""
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    max_position_embeddings: Count
    """The longest context that can be served."""
    rms_norm_eps: ModelParameter
    """Epsilon of every norm, whatever its kind."""
    rope_theta: ModelParameter
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    """A norm of q and k before rope: over each head, or see `qk_norm_is_whole`."""
    qk_norm_is_whole: bool = False
    """The norm of q and k is over all heads together, with a weight for each of their values (OLMo2)."""
    o_bias: bool = False
    mlp_bias: bool = False
    """Applies to every matrix of the MLP, and of every expert."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of the norms of the residual stream and of sublayers' outputs. Norms of q and k are always `rms`."""
    norm_bias: bool = False
    norm_weight_offset: ModelParameter = 0.0
    """Added to the weights of all norms, those of q and k included (Gemma: 1)."""
    pre_norm: bool = True
    """A norm before attention and before the MLP."""
    post_norm: bool = False
    """A norm of what attention and the MLP give, before it is added to the residual stream."""
    parallel_block: bool = False
    """Attention and MLP read the same residual stream, and both are added to it."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_mlp: bool = True
    """activation(gate) * up; else activation(up), and there is no gate."""
    clamped_swiglu: ClampedSwiglu | None = None
    """In the place of activation(gate) * up."""
    experts: Experts | None = None
    """In the place of the MLP, in all layers but the dense ones."""
    query_scale: ModelParameter | None = None
    """Factor of the attention scores; None: 1 / sqrt(head_dim)."""
    rotary_dim: Count | None = None
    """The first dimensions of a head that are rotated; None: all."""
    local_rope_theta: ModelParameter | None = None
    local_rope_scaling: RopeScaling | None = None
    layers: tuple[LayerKind, ...] = ()
    """An entry for each layer; empty: all are `LayerKind()`."""
    attention_softcap: ModelParameter | None = None
    """Scores s become cap * tanh(s / cap)."""
    attention_sinks: bool = False
    """Each head has a score that takes part in the softmax and has no value (gpt-oss)."""
    learned_positions: bool = False
    """A vector for each position is added to the embedding, and nothing is rotated (GPT-2)."""
    embedding_multiplier: ModelParameter = 1.0
    residual_multiplier: ModelParameter = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logits_multiplier: ModelParameter = 1.0
    """Comes before `logit_softcap`."""
    logit_softcap: ModelParameter | None = None
    unpadded_head_dim: Count | None = None
    """Where `head_dim` was rounded up for a kernel, what it was before; the values behind are zeros."""

    def layer(self, index: int) -> LayerKind:
        return self.layers[index] if self.layers else LayerKind()

    def layer_experts(self, index: int) -> Experts | None:
        """Returns the experts of a layer; None if the layer is dense."""
        return None if self.layer(index).is_dense else self.experts

    def mlp_size(self, index: int) -> int | None:
        """Returns the intermediate size of a layer's MLP, or of its shared expert; None if it has neither."""
        experts = self.layer_experts(index)
        return self.intermediate_size if experts is None else experts.shared_intermediate_size

    @property
    def attention_window(self) -> int | None:
        """No layer sees more positions than this; None where some layer sees all."""
        windows = [kind.window for kind in self.layers]
        return None if not windows or None in windows else max(window for window in windows if window is not None)

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a head that rope rotates."""
        return self.rotary_dim or self.true_head_dim

    @property
    def true_head_dim(self) -> int:
        """The head's size without padding."""
        return self.unpadded_head_dim or self.head_dim

    @property
    def attention_scale(self) -> float:
        return self.true_head_dim**-0.5 if self.query_scale is None else self.query_scale


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Defaults for requests without these fields. None: no default."""

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
    weight_formats: tuple[str, ...] = ()
    """For int8: how the matrices are stored (`kernels.weight_formats`), the format with the most bytes first."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use."""
    is_converted: bool = False
    """The files were written by the converter. Their tensors have canonical names, or those of the int8 arrays; in a
    checkpoint that is used as it is they have the family's names."""
    is_deterministic: bool = False
    """On CUDA: a token's bits depend on its history alone, not on its batch nor on how the history was cut into chunks."""

    @property
    def precision(self) -> str:
        """In words: the type, or the quantization and the formats of the weights."""
        if self.quantization == "none":
            return self.dtype
        own = [name for name in self.weight_formats if name != self.quantization]
        return f"{self.quantization}, weights in {', '.join(self.weight_formats)}" if own else self.quantization

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
