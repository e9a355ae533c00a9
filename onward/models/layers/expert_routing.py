"""Chooses the experts of each row by the expert router's scores, and sums their outputs: plain torch, on any device.

A row's result depends on that row alone. Equal scores go to the expert with the lowest index, and outputs are added in the
order of scores.
"""

from collections.abc import Iterator

import torch

from onward.proto.model import Experts

_SMALLEST_SUM = 1e-20
"""Keeps a sum of scores that are all zero from dividing by zero."""


def choose_experts(
    scores: torch.Tensor, experts: Experts, selection_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chosen experts (int64 [rows, top_k]), best first, and their weights, for scores [rows, experts]."""
    if experts.scores == "sigmoid":
        return _choose_by_sigmoid(scores.sigmoid(), experts, selection_bias)
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    chosen, best = ordered.indices[:, : experts.top_k], ordered.values[:, : experts.top_k]
    if experts.renormalize:
        return chosen, best.softmax(-1) * experts.weight_multiplier
    return chosen, scores.softmax(-1).gather(-1, chosen) * experts.weight_multiplier


def _choose_by_sigmoid(
    scores: torch.Tensor, experts: Experts, selection_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = scores if selection_bias is None else scores + selection_bias
    if experts.top_groups < experts.num_groups:
        ranks = _in_best_groups(ranks, experts)
    chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_k]
    weights = scores.gather(-1, chosen)
    if experts.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return chosen, weights * experts.weight_multiplier


def _in_best_groups(ranks: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Returns the ranks with -inf for all experts outside of the row's best groups."""
    by_group = ranks.view(len(ranks), experts.num_groups, -1)
    of_group = by_group.topk(2, dim=-1).values.sum(-1)
    best = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_groups]
    is_best = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, best, value=True)
    return by_group.masked_fill(~is_best[..., None], -torch.inf).view(ranks.shape)


def rows_by_expert(chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields each expert that some row has chosen, with its rows and its index among the chosen experts of each row."""
    experts, order = chosen.flatten().sort(stable=True)
    found, counts = experts.unique_consecutive(return_counts=True)
    for expert, assigned in zip(found.tolist(), order.split(counts.tolist()), strict=True):
        yield expert, assigned // chosen.shape[1], assigned % chosen.shape[1]


def sum_of_experts(outputs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum [rows, hidden] of outputs [rows, top_k, hidden], added one after the other."""
    total = outputs[:, 0] * shares[:, :1]
    for place in range(1, outputs.shape[1]):
        total = total + outputs[:, place] * shares[:, place : place + 1]
    return total
