"""Summary of a start in a few lines: model, kernels, memory, limits, keys and addresses. Prints nothing itself."""

from onward.config import ServeConfig
from onward.proto.model import PreparedModel
from onward.proto.step import WorkerHello
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.registration_config import RegistrationConfig


def summary(
    config: ServeConfig,
    model: PreparedModel,
    worker: WorkerHello,
    url: str,
    pd: PdConfig,
    routers: RegistrationConfig,
    *,
    num_keys: int,
) -> list[tuple[str, str]]:
    """Returns titles and their texts."""
    return [
        ("model", f"{model.name}: {model.config.architecture}, {model.config.num_layers} layers, {model.precision}"),
        *([("chat", disabled)] if (disabled := chat_disabled(model)) else []),
        ("compute", f"{config.device}, {worker.kernels}" + (f", {worker.threads} threads" if worker.threads else "")),
        ("context", f"{worker.max_model_len:,} tokens"),
        ("KV pool", pool(config, worker)),
        ("limits", limits(config)),
        ("keys", keys(config, num_keys)),
        ("addresses", ", ".join(addresses(url, pd, routers))),
    ]


def chat_disabled(model: PreparedModel) -> str | None:
    """Returns why requests with messages get a 400, or None if they do not."""
    if model.tokenizer is None:
        return "disabled, and so is text: the model has no tokenizer; requests must send token ids"
    if not model.chat_template:
        return "disabled: the model has no chat template; --chat-template FILE gives it one"
    return None


def pool(config: ServeConfig, worker: WorkerHello) -> str:
    tokens = worker.num_blocks * worker.block_size
    num_full_context = worker.num_blocks // -(-worker.max_model_len // worker.block_size)
    tokens_per_request = min(worker.max_model_len, worker.num_blocks // config.max_num_seqs * worker.block_size)
    capacity = (
        f"{_requests(num_full_context)} of {worker.max_model_len:,} tokens"
        if num_full_context
        else f"none of {worker.max_model_len:,} tokens"
    )
    if num_full_context < config.max_num_seqs and tokens_per_request:
        capacity += f", or {_requests(config.max_num_seqs)} of {tokens_per_request:,}"
    return f"{worker.num_blocks:,} blocks of {worker.block_size} = {tokens:,} tokens: {capacity}"


def pool_warning(worker: WorkerHello) -> str | None:
    """Returns a warning if the KV pool is smaller than the context. Requests that only the context would allow are then
    refused."""
    tokens = worker.num_blocks * worker.block_size
    if tokens >= worker.max_model_len:
        return None
    needed = -(-worker.max_model_len // worker.block_size)
    return (
        f"the KV pool holds {tokens:,} tokens, less than the context of {worker.max_model_len:,}: longer requests are "
        f"refused; --num-kv-blocks {needed} holds one, and --max-model-len {tokens} says what fits"
    )


def threads_warning(config: ServeConfig, worker: WorkerHello, cores: int) -> str | None:
    """Returns a warning if the ranks have more threads than this process may use cores: they then wait for each other."""
    if config.tensor_parallel == 1 or worker.threads <= cores:
        return None
    each = worker.threads // config.tensor_parallel
    fitting = f"--threads {cores // config.tensor_parallel}" if config.tensor_parallel <= cores else "fewer ranks"
    return (
        f"--tensor-parallel {config.tensor_parallel} with --threads {each}: {worker.threads} threads wait for each other "
        f"on {cores} cores; start with {fitting}"
    )


def limits(config: ServeConfig) -> str:
    return (
        f"{config.max_num_seqs:,} running and {config.max_queue:,} waiting requests, "
        f"{config.max_num_batched_tokens:,} tokens per step, {config.max_queue_tokens:,} waiting prompt tokens, "
        f"{config.max_connections:,} connections, bodies of {config.max_body_bytes >> 10:,} KiB"
    )


def keys(config: ServeConfig, num_keys: int) -> str:
    if not num_keys:
        return "none: every client that can connect has full access"
    metrics = "; /metrics is open" if config.open_metrics else ""
    return f"{num_keys}, from {config.api_keys}{metrics}" if config.api_keys else f"{num_keys}{metrics}"


def addresses(url: str, pd: PdConfig, routers: RegistrationConfig) -> list[str]:
    lines = [url]
    if pd.handoff_address is not None:
        lines.append(f"handoffs at {pd.handoff_address}")
    if routers.router_urls:
        lines.append(f"registered as {routers.own_url}")
    return lines


def _requests(count: int) -> str:
    return f"{count:,} request" + ("s" if count != 1 else "")
