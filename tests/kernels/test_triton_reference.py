"""The GPU kernels' float64 references and host-side tables, which need no GPU: they agree with the CPU's."""

import numpy as np
import pytest
import torch

from onward.kernels import numpy_reference as cpu_reference
from onward.kernels import torch_reference
from onward.kernels.cpu.threads import ThreadPool
from onward.kernels.triton.chunk_tiles import chunk_tiles
from onward.proto.sampling_params import SamplingParams
from onward.worker.sampler import Sampler, SamplingRow


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_attention_agrees_with_the_cpus() -> None:
    q, keys, values = normal(5, 6, 8), normal(12, 2, 8), normal(12, 2, 8)
    found = torch_reference.attention(*(torch.from_numpy(x) for x in (q, keys, values)), 7)
    np.testing.assert_allclose(found.numpy(), cpu_reference.attention(q, keys, values, 7), atol=1e-6)


def test_a_history_is_gathered_from_its_pages_in_order() -> None:
    kv = torch.arange(4 * 2 * 3 * 2 * 4).view(4, 2, 3, 2, 4)  # 4 blocks of 2 positions, 3 heads of 4
    keys, values = torch_reference.history(kv, torch.tensor([3, 1]), 3)
    assert keys.shape == (3, 3, 4)
    assert torch.equal(keys[2], kv[1, 0, :, 0])
    assert torch.equal(values[1], kv[3, 1, :, 1])


def test_norm_rotation_and_gate_agree_with_the_cpus() -> None:
    x, weight, cos, sin = normal(5, 6, 8), normal(8), normal(5, 4), normal(4, 5).reshape(5, 4)
    tx = torch.from_numpy(x)
    found = torch_reference.rms_norm(tx, torch.from_numpy(weight), 1e-5)
    np.testing.assert_allclose(found.numpy(), cpu_reference.rms_norm(x, weight, 1e-5), atol=1e-6)
    found = torch_reference.rotate(tx, torch.from_numpy(cos), torch.from_numpy(sin))
    np.testing.assert_allclose(found.numpy(), cpu_reference.rotate(x, cos, sin), atol=1e-6)
    gate, up = np.split(x, 2, axis=-1)
    np.testing.assert_allclose(
        torch_reference.silu_and_mul(tx).numpy(), cpu_reference.silu_and_mul(gate, up), atol=1e-6
    )


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (9, 0.8, 0.1)])
def test_the_cpus_sampler_draws_what_the_reference_says(top_k: int, top_p: float, min_p: float) -> None:
    """The rule that device sampling is checked against is the rule that the CPU follows."""
    logits = 2 * normal(1, 300)
    sampler = Sampler(300, 1, ThreadPool(1))
    for position in range(20):
        seed = 2**63 + 977 * position
        sampling = SamplingParams(seed=seed, choice_index=2, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
        token = sampler.sample(logits.copy(), [SamplingRow(sampling, position)])[0]
        weights = torch_reference.filtered_weights(torch.from_numpy(logits[0]), 0.8, top_k, top_p, min_p)
        ends = weights.cumsum(0) / weights.sum()
        assert token == int(torch.searchsorted(ends, torch_reference.uniform(seed, 2, position), right=True))


def test_chunk_tiles_cover_every_row_once_and_begin_with_the_longest_history() -> None:
    chunks = [(4, 0, 70), (1, 500, 1), (0, 33, 64), (2, 0, 1)]
    tiles = chunk_tiles(chunks, group=4, rows=128)
    covered = np.concatenate([np.arange(first, first + count) for first, count, _, _ in tiles])
    assert sorted(covered.tolist()) == list(range(70 + 1 + 64 + 1))
    assert tiles[:, 1].max() == 128 // 4
    assert (np.diff(tiles[:, 3]) <= 0).all()
    assert tiles[0].tolist() == [70, 1, 1, 500]
    assert [64, 6, 4, 64] in tiles.tolist()
