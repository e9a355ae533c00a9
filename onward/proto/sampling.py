"""How the next token of a request is chosen. A function of this and of the tokens so far, and of nothing else."""

import msgspec


class Sampling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seed: int
    """Fixed by the outermost layer before the first attempt, so that every attempt draws the same noise."""
    choice: int = 0
    """Which of a request's `n` answers this is. Noise is keyed by (seed, choice, position)."""
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    """Length of the whole output, tokens of earlier attempts included. None: what model and pool allow."""
    min_tokens: int = 0
    """No end token can be sampled before this position."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end the output: the model's eos (unless `ignore_eos`) and the request's `stop_token_ids`."""
