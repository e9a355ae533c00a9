"""`onward up`: a whole cluster on this machine in one command.

`cli.cluster_plan` makes command lines for `onward serve` and `onward router`, and `supervisor.local_cluster` runs them;
these commands know nothing of it.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onward import log
from onward.cli import cluster_scaling_flags, flag_groups, ray_flags, up_on_ray
from onward.cli.api_keys import check_demo, check_exposure, key_source_from_config
from onward.cli.cluster_plan import (
    AddedInstances,
    FrontendKeys,
    InstanceCounts,
    ServedModel,
    check_instance_counts,
    instance_plan,
    plan,
    plan_router,
    port_holder,
    reserve_ports,
)
from onward.cli.flags import add_flags, add_grouped_flags, format_flags, from_args
from onward.cli.progress import ProgressDisplay
from onward.cli.ray_plan import RayPlan
from onward.cli.ready_message import READY_LINE_PREFIX, print_next_commands
from onward.cli.router import check as check_router
from onward.cli.serve import check, check_model_given, prepare_model
from onward.clock import SystemClock
from onward.config import RouterConfig, ServeConfig
from onward.errors import StartupError
from onward.obs.tables import print_table
from onward.proto.model import PreparedModel
from onward.router.model_routing import Routes, parse_routes
from onward.supervisor.cluster_key import key_in_memory, new_key
from onward.supervisor.local_cluster import LocalCluster
from onward.supervisor.registration_config import http_url, loopback_for

FLAGS_SET_PER_INSTANCE = (
    "role",
    "port",
    "adopt",
    "handoff_port",
    "prefill_peers",
    "cluster_key_file",
    "router",
    "instance_name",
    "instance_generation",
    "node_name",
    "advertise_url",
    "record",
    "record_tokens",
    "step_log",
    "api_key",
    "api_key_file",
    "api_keys",
    "insecure",
    "open_metrics",
    "tls_cert",
    "tls_key",
)
"""Flags that differ from instance to instance, flags that name a file that only one instance could write, and flags of
the process that clients connect to."""
ROUTER_ONLY_FLAGS = (
    "policy",
    "prefill_policy",
    "decode_policy",
    "route",
    "preempt_retry_count",
    "preempt_retry_exclude_decode",
    "retry_budget",
    "restart_grace_s",
    "request_timeout_s",
    "report_resumes",
)
FRONTEND_SECRETS = ("api_key", "api_key_file")
"""The processes that clients connect to get these from their environment, because every user of the machine can read
command lines."""
FRONTEND_FLAGS = ("api_keys", "insecure", "open_metrics")
"""Flags for the router or, without one, for the instances that take requests."""
SHARED_FLAGS = (
    "detach_ttl_s",
    "drain_s",
    "cors_origin",
    "allowed_host",
    "demo",
    "strict_fields",
    "max_body_bytes",
    "max_connections",
    "default_max_tokens",
    "log_level",
    "log_format",
    "otlp_endpoint",
    "trace_sample_ratio",
    "trace_url",
)
BATCH_FLAGS = ("batch_dir", "batch_max_bytes", "batch_concurrency", "batch_ttl_s")
"""Flags for the router, which runs batches over all instances; without a router the instances share the folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        nargs="*",
        metavar="MODEL",
        help="the same as --model, or NAME=MODEL to serve MODEL as NAME; several models get the instances below each",
    )
    parser.add_argument("--prefill", type=int, metavar="P", help="prefill instances [1; 0 if only --mixed is given]")
    parser.add_argument("--decode", type=int, metavar="D", help="decode instances [1; 0 if only --mixed is given]")
    parser.add_argument("--mixed", type=int, metavar="M", help="instances that do both [0]")
    parser.add_argument(
        "--router",
        action=argparse.BooleanOptionalAction,
        default=True,
        dest="with_router",
        help="start a router, which receives all requests and moves streams between instances [on]",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port of the router, or without one of the first instance [8000]",
    )
    cluster_scaling_flags.add_arguments(parser)
    ray_flags.add_arguments(parser)
    parser.usage = "onward up [MODEL | NAME=MODEL …] [flags]"
    add_grouped_flags(parser, ServeConfig, flag_groups.SERVE, skip=FLAGS_SET_PER_INSTANCE)
    for title, names in (
        ("keys and access", (*FRONTEND_SECRETS, *FRONTEND_FLAGS)),
        ("options of the router", ROUTER_ONLY_FLAGS),
    ):
        skipped = tuple(f.name for f in fields(RouterConfig) if f.name not in names)
        add_flags(parser.add_argument_group(title), RouterConfig, skip=skipped)


def run(args: argparse.Namespace) -> int:
    model_configs = model_configs_from_args(args)
    config, num_models = model_configs[0], len(model_configs)
    counts = counts_of(args.prefill, args.decode, args.mixed, config.device).times(num_models)
    check(replace(config, port=args.port))
    check_kv_ports(config.kv_port, counts)
    check_model_given(args)
    check_router_flags(args)
    ray_flags.check(args)
    frontend_keys = frontend_keys_from_args(args, config.host)
    log.configure("cluster", config.log_level, config.log_format)
    with ProgressDisplay(Console(stderr=True)) as progress:
        models = [prepare_model(model_config, progress) for model_config in model_configs]
    check_model_ids([model.name for model in models], parse_routes(args.route or ()))
    limits = cluster_scaling_flags.limits_from_args(args, counts, num_models)
    served = [
        ServedModel(model.name, tuple(model_flags(model_config)) if args.model_argument else ())
        for model, model_config in zip(models, model_configs, strict=True)
    ]
    if args.ray is not None:
        cluster = RayPlan(counts, instance_flags(args), router_flags(args), frontend_keys, served, limits)
        up_on_ray.run(ray_flags.options_from_args(args), config, args.port, cluster, models, member_line)
        return 0
    with port_holder() as holder, key_in_memory(new_key()) as key_fd:
        ports = reserve_ports(
            holder, counts, config.host, args.port, with_router=args.with_router, first_kv=config.kv_port
        )
        cores = len(os.sched_getaffinity(0))
        num_instances = cluster_scaling_flags.max_instances(counts, limits, num_models)
        threads = config.threads or threads_each(cores, num_instances * config.tensor_parallel)
        key_file, flags = f"/dev/fd/{key_fd}", instance_flags(args)
        plans = plan(counts, flags, config.host, threads, ports, key_file, frontend_keys, served)
        if ports.router is not None:
            plans.insert(0, plan_router(router_flags(args), config.host, ports.router, key_file, frontend_keys))
        print(threads_line(num_instances, config.tensor_parallel, threads, cores), file=sys.stderr)
        instances = instance_plan(flags, config.host, threads, ports, key_file, frontend_keys)
        scaling = (
            None
            if ports.router is None
            else cluster_scaling_flags.ScalingFactory(
                served, limits, counts, config.device, http_url(loopback_for(config.host), ports.router), key_file
            )
        )
        cluster = LocalCluster(
            plans,
            SystemClock(),
            inherit_fds=(key_fd,),
            ready_prefix=READY_LINE_PREFIX,
            control_port=args.port or None,
            planner=AddedInstances(instances, holder, {model.name: model for model in served}),
            new_scaling=scaling,
            drain_s=config.drain_s,
            on_line=lambda name, line: print(member_line(name, line), file=sys.stderr, flush=True),
            on_ready=lambda cluster: print_cluster(
                Console(highlight=False),
                cluster,
                models,
                key_fd,
                needs_key=frontend_keys.has_keys,
            ),
        )
        cluster.run()
    return 0


def member_line(name: str, line: str) -> str:
    """Returns a line of one process group as the cluster prints it. A line of JSON stays JSON and gets another key."""
    if line.startswith('{"'):
        return f'{{"instance": {json.dumps(name)}, {line[1:]}'
    return f"{name:<9} | {line}"


def frontend_keys_from_args(args: argparse.Namespace, host: str) -> FrontendKeys:
    given = {
        name: getattr(args, name) for name in (*FRONTEND_SECRETS, *FRONTEND_FLAGS) if getattr(args, name) is not None
    }
    config = RouterConfig(host=host, cluster_key_file="ours", **given)
    source = key_source_from_config(config)
    keys = source.read()
    check_exposure(config, keys)
    check_demo(replace(config, demo=bool(args.demo)), keys)
    if len(source.plain) > 1:
        raise StartupError("a cluster takes one --api-key; put several into a file for --api-keys")
    return FrontendKeys(tuple(format_flags(args, FRONTEND_FLAGS)), next(iter(source.plain), ""), has_keys=len(keys) > 0)


def check_router_flags(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in ROUTER_ONLY_FLAGS if getattr(args, name) is not None}
    if given and not args.with_router:
        raise StartupError(f"--{next(iter(given)).replace('_', '-')} is for a router, and --no-router leaves it out")
    check_router(RouterConfig(**given))


def counts_of(prefill: int | None, decode: int | None, mixed: int | None, device: str = "cpu") -> InstanceCounts:
    """Returns the number of instances by role. The default is one prefill and one decode instance, or none of them if
    only mixed instances are requested. Instances on CUDA cannot exchange KV, so they are all mixed."""
    if device == "cuda":
        if prefill or decode:
            raise StartupError("instances with --device cuda cannot exchange KV: ask for --mixed ones")
        prefill, decode, mixed = 0, 0, 1 if mixed is None else mixed
    default_count = 0 if mixed and prefill is None and decode is None else 1
    counts = InstanceCounts(
        prefill=default_count if prefill is None else prefill,
        decode=default_count if decode is None else decode,
        mixed=mixed or 0,
    )
    check_instance_counts(counts, device)
    return counts


def model_configs_from_args(args: argparse.Namespace) -> list[ServeConfig]:
    """Returns a config for each model to serve."""
    config: ServeConfig = from_args(args, ServeConfig)
    given = [_split_model(argument) for argument in args.model_argument]
    if not given:
        return [config]
    if args.model is not None:
        raise StartupError(f"--model {args.model} and MODEL {args.model_argument[0]} are given: give one of the two")
    if len(given) > 1:
        for name in ("served_model_name", "model_alias"):
            if getattr(args, name):
                raise StartupError(f"--{name.replace('_', '-')} cannot name several models: write NAME=MODEL for each")
        if not args.with_router:
            raise StartupError(f"{len(given)} models need a router, and --no-router leaves it out")
    return [
        replace(config, model=model, served_model_name=(name,) if name else config.served_model_name)
        for name, model in given
    ]


def _split_model(argument: str) -> tuple[str, str]:
    """Splits `NAME=MODEL` into its parts; without a name the first is empty. An equals sign after a slash belongs to a
    path."""
    name, equals, model = argument.partition("=")
    if not equals or "/" in name:
        return "", argument
    if not name or not model:
        raise StartupError(f"MODEL {argument!r} is neither a model nor NAME=MODEL")
    return name, model


def check_model_ids(model_ids: Sequence[str], routes: Routes) -> None:
    """Checks that model ids are unique, and that routes use no others. `model_ids` are the first names of the models to
    serve."""
    for model_id in model_ids:
        if model_ids.count(model_id) > 1:
            raise StartupError(f"two models would be called {model_id!r}: write NAME=MODEL for each")
    for name, shares in routes.items():
        for version in shares:
            if version not in model_ids:
                shown = ", ".join(map(repr, model_ids))
                raise StartupError(
                    f"--route for {name!r}: {version!r} is not one of the models that are served: {shown}"
                )


def model_flags(config: ServeConfig) -> list[str]:
    """Returns the flags of the instances of one model."""
    names = ["--served-model-name", *config.served_model_name] if config.served_model_name else []
    return ["--model", config.model, *names]


def check_kv_ports(first: int, counts: InstanceCounts) -> None:
    last = first + max(0, counts.decode - 1)
    if first < 0 or (first and last > 65535):
        raise StartupError(f"--kv-port {first}: {counts.decode} decode instances need the ports up to {last}")


def threads_line(instances: int, ranks: int, threads: int, cores: int) -> str:
    if ranks == 1:
        return f"{instances} instances with --threads {threads} each, on {cores} cores"
    return f"{instances} instances of {ranks} ranks, each rank with --threads {threads}, on {cores} cores"


def threads_each(cores: int, workers: int) -> int:
    return max(1, cores // workers)


def instance_flags(args: argparse.Namespace) -> list[str]:
    """Returns the given flags of `onward serve` that every instance gets."""
    own = ("model", "served_model_name") if args.model_argument else ()
    batch_flags = BATCH_FLAGS if args.with_router else ()
    skipped = (*FLAGS_SET_PER_INSTANCE, *own, *batch_flags, "host", "threads", "kv_port")
    return format_flags(args, tuple(field.name for field in fields(ServeConfig) if field.name not in skipped))


def router_flags(args: argparse.Namespace) -> list[str]:
    return format_flags(args, (*ROUTER_ONLY_FLAGS, *SHARED_FLAGS, *BATCH_FLAGS))


def print_cluster(
    console: Console, cluster: LocalCluster, models: Sequence[PreparedModel], key_fd: int, *, needs_key: bool
) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("process", *(("model",) if len(models) > 1 else ()), "url", "handoff address", "threads", "pid"):
        table.add_column(title, no_wrap=True, style="bold cyan" if title == "url" else None)
    for instance in cluster.members:
        assert instance.process is not None, "all are ready"
        spec = instance.spec
        threads = str(spec.threads) if spec.threads is not None else ""
        shown_model = (spec.model,) if len(models) > 1 else ()
        pid = str(instance.process.pid)
        table.add_row(spec.name, *shown_model, spec.url, spec.handoff_address or "", threads, pid)
    names = ", ".join(model.name for model in models)
    console.print(Text.assemble("\n  Onward serves ", (names, "bold"), " with a cluster\n"))
    print_table(console, table)
    frontend_url = next(instance.spec.url for instance in cluster.members if instance.spec.role != "prefill")
    print_next_commands(console, models[0], frontend_url, key_fd, needs_key=needs_key)
