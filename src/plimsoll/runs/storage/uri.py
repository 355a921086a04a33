"""What a URI such as ``s3://bucket/exp1`` means: a filesystem and a path in it.

pyarrow's own filesystems come first; schemes that it does not know, or was built without, are fsspec's, which asks for
a package of each. What a URI may carry beside its address (keys, passwords, tokens) is in no message.
"""

import re
from typing import Any
from urllib.parse import urlsplit

from plimsoll.errors import ArgumentError, MissingExtraError, PlimsollError, RunError
from plimsoll.runs.columns.arrow import fs, pa

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OF_FSSPEC = "fsspec+"
# Those of pyarrow: Arrow's C++ `FileSystemFromUri`.
_OF_ARROW = frozenset({"file", "mock", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"})
# As it comes, pyarrow tries for 15 minutes to reach Google's storage.
_PATIENCE = {"gs": "retry_limit_seconds=15", "gcs": "retry_limit_seconds=15"}


def is_uri(path: str) -> bool:
    """Whether it begins with a scheme."""
    return _URI.match(path) is not None


def without_secrets(uri: str) -> str:
    """The address alone: no key, no password, and none of the options behind ``?``.

    >>> without_secrets("s3://key:secret@bucket/exp1?region=eu-west-1")
    's3://bucket/exp1'
    """
    scheme, _, rest = uri.partition("://")
    whole, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
    given, at, host = whole.rpartition("@")
    user = "" if scheme == "s3" else given.partition(":")[0]  # that of S3 is the access key; Azure's is the container
    return f"{scheme}://{user}{at if user else ''}{host}{slash}{path}"


def sentence(words: str) -> str:
    """What a library says of a failure, on one line that ends."""
    return f"{' '.join(words.split()).rstrip('.')}."


def filesystem_of(uri: str) -> tuple[Any, str]:
    """The filesystem of pyarrow for a URI, and the path in it.

    Raises `ArgumentError` for a scheme that nobody knows or an address that is none, `MissingExtraError` where the
    package for it is missing, `RunError` where the storage does not answer.
    """
    scheme = uri.partition("://")[0]
    if scheme.startswith(_OF_FSSPEC) or scheme not in _OF_ARROW:
        return _by_fsspec(uri.removeprefix(_OF_FSSPEC))
    try:
        return fs.FileSystem.from_uri(_with_patience(uri))
    except (pa.ArrowNotImplementedError, ImportError):  # a pyarrow without that storage
        return _by_fsspec(uri)
    except (pa.ArrowException, ValueError) as error:
        raise _unknown(uri, error) from error
    except OSError as error:
        raise _unreached(uri, error) from error


def _by_fsspec(uri: str) -> tuple[Any, str]:
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        found, inside = fsspec.url_to_fs(uri)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    except ImportError as error:
        raise _missing(uri, error) from error
    except ValueError as error:
        raise _unknown(uri, error) from error
    except Exception as error:  # what the library behind it raises
        raise _unreached(uri, error) from error
    return fs.PyFileSystem(fs.FSSpecHandler(found)), str(inside)  # pyright: ignore[reportUnknownArgumentType]


def _with_patience(uri: str) -> str:
    wanted = _PATIENCE.get(uri.partition("://")[0])
    if wanted is None or "retry_limit_seconds" in urlsplit(uri).query:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}{wanted}"


def _missing(uri: str, error: ImportError) -> PlimsollError:
    package = (getattr(error.__cause__ or error, "name", None) or "fsspec").partition(".")[0]
    said = " ".join(f"{error}".split()).rstrip(".")
    return MissingExtraError(
        f"Run: expected the package that opens {uri.partition('://')[0]}://; got none ({said}). "
        f"Install it: pip install {package}"
    )


def _unknown(uri: str, error: Exception) -> PlimsollError:
    return ArgumentError(
        "Run: expected a URI that pyarrow knows (s3://, gs://, abfs://, hdfs://, file://) or fsspec does; got "
        f"{without_secrets(uri)}: {_said(uri, error)} Correct it, or pass filesystem=, which may be one of fsspec's."
    )


def _unreached(uri: str, error: Exception) -> PlimsollError:
    return RunError(
        f"Run: expected storage that answers; got {type(error).__name__} for {without_secrets(uri)}: "
        f"{_said(uri, error)} Look at the address, the credentials and the network."
    )


def _said(uri: str, error: Exception) -> str:
    """An error's sentence, without what the URI holds beside the address."""
    return sentence(f"{error}".replace(uri, without_secrets(uri)))
