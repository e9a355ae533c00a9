"""The command lines of a cluster on Ray. They have no interpreter, key or node: the actor that runs one adds these.

The router runs where `onward up` runs, so that its address stays; instances are told that address and announce their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onward.cli.cluster_plan import FrontendKeys, InstanceCounts, ServedModel, free_name
from onward.config import API_KEY_VARIABLE
from onward.supervisor.cluster_member import MemberSpec
from onward.supervisor.registration_config import http_url
from onward.supervisor.scale_change import member_number
from onward.supervisor.scaling_policy import ScalingLimits

COMMAND = ("-m", "onward.cli.main")


@dataclass(frozen=True, slots=True)
class RayPlan:
    """What the flags of `onward up --ray` ask for."""

    counts: InstanceCounts
    instance_flags: Sequence[str]
    router_flags: Sequence[str]
    frontend_keys: FrontendKeys
    models: Sequence[ServedModel]
    limits: ScalingLimits | None = None

    def router(self, host: str, port: int) -> MemberSpec:
        keys = self.frontend_keys
        flags = ("--host", host, "--port", str(port), *keys.flags)
        command = (*COMMAND, "router", *self.router_flags, *flags)
        return MemberSpec(
            "router",
            "router",
            command,
            http_url(host, port),
            None,
            None,
            keys.environment,
            reloads_on_sighup=keys.has_key_file,
        )


@dataclass(frozen=True, slots=True)
class RayInstances:
    """Plans instances of a cluster on Ray."""

    plan: RayPlan
    router_url: str
    threads: int
    api_key: str
    """The key of the instances, which clients do not use. Empty if only this machine can reach them."""

    def at_start(self) -> list[MemberSpec]:
        """Returns the instances to begin with. Those of one role belong to the models in turn."""
        models = self.plan.models
        return [self._spec(name, models[member_number(name) % len(models)]) for name in self.plan.counts.names()]

    def added(self, role: str, model: str, taken: Sequence[str]) -> MemberSpec:
        served = next(one for one in self.plan.models if one.name == model)
        return self._spec(free_name(role, taken), served)

    def _spec(self, name: str, model: ServedModel) -> MemberSpec:
        role = name.split("-")[0]
        flags = ("--instance-name", name, "--role", role, "--port", "0", "--threads", str(self.threads))
        command = (*COMMAND, "serve", *self.plan.instance_flags, *flags, "--router", self.router_url, *model.flags)
        environment = {API_KEY_VARIABLE: self.api_key}
        return MemberSpec(name, role, command, "", None, self.threads, environment, model=model.name)
