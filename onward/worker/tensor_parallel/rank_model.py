"""An int8 model at a rank other than 0: it computes parts of rank 0's forward passes. Knows neither requests nor tokens."""

from collections.abc import Mapping
from typing import Any

from onward.kernels.cpu.rank_threads import FollowingThreads
from onward.models.decoder import build_decoder
from onward.models.head_padding import pad_for_cpu
from onward.models.layers.int8_layers import Int8Model
from onward.models.layers.paged_kv import kv_dtype
from onward.proto.rank import StartRank
from onward.worker import kv_pool
from onward.worker.tensor_parallel.rank_group import BLOCK_TABLES_ARRAY, CONTROL_ARRAY
from onward.worker.tensor_parallel.shared_arrays import AttachedArrays


class RankModel:
    def __init__(self, start: StartRank, weights: Mapping[str, Any], arrays_fd: int, kv_memory_fd: int) -> None:
        """Takes over both file descriptors."""
        arrays = AttachedArrays(arrays_fd, start.arrays)
        threads = FollowingThreads(arrays.attach(CONTROL_ARRAY), start.rank, start.num_threads, start.num_ranks)
        model, weights = pad_for_cpu(start.model, weights)
        pool = kv_pool.allocate_kv_pool(
            model.config,
            kv_dtype(model.config, model.quantization),
            start.num_kv_blocks,
            start.config.block_size,
            memory_fd=kv_memory_fd,
        )
        decoder = build_decoder(
            model,
            weights,
            pool.kv,
            max_model_len=start.max_model_len,
            max_rows=start.max_rows,
            max_sampled=start.max_sampled,
            threads=threads,
            shared=arrays,
        )
        assert isinstance(decoder, Int8Model), "only int8 models run on several ranks"
        self._decoder, self._block_tables = decoder, arrays.attach(BLOCK_TABLES_ARRAY)

    def follow(self) -> None:
        """Takes part in rank 0's forward passes until rank 0 stops them."""
        self._decoder.follow(self._block_tables)
