"""The page of all HTTP routes, from the tables of routes of instances and routers and from the structs of bodies."""

from collections.abc import Iterable, Sequence
from typing import Any

from onward.api import app as instance_app
from onward.api import openapi
from onward.api.endpoints.admin import AdminEndpoints
from onward.api.requests.schemas import ValidationContext
from onward.config import ApiConfig, RouterConfig
from onward.router import app as router_app
from onward.version import __version__
from onward.web.auth.authenticator import GuardedRoute, RouteAccess
from onward.web.ui.live_feed import LiveFeed

from .markdown import NOTE, code, sentence, table

_ACCESS = {
    RouteAccess.OPEN: "none",
    RouteAccess.USER: "any key",
    RouteAccess.ADMIN: "an admin's key",
    RouteAccess.CLUSTER: "the cluster key",
}
_PAGES = "/ui"
_INTERNAL = "/internal"


class _Placeholder:
    """Stands for the objects that endpoints keep. Building the routes calls none of them, so no server has to run."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> "_Placeholder":
        return _Placeholder()

    def __call__(self, *_: Any) -> "_Placeholder":
        return self

    def __iter__(self) -> Any:
        return iter(())


def instance_routes() -> list[GuardedRoute]:
    unused: Any = _Placeholder()
    services: Any = _Placeholder(config=ApiConfig(demo=True))
    admin = AdminEndpoints(services, unused, unused)
    return instance_app.build_routes(services, admin, unused, unused, LiveFeed(unused, unused), unused)


def router_routes() -> list[GuardedRoute]:
    unused: Any = _Placeholder()
    runner: Any = _Placeholder(core=_Placeholder(config=RouterConfig(demo=True)))
    endpoints: Any = dict.fromkeys(router_app.GENERATION_PATHS, unused)
    return router_app.build_routes(runner, unused, endpoints, None, unused, LiveFeed(unused, unused))


def render() -> str:
    instance, router = instance_routes(), router_routes()
    by_path = {path_of(route): route for route in [*router, *instance]}
    clients = [path for path in by_path if not path.startswith((_PAGES, _INTERNAL))]
    clients.sort(key=lambda path: (path not in openapi.BODIES, path))
    served_by = {
        path: [name for name, routes in (("instance", instance), ("router", router)) if path in map(path_of, routes)]
        for path in by_path
    }

    def rows(paths: Iterable[str]) -> Iterable[Sequence[str]]:
        for path in paths:
            route = by_path[path]
            methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
            summary = sentence(openapi.SUMMARIES.get(path, ""))
            servers = "both" if len(served_by[path]) > 1 else served_by[path][0]
            yield code(path), methods, summary, _ACCESS[route.access], servers

    document = openapi.document(instance, ValidationContext("model", vocab_size=1, max_choices=ApiConfig().max_choices))
    columns = ("path", "methods", "what it does", "key", "served by")
    short = (*columns[:2], *columns[3:])

    def short_rows(prefix: str) -> Iterable[Sequence[str]]:
        return ((*row[:2], *row[3:]) for row in rows(sorted(path for path in by_path if path.startswith(prefix))))

    return "\n".join(
        [
            "# HTTP routes\n",
            NOTE.format(version=__version__) + " A running server has the same as `/openapi.json`, and as a page at"
            " `/docs`.\n",
            "The column *key* says which key a request needs where the server has API keys"
            " ([keys and tenants](../howto/keys-and-tenants.md)), and *served by* whether an instance, a router or both"
            " have the route.\n",
            "## For clients and operators\n",
            table(columns, rows(clients)),
            "## Pages for a browser\n",
            "The files of `/ui`, and the routes that they use. `/ui/demo/` exists with `--demo` only.\n",
            table(short, short_rows(_PAGES)),
            "## Between routers and instances\n",
            "These routes are no part of the API for clients and may change in any release.\n",
            table(short, short_rows(_INTERNAL)),
            "## Fields of request bodies\n",
            "An empty *default* means that the field may be left out. [Request fields](../fields.md) compares the fields"
            " with those of other servers.\n",
            *(_fields(path, document) for path in openapi.BODIES),
        ]
    )


def path_of(route: GuardedRoute) -> str:
    return route.path.replace(":path}", "}")


def _fields(path: str, document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    schema = schemas[openapi.BODIES[path].__name__]
    required = schema.get("required", ())
    rows = [
        (
            code(name),
            _type(field, schemas),
            "required" if name in required else _default(field),
            sentence(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
    ]
    return f"### POST {path}\n\n" + table(("field", "type", "default", "meaning"), rows)


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return code(str(default).lower() if isinstance(default, bool) else repr(default)) if default is not None else ""


def _type(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "anyOf" in field:
        names = [_type(option, schemas) for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(names)) + _range(field)
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return "object" if schemas[name].get("type") == "object" else name
    if "enum" in field and field.get("type") is None:
        return ", ".join(code(str(value)) for value in field["enum"])
    kind = field.get("type", "any JSON")
    if kind == "array" and "items" in field:
        return f"list of {_type(field['items'], schemas)}"
    return str(kind) + _range(field)


def _range(field: dict[str, Any]) -> str:
    least = field.get("minimum", field.get("exclusiveMinimum"))
    most = field.get("maximum")
    if least is None and most is None:
        return ""
    below = "above" if "exclusiveMinimum" in field else "from"
    return " " + " ".join(
        [*([f"{below} {least}"] if least is not None else []), *([f"to {most}"] if most is not None else [])]
    )
