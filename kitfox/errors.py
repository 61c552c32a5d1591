"""Every exception kitfox raises on purpose; each knows its HTTP status.

The caller's mistake is a `RequestError` (4xx). A start-up mistake is a `ConfigError`, `ModelNotFoundError` or
`UnsupportedModelError`. Bugs are not here: they are `assert`s.
"""

from __future__ import annotations


class KitfoxError(Exception):
    """Base of all of them; `status` is the HTTP status, `error_type` and `code` go into the OpenAI error body."""

    status = 500
    error_type = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(KitfoxError):
    """The request is wrong: the message names the parameter, the limit and what was given."""

    status = 400
    error_type = "invalid_request_error"


class InvalidParameterError(RequestError):
    """A parameter is out of range: `InvalidParameterError("top_p", "must be in (0, 1]", 2.0)`."""

    code = "invalid_parameter"

    def __init__(self, param: str, limit: str, given: object):
        shown = repr(given)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{param} {limit}. Given: {shown}", param=param)


class ContextLengthError(RequestError):
    """Prompt plus requested output does not fit the context, or can never fit the KV cache."""

    code = "context_length_exceeded"


class UnsupportedParameterError(RequestError):
    """A known parameter that kitfox does not support yet: said, never ignored."""

    code = "unsupported_parameter"

    def __init__(self, param: str, reason: str = "is not supported yet"):
        super().__init__(f"{param} {reason}", param=param)


class InvalidGrammarError(RequestError):
    """A schema or grammar that cannot be compiled, or not exactly: the message says why."""

    code = "invalid_grammar"

    def __init__(self, param: str, reason: str):
        super().__init__(f"{param}: {reason}", param=param)


class ModelMismatchError(RequestError):
    """The `model` field names a model that is not served."""

    status = 404
    code = "model_not_found"


class ApiKeyError(RequestError):
    """No API key, or one that is not the server's."""

    status = 401
    code = "invalid_api_key"


class AdminKeyError(RequestError):
    """A good API key, where the admin's is needed."""

    status = 403
    code = "admin_key_required"


class HeadersTooLargeError(RequestError):
    """More header bytes or fields than the server takes."""

    status = 431
    code = "headers_too_large"


class NotFoundError(RequestError):
    """There is no such file, batch or other thing that is named by an id."""

    status = 404
    code = "not_found"


class ConflictError(RequestError):
    """The thing is in a state in which this cannot be done to it."""

    status = 409
    code = "conflict"


class TooLargeError(RequestError):
    """The body is larger than the server's limit."""

    status = 413
    code = "request_too_large"


class QueueFullError(KitfoxError):
    """The waiting queue is full; `retry_after_s` becomes the Retry-After header."""

    status = 429
    error_type = "overloaded_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StorageError(KitfoxError):
    """The folder of files and batches cannot be written, or belongs to another server."""

    status = 503
    error_type = "unavailable_error"
    code = "storage_unavailable"


class ShuttingDownError(KitfoxError):
    """The server is draining and takes no new requests."""

    status = 503
    error_type = "unavailable_error"
    code = "shutting_down"


class AsleepError(KitfoxError):
    """The server was put to sleep and has no KV cache until it is woken."""

    status = 503
    error_type = "unavailable_error"
    code = "asleep"


class EngineBusyError(RequestError):
    """It cannot be done while requests are open."""

    code = "engine_busy"


class EngineDeadError(KitfoxError):
    """The engine process died or is being restarted."""

    status = 503
    error_type = "unavailable_error"
    code = "engine_unavailable"


class AbortedError(KitfoxError):
    """The request was ended from outside, by an operator or another client."""

    status = 503
    error_type = "unavailable_error"
    code = "aborted"


class ConfigError(KitfoxError):
    """A command-line flag or configuration value cannot be honoured."""

    code = "invalid_configuration"


class ModelNotFoundError(KitfoxError):
    """No such model on disk, among the aliases, or on the hub."""

    code = "model_not_found"


class UnsupportedModelError(KitfoxError):
    """The architecture, tensor type or tokenizer of a model is not one kitfox has."""

    code = "unsupported_model"


class WeightsError(KitfoxError):
    """A tensor is missing, unexpected or of the wrong shape; the message names it."""

    code = "invalid_weights"
