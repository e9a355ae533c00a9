"""The model shapes of the anchors. Weights are random: only their sizes matter here."""

from dataclasses import dataclass

from benchmarks.gpu.paged_case import QWEN3_0_6B, QWEN3_8B, Heads


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    num_layers: int
    heads: Heads
    mlp: int
    vocab: int = 151_936

    @property
    def weight_bytes(self) -> int:
        """What one step reads: all layers and the head, in bfloat16."""
        layer = self.hidden * (self.heads.qkv_width + self.heads.num_heads * self.heads.dim + 3 * self.mlp)
        return 2 * (self.num_layers * layer + self.hidden * self.vocab)

    @property
    def kv_bytes_per_token(self) -> int:
        return 4 * self.num_layers * self.heads.num_kv_heads * self.heads.dim


SHAPES = {
    "0.6b": Shape("0.6b", 1024, 28, QWEN3_0_6B, 3072),
    "8b": Shape("8b", 4096, 36, QWEN3_8B, 12_288),
}
