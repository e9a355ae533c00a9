"""Creates the Starlette application of api processes and routers."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from onward.web.error_handlers import EXCEPTION_HANDLERS


def make_starlette_app(routes: Sequence[BaseRoute], middleware: Sequence[Middleware] = ()) -> Starlette:
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)
    # Starlette would redirect `/health/` to `/health` at the host in the `Host` header, which the client chooses.
    app.router.redirect_slashes = False
    return app
