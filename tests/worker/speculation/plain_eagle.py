"""EAGLE's draft layer as its paper has it, in plain float32 torch: every pair from the beginning, no KV, no blocks."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

from onward.models.loader.eagle_head import expected
from onward.proto.model import ModelConfig


def random_head(config: ModelConfig, *, bias: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """As trained ones are: without a norm before attention. That counts for much, so that wrong KV is heard."""
    random = np.random.default_rng(seed)
    shapes = {n: shape for n, shape in expected(config).items() if n != "layers.0.input_layernorm.weight"}
    tensors = {name: 0.1 * random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name in tensors:
        if "self_attn" in name:
            tensors[name] *= 3
    tensors["layers.0.post_attention_layernorm.weight"] += 1
    if not bias:
        del tensors["fc.bias"]
    return tensors


def write_head(folder: Path, config: ModelConfig, tensors: Mapping[str, np.ndarray], num_layers: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": num_layers,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "max_position_embeddings": config.max_position_embeddings,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": config.rope_theta,
            }
        )
    )
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def likeliest(logits: np.ndarray, depth: int) -> int:
    return int(logits.argmax())


class PlainEagle:
    """`embedding` and `head` are the served model's, float32 [vocabulary, hidden_size]."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, np.ndarray], embedding: np.ndarray, head: np.ndarray
    ) -> None:
        self._config = config
        self._weights = {name: torch.from_numpy(array) for name, array in tensors.items()}
        self._embedding, self._head = torch.from_numpy(embedding), torch.from_numpy(head)

    def drafts(
        self,
        tokens: Sequence[int],
        hidden: np.ndarray,
        count: int,
        draw: Callable[[np.ndarray, int], int] = likeliest,
    ) -> list[int]:
        """What follows `tokens`. `hidden` are the served model's, of all of them but the last; `draw` is given the logits,
        and how many drafts come before."""
        drafted: list[int] = []
        known = torch.from_numpy(hidden)
        for _ in range(count):
            made = self._layer(torch.tensor([*tokens, *drafted])[1:], known)
            known = torch.cat([known, made[-1:]])
            drafted.append(draw((self._head @ made[-1]).numpy(), len(drafted)))
        return drafted

    def _layer(self, following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        w = {name.removeprefix("layers.0."): tensor for name, tensor in self._weights.items()}
        x = F.linear(torch.cat([self._embedding[following], hidden], dim=1), w["fc.weight"], w.get("fc.bias"))
        x = x + F.linear(self._attention(x, w), w["self_attn.o_proj.weight"])
        normed = F.rms_norm(x, x.shape[1:], w["post_attention_layernorm.weight"], self._config.rms_norm_eps)
        inner = F.silu(F.linear(normed, w["mlp.gate_proj.weight"])) * F.linear(normed, w["mlp.up_proj.weight"])
        return x + F.linear(inner, w["mlp.down_proj.weight"])

    def _attention(self, x: torch.Tensor, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
        config, count = self._config, len(x)

        def heads(name: str) -> torch.Tensor:
            return F.linear(x, w[f"self_attn.{name}_proj.weight"]).view(count, -1, config.head_dim).transpose(0, 1)

        q, k, v = self._turned(heads("q")), self._turned(heads("k")), heads("v")
        shared = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(shared, dim=0), v.repeat_interleave(shared, dim=0)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return attended.transpose(0, 1).reshape(count, -1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rope by the position of the pair, which is that of its hidden state."""
        half = self._config.head_dim // 2
        frequencies = self._config.rope_theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)
