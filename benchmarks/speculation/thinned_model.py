"""Writes a copy of a model with layers left out, as a checkpoint folder that `--speculative draft:` takes.

    python -m benchmarks.speculation.thinned_model smollm2-135m-instruct thirds --keep-every 3
    python -m benchmarks.speculation.thinned_model smollm2-135m-instruct most --drop-every 10
    onward serve --speculative draft:most:4

The copy is in floats; it is quantized when it is loaded, like any folder that drafts.
"""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onward.config import cache_dir
from onward.models.families.registry import BY_ARCHITECTURE
from onward.models.loader.model_sources import OpenedWeights
from onward.models.loader.model_store import resolve_source
from onward.models.loader.weight_conversion import write_weights
from onward.models.thinned import ThinnedTensors, all_but_every_nth, every_nth, thinned_config
from onward.proto.model import Llama3Rope, ModelConfig


def write_thinned(
    model: str, folder: Path, choose: Callable[[int], Sequence[int]], *, dtype: str = "float32"
) -> ModelConfig:
    """`choose` names the layers to keep, from how many there are. Weights that lie on a grid of 4 bits stay on it in
    float32, and only there."""
    opened = resolve_source(model, with_weights=True, cache_dir=cache_dir(), progress=_silent).open()
    kept = choose(opened.config.num_layers)
    config = thinned_config(opened.config, kept)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_hf_config(config), indent=1))
    opened.write_tokenizer(folder)
    tensors = ThinnedTensors(opened.open_weights().tensors, kept)
    weights = OpenedWeights(tensors, {}, model)
    write_weights(folder, config, weights, quantization="none", dtype=dtype, progress=_silent)
    return config


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        assert isinstance(scaling, Llama3Rope), "only Llamas are thinned"
        rope |= {field: getattr(scaling, field) for field in scaling.__struct_fields__} | {"rope_type": "llama3"}
    return {
        "architectures": [BY_ARCHITECTURE[config.architecture].hf_name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _silent(message: str, fraction: float | None) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation.thinned_model")
    parser.add_argument("model", help="as `onward serve` takes it")
    parser.add_argument("folder", type=Path)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep-every", type=_several, metavar="N", help="one layer of N is kept")
    which.add_argument("--drop-every", type=_several, metavar="N", help="one layer of N is left out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="[%(default)s]")
    args = parser.parse_args()
    choose = functools.partial(all_but_every_nth, n=args.drop_every)
    if args.keep_every:
        choose = functools.partial(every_nth, n=args.keep_every)
    config = write_thinned(args.model, args.folder, choose, dtype=args.dtype)
    print(f"{args.folder}: {config.num_layers} layers")


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 2 on")
    return int(text)


if __name__ == "__main__":
    main()
