"""Every exception that Plimsoll raises, as one tree.

    PlimsollError
    ├── FormatError             (ValueError)      a format that does not exist or cannot exist
    ├── ArgumentError           (ValueError)      an argument whose value does not fit the others
    ├── UnsupportedTensorError  (TypeError)       a tensor of a kind the operation cannot take
    ├── NotRecordedError        (LookupError)     a question that the record at hand cannot answer
    ├── BackendError            (RuntimeError)    a kernel backend that was asked for and is not there
    ├── StateError              (RuntimeError)    an object that is not in the state that the operation needs
    ├── RunError                (OSError)         a folder that is no run, or that cannot be written or read
    ├── MissingExtraError       (ImportError)     an optional dependency that is not installed
    └── GuardStop               (RuntimeError)    no mistake: a guard has stopped the training, as it was allowed to

Each also derives from the built-in exception beside it, so that code which does not know Plimsoll still catches it.
Messages have one shape: ``<operation>: expected <what must hold>; got <what came>. <What to do>.``
"""


class PlimsollError(Exception):
    """The base of every exception that Plimsoll raises on purpose."""


class FormatError(PlimsollError, ValueError):
    """A number format that does not exist, or that its fields make impossible."""


class ArgumentError(PlimsollError, ValueError):
    """An argument whose value is out of range or contradicts another argument."""


class UnsupportedTensorError(PlimsollError, TypeError):
    """A tensor of a kind (dtype, layout, device) that the operation cannot take."""


class NotRecordedError(PlimsollError, LookupError):
    """A question that a spectrum cannot answer: the data was not recorded."""


class BackendError(PlimsollError, RuntimeError):
    """A kernel backend that was asked for by name and is not available here."""


class StateError(PlimsollError, RuntimeError):
    """A state that an operation cannot start from: calls in a wrong order.

    It is that of an object, or of what was saved of it.
    """


class RunError(PlimsollError, OSError):
    """A folder that is no run, has a newer schema, or cannot be written to."""


class MissingExtraError(PlimsollError, ImportError):
    """An optional dependency that is not installed; the message has the install line."""


class GuardStop(PlimsollError, RuntimeError):  # noqa: N818  (as StopIteration: nothing is wrong with the program)
    """A training stopped by `plimsoll.Guard`; the message names finding and report."""


for _error in [PlimsollError, *PlimsollError.__subclasses__()]:
    _error.__module__ = "plimsoll"  # tracebacks and pickles name the public module, whatever was imported first
