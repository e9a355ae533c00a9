"""Scores of experts that are sigmoids: what an expert's output is weighted with, and the ranks by which it is chosen.

    score    1 / (1 + exp(-product)), from 0 to 1, of each expert alone
    rank     the score plus the expert's selection bias; the lowest number outside of the chosen groups

A group's rank is the sum of its two largest ranks. Of equal groups, those with the lowest index are chosen. With a softmax
the ranks are the products themselves, and nothing here runs.
"""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import inlined_kernel_function

LOWEST = -3.0e38
"""A rank that is no larger than any other, and finite."""


@inlined_kernel_function
def exp_of(x):
    return simd.max_lanes(simd.exp(simd.splat(x)))


@inlined_kernel_function
def sigmoid(x):
    """Returns the sigmoid of one number. NaN stays NaN."""
    return np.float32(1.0) / (np.float32(1.0) + exp_of(np.float32(0.0) - x)) + (x - x)


@inlined_kernel_function
def score_and_rank(c, row, selection_bias):
    """Replaces the row's products by scores, and writes the row's ranks."""
    scores, ranks, bias = simd.floats(c.scores), simd.floats(c.ranks), simd.floats(selection_bias)
    at = row * c.score_stride
    for expert in range(c.num_experts):
        score = sigmoid(scores[at + expert])
        scores[at + expert] = score
        if selection_bias != 0:
            score = score + bias[expert]
        ranks[at + expert] = score
    if c.top_groups < c.num_groups:
        _keep_best_groups(c, ranks, at)


@inlined_kernel_function
def _rank_of_group(ranks, first, size):
    best, second = np.float32(LOWEST), np.float32(LOWEST)
    for i in range(size):
        rank = ranks[first + i]
        if rank > best:
            best, second = rank, best
        elif rank > second:
            second = rank
    return best + second


@inlined_kernel_function
def _keep_best_groups(c, ranks, at):
    """Lowers the ranks of all experts outside of the row's best groups."""
    size = c.num_experts // c.num_groups
    last_rank, last = np.float32(np.inf), np.int64(-1)
    for _ in range(c.top_groups):
        best, best_rank = np.int64(-1), np.float32(-np.inf)
        for group in range(c.num_groups):
            rank = _rank_of_group(ranks, at + group * size, size)
            is_left = rank < last_rank or (rank == last_rank and group > last)
            if is_left and (best < 0 or rank > best_rank):
                best, best_rank = np.int64(group), rank
        last_rank, last = best_rank, best
    for group in range(c.num_groups):
        rank = _rank_of_group(ranks, at + group * size, size)
        if rank < last_rank or (rank == last_rank and group > last):
            for i in range(size):
                ranks[at + group * size + i] = np.float32(LOWEST)
