"""The Starlette application that api processes and routers have in common."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from onward.web.error_handlers import EXCEPTION_HANDLERS


def make_starlette_app(routes: Sequence[BaseRoute], middleware: Sequence[Middleware] = ()) -> Starlette:
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)
    # Starlette redirects from `/health/` to `/health` at the host that the client itself has named in `Host`.
    app.router.redirect_slashes = False
    return app
