"""What qkv says when something is wrong: one line, naming the file or field, and what to do next.

Everything a user can cause is a `QkvError`; the command line prints it and exits with `exit_code`.
Any other exception is a defect in qkv.
"""

from __future__ import annotations


class QkvError(Exception):
    """The base of every error a user can cause. `str(error)` is one line."""

    exit_code = 2


class ModelFileError(QkvError):
    """A model file or folder that is damaged, hostile, incomplete, or of a kind qkv does not know."""


class ModelNotFoundError(QkvError):
    """A model name that leads nowhere, or to a model that cannot be fetched now."""


class CacheError(QkvError):
    """The cache folder cannot be read or written."""


class ParameterError(QkvError):
    """A value in a request is out of range or of the wrong type. The message starts with the field's name."""


class ContextLengthError(ParameterError):
    """The prompt has more tokens than the context holds. The message has both counts."""


class TemplateError(QkvError):
    """The chat template refused the conversation, broke, or asked for something unsafe."""


class QueueFullError(QkvError):
    """As many requests wait as are allowed to: try again later."""


class RequestCancelledError(QkvError):
    """The request was cancelled before its end."""
