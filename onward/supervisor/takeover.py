"""Decides what a new server takes over from the old one that it replaces (`onward serve --adopt`)."""

import logging

from onward import log
from onward.config import ServeConfig
from onward.proto.model import PreparedModel
from onward.supervisor.memory_format import format_differences, is_length_unknown, memory_format
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.predecessor import OfferedMemory, Predecessor

logger = logging.getLogger(__name__)


def adoptable_memory(
    predecessor: Predecessor | None, config: ServeConfig, model: PreparedModel
) -> OfferedMemory | None:
    """Returns the old server's memory, which the caller must close. Returns None if the new server has to begin with
    empty memory; the log has the reason."""
    if predecessor is None:
        return None
    reason = _why_not(predecessor.memory, config, model)
    if reason is not None:
        logger.warning(log.event("old server's memory is not adopted", why=reason))
        return None
    return predecessor.take_memory()


def needs_port_of_predecessor(predecessor: Predecessor | None, config: ServeConfig, pd: PdConfig) -> bool:
    """Returns whether the new worker opens a fixed port that the old worker may still have open."""
    return predecessor is not None and config.kv_port != 0 and pd.kv_backend not in (None, "shm")


def _why_not(memory: OfferedMemory | None, config: ServeConfig, model: PreparedModel) -> str | None:
    if memory is None:
        return "it keeps none that can be passed on"
    if config.record is not None:
        return "a recording begins with empty memory"
    if is_length_unknown(config, model):
        return "keys depend on --max-model-len, which is not given"
    return (
        "; ".join(format_differences(memory.offer.format, memory_format(config, model, config.num_kv_blocks))) or None
    )
