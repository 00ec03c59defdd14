"""The exceptions a user or the network can cause. Our own bugs are assertions."""

from __future__ import annotations

from outrider.common.types import RoundError

EXIT_SIGNALLED = 128  # and the signal's number: a command's exit code where one ended it


class OutriderError(Exception):
    """Carries a message meant for a person; all our errors derive from it. `exit_code` is the command's.

    Where the message says what to do, `fix` is that part and `found` the rest.
    """

    exit_code = 1

    def __init__(self, found: str = "", fix: str = "") -> None:
        super().__init__(f"{found}: {fix}" if fix else found)
        self.found, self.fix = found, fix

    def __reduce__(self) -> tuple[object, ...]:
        # A pool of processes hands errors over pickled, and what `__init__` takes is not what an exception keeps.
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[OutriderError], args: tuple[object, ...]) -> OutriderError:
    return kind.__new__(kind, *args)


class UsageError(OutriderError):
    """A flag, a configuration key or a file named by the user is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value or key is wrong; the message names it, its origin and the fix."""


class ClosedError(UsageError):
    """A client was used after it was closed."""


class ModelError(OutriderError):
    """A model directory cannot be loaded or exported; the message says what is missing."""


class InvalidFieldError(OutriderError):
    """Reports a request with a value out of range. `field` is its name on the wire."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message


class UnimplementedFieldError(InvalidFieldError):
    """Reports a request for something that the protocol has and this verifier has not built."""


class LinkError(OutriderError):
    """The verifier cannot be reached, or the connection broke."""

    exit_code = 3


class LinkFaultError(LinkError):
    """The verifier cannot be reached, and waiting will not help: TLS on one side only, a wrong name."""


class RoundTimeoutError(LinkError):
    """A round was not answered within its deadline."""


class RoundFailedError(OutriderError):
    """The verifier answered a round with an error that cannot be repaired."""

    exit_code = 4

    def __init__(self, error: RoundError) -> None:
        where = f" (field {error.field})" if error.field else ""
        super().__init__(f"verifier: {error.code}{where}: {error.message}")
        self.error = error


class IncompatibleError(OutriderError):
    """Draft and target do not belong together (tokenizer, target fingerprint, protocol version)."""

    exit_code = 5
