"""Describes the KV memory of a server, so that another one can decide whether it may use it. Does no I/O."""

from onward.config import ServeConfig
from onward.engine.scheduling.persisted_block_hashes import TABLE_FORMAT
from onward.models.fingerprint import KERNEL_VERSION, KV_LAYOUT_VERSION
from onward.proto.adoption import MemoryFormat
from onward.proto.model import DynamicRope, LongRope, PreparedModel

COMPARED_FIELDS = MemoryFormat.__struct_fields__


def memory_format(config: ServeConfig, model: PreparedModel, num_kv_blocks: int | None) -> MemoryFormat:
    """Returns the memory format of a server. `num_kv_blocks`: None if the flags do not set it."""
    shape = model.config
    layout = [
        f"version {KV_LAYOUT_VERSION}",
        f"{shape.num_layers} layers of {shape.num_kv_heads} heads of {shape.head_dim}",
        f"{model.dtype}, {model.quantization}",
    ]
    if any(isinstance(scaling, DynamicRope | LongRope) for scaling in (shape.rope_scaling, shape.local_rope_scaling)):
        # Keys depend on the longest context that is served.
        layout.append(f"--max-model-len {config.max_model_len}")
    return MemoryFormat(
        device=config.device,
        model_fingerprint=model.fingerprint,
        kernel_version=KERNEL_VERSION,
        kv_layout=", ".join(layout),
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks or 0,
        hash_table_format=TABLE_FORMAT,
    )


def format_differences(old: MemoryFormat, new: MemoryFormat) -> list[str]:
    """Returns one line for each field that differs; empty if the new server may use the old one's memory. If the flags of
    the new server do not set the number of blocks, any number fits."""
    differences: list[str] = []
    for name in COMPARED_FIELDS:
        there, here = getattr(old, name), getattr(new, name)
        if there != here and not (name == "num_kv_blocks" and here == 0):
            differences.append(f"{name} is {there} there and {here} here")
    return differences


def is_length_unknown(config: ServeConfig, model: PreparedModel) -> bool:
    """Returns whether keys depend on the longest context and the flags do not set it. Formats cannot be compared
    then."""
    scalings = (model.config.rope_scaling, model.config.local_rope_scaling)
    return config.max_model_len is None and any(isinstance(scaling, DynamicRope | LongRope) for scaling in scalings)
