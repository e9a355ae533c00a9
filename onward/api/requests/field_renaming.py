"""Renames the field in an error about a chat request to the field of the API whose request was converted to that chat."""

import re
from collections.abc import Sequence

from onward.errors import ClientError

Renaming = tuple[re.Pattern[str], str]
"""A pattern of a chat field's path, and its replacement in the client's request."""


def with_renamed_field(error: ClientError, renamings: Sequence[Renaming]) -> ClientError:
    """Returns the error with the path of the client's field. The first pattern that matches is applied; without one, the
    error is returned as it is."""
    param = error.param
    if param is None:
        return error
    for pattern, replacement in renamings:
        if pattern.search(param):
            new_param = pattern.sub(replacement, param)
            message = (
                new_param + error.message.removeprefix(param) if error.message.startswith(param) else error.message
            )
            return type(error)(message, code=error.code, param=new_param)
    return error
