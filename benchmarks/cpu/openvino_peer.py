"""The peer of `make bench-cpu`: OpenVINO GenAI, offline, in a process and a virtual environment of its own.

Loads the GGUF file once, then answers one JSON line for each JSON line it reads, and sleeps in between. Knows nothing of
Onward; its interpreter has `openvino-genai` and no more.

    <- {"ready": true, "load_s": 3.9, "version": "2026.4.1"}
    -> {"prompts": [[1, 2, 3], …], "max_tokens": 128}
    <- {"outputs": [[4, 5, 6], …], "seconds": 3.4}
"""

import json
import sys
import time
from typing import Any, TextIO

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]


def load(gguf: str) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_seqs = 64
    # Its default of 256 lets many prompts wait; with 1024 it is up to a third faster at 32 streams.
    scheduler.max_num_batched_tokens = 1024
    # Every prompt is new, so a cache could only cost.
    scheduler.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU")


def generate(pipeline: genai.ContinuousBatchingPipeline, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    inputs = [ov.Tensor(np.array([token_ids], dtype=np.int64)) for token_ids in prompts]
    started_s = time.perf_counter()
    results = pipeline.generate(inputs, [config] * len(inputs))
    seconds = time.perf_counter() - started_s
    return {"outputs": [result.m_generation_ids[0] for result in results], "seconds": seconds}


def answer(line: str, pipeline: genai.ContinuousBatchingPipeline) -> dict[str, Any]:
    order = json.loads(line)
    return generate(pipeline, order["prompts"], order["max_tokens"])


def main(gguf: str, orders: TextIO, answers: TextIO) -> None:
    started_s = time.perf_counter()
    pipeline = load(gguf)
    load_s = time.perf_counter() - started_s
    print(json.dumps({"ready": True, "load_s": load_s, "version": genai.__version__}), file=answers, flush=True)
    for line in orders:
        print(json.dumps(answer(line, pipeline)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin, sys.stdout)
