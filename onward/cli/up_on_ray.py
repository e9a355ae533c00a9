"""`onward up --ray`: the cluster of `onward up` on the nodes of a Ray cluster."""

import secrets
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onward.cli.cluster_plan import port_holder
from onward.cli.cluster_scaling_flags import ScalingFactory, max_instances
from onward.cli.ray_flags import LOCAL, RayOptions
from onward.cli.ray_plan import RayInstances, RayPlan
from onward.cli.ready_message import READY_LINE_PREFIX, print_next_commands
from onward.clock import SystemClock
from onward.config import ServeConfig, set_ray_variables
from onward.errors import StartupError
from onward.obs.tables import print_table
from onward.proto.model import PreparedModel
from onward.supervisor.cluster_key import key_in_memory, new_key
from onward.supervisor.registration_config import WILDCARDS, http_url, loopback_for
from onward.transport.addresses import is_loopback


def run(
    options: RayOptions,
    config: ServeConfig,
    port: int,
    plan: RayPlan,
    models: Sequence[PreparedModel],
    member_line: Callable[[str, str], str],
) -> None:
    # Ray reads its variables when it is imported. A new cluster admits only processes that have its token.
    set_ray_variables(token=secrets.token_hex(32) if options.address == LOCAL else None)
    from onward.ray.ray_cluster import RayCluster
    from onward.ray.ray_member import MemberResources, MemberStart
    from onward.ray.session import driver_node, nodes_elsewhere, num_cpus, ray_session

    key = new_key()
    with ray_session(options.address, options.node_timeout_s), port_holder() as holder, key_in_memory(key) as key_fd:
        if is_loopback(config.host) and (others := nodes_elsewhere()):
            raise StartupError(
                f"Ray's nodes on other machines ({', '.join(others)}) cannot reach --host {config.host}: give --host "
                "0.0.0.0 and --api-keys FILE"
            )
        node = driver_node()
        port = holder.hold(config.host, port)
        num_instances = max_instances(plan.counts, plan.limits, len(plan.models))
        threads = config.threads or max(1, num_cpus() // (num_instances * config.tensor_parallel))
        is_on_loopback = is_loopback(config.host)
        router_host = node.address if config.host in WILDCARDS else config.host
        api_key = "" if is_on_loopback else secrets.token_hex(32)
        instances = RayInstances(plan, http_url(router_host, port), threads, api_key)
        local_url = http_url(loopback_for(config.host), port)
        ranks = config.tensor_parallel
        start = MemberStart(
            cluster_key=key,
            ready_prefix=READY_LINE_PREFIX,
            host=config.host if is_on_loopback else "",
            resources=MemberResources(
                float(threads * ranks), options.gpus_per_rank * ranks, node.address if is_on_loopback else ""
            ),
            driver_node_id=node.node_id,
        )
        cluster = RayCluster(
            [plan.router(config.host, port), *instances.at_start()],
            SystemClock(),
            start,
            drain_s=config.drain_s,
            plan_member=instances.added,
            on_line=lambda name, line: print(member_line(name, line), file=sys.stderr, flush=True),
            on_ready=lambda cluster: print_cluster(
                Console(highlight=False),
                [(member.spec.name, member.spec.model, member.node) for member in cluster.members],
                models,
                local_url,
                key_fd,
                needs_key=plan.frontend_keys.has_keys,
            ),
            new_scaling=ScalingFactory(
                plan.models, plan.limits, plan.counts, config.device, local_url, f"/dev/fd/{key_fd}"
            ),
            control_port=port,
        )
        cluster.run()


def print_cluster(
    console: Console,
    members: Sequence[tuple[str, str, str]],
    models: Sequence[PreparedModel],
    url: str,
    key_fd: int,
    *,
    needs_key: bool,
) -> None:
    """Prints where each member runs. `members` have name, model and node."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("process", *(("model",) if len(models) > 1 else ()), "node"):
        table.add_column(title, no_wrap=True)
    for name, model, node in members:
        table.add_row(name, *((model,) if len(models) > 1 else ()), node)
    names = ", ".join(model.name for model in models)
    console.print(Text.assemble("\n  Onward serves ", (names, "bold"), " with a cluster on Ray\n"))
    print_table(console, table)
    print_next_commands(console, models[0], url, key_fd, needs_key=needs_key)
