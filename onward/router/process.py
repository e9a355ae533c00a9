"""All parts of a router, joined; but for its rim: the event loop, the sockets and the way out.

`main` brings the real ones, the simulator others.
"""

import aiohttp

from onward.chance import Chance
from onward.clock import Clock
from onward.config import RouterConfig
from onward.obs.metrics import Registry
from onward.router import client_side
from onward.router.app import build_app
from onward.router.core import RouterCore
from onward.router.serving import SETTLE_S, Serving
from onward.router.upstream import Post, Upstream
from onward.web.callers import Keyring
from onward.web.keys import Keys, joined, plain_entries


class Router:
    """Needs a running event loop."""

    def __init__(
        self,
        config: RouterConfig,
        cluster_key: str,
        clock: Clock,
        chance: Chance,
        session: aiohttp.ClientSession,
        post: Post,
        *,
        keys: Keys | None = None,
        settle_s: float = SETTLE_S,
        keep_alive_s: float = client_side.KEEP_ALIVE_S,
    ) -> None:
        """`keys`: those that clients show; else the plain ones of the configuration."""
        self.keyring = Keyring(joined(plain_entries(config.api_key)) if keys is None else keys)
        self.registry = Registry()
        core = RouterCore(config, f"router-{chance.token()}", self.registry, chance.below)
        upstream = Upstream(cluster_key, clock, session, post)
        self.serving = Serving(core, upstream, clock, chance, settle_s, keep_alive_s)
        self.app = build_app(self.serving, self.registry, cluster_key, self.keyring)
