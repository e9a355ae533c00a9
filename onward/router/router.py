"""All parts of a router, joined; but for its rim: the event loop, the sockets and the way out.

`main` brings the real ones, the simulator others.
"""

import aiohttp

from onward.batches.batch_routes import make_service
from onward.clock import Clock
from onward.config import OtelSettings, RouterConfig
from onward.obs.build_info import register_build_info
from onward.obs.metrics import Registry
from onward.obs.tracer import ProcessTracing
from onward.random_source import RandomSource
from onward.router import client_writer
from onward.router.app import build_app
from onward.router.core import RouterCore
from onward.router.endpoints.live import RouterLiveView
from onward.router.stream_runner import STARTUP_GRACE_S, StreamRunner
from onward.router.upstream_client import PostStream, UpstreamClient
from onward.web.auth.api_key_table import ApiKeyTable, admin_entries, merge_tables
from onward.web.auth.authenticator import ActiveKeys
from onward.web.ui.live_feed import LiveFeed


class Router:
    """Needs a running event loop."""

    def __init__(
        self,
        config: RouterConfig,
        cluster_key: str,
        clock: Clock,
        random: RandomSource,
        session: aiohttp.ClientSession,
        post: PostStream,
        *,
        keys: ApiKeyTable | None = None,
        settle_s: float = STARTUP_GRACE_S,
        keep_alive_s: float = client_writer.KEEP_ALIVE_S,
        otel: OtelSettings | None = None,
    ) -> None:
        """`keys` are the accepted API keys; by default, the plain keys of the configuration."""
        self.keyring = ActiveKeys(merge_tables(admin_entries(config.api_key)) if keys is None else keys)
        self.registry = Registry()
        register_build_info(self.registry)
        settled_at_s = clock.now_s() + settle_s
        core = RouterCore(config, f"router-{random.hex_token()}", self.registry, random.below, settled_at_s)
        attributes = {"service.instance.id": core.incarnation, "onward.role": "router"}
        self.tracing = ProcessTracing(otel, clock, random, self.registry, attributes)
        upstream = UpstreamClient(cluster_key, clock, session, post)
        self.stream_runner = StreamRunner(core, upstream, clock, random, keep_alive_s)
        self.live_feed = LiveFeed(RouterLiveView(self.stream_runner).look, clock)
        self.batches = make_service(config, self.keyring, clock)
        self.app = build_app(
            self.stream_runner,
            self.registry,
            cluster_key,
            self.keyring,
            self.live_feed,
            self.tracing.tracer,
            self.batches,
        )
