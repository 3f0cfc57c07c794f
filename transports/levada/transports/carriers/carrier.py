"""`Carrier`: the functions and settings behind a URL scheme."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

import attrs

from levada.transports.carriers.contracts import ByteStream, Connection, Incoming, Listener, MessageStream
from levada.transports.plugins import Part, name_of

__all__ = ["Carrier", "Dial", "Listen", "built_in"]

C = TypeVar("C")
"""The class of a carrier's settings."""
C_contra = TypeVar("C_contra", contravariant=True)


class Dial(Protocol[C_contra]):
    """A function that connects."""

    def __call__(
        self, url: str, config: C_contra | None, /
    ) -> AbstractAsyncContextManager[ByteStream | MessageStream | Connection]:
        """Connect. The block begins when the carrier is connected; leaving it sends the queue and closes.

        Args:
            url: the user's URL, scheme included.
            config: the user's settings; ``None`` for the defaults.

        Raises:
            ConnectionLost: no server answers at the URL, or the server is the wrong one.
            ConfigurationError: the URL or the settings cannot work.
        """
        ...


class Listen(Protocol[C_contra]):
    """A function that listens."""

    def __call__(
        self, url: str, config: C_contra, /
    ) -> AbstractAsyncContextManager[Listener[ByteStream | MessageStream | Incoming]]:
        """Listen. The block begins when the socket is bound; leaving it stops listening.

        Args:
            url: the user's URL; `Listener.url` is the same with the real address.
            config: the user's settings, or `Carrier.config` called without arguments.

        Raises:
            ConfigurationError: the URL or the settings cannot work, or the address is taken.
        """
        ...


@attrs.frozen(kw_only=True)
class Carrier(Generic[C]):
    """A carrier, for `levada.transports.carriers.register` or an entry point of the group ``levada.carriers``.

    Each part is an object, or its name as in an entry point (``"package.module:dial"``), which is imported at its first use.
    """

    dial: Part[Dial[C]]
    """Connects, as `Dial` says. It yields a stream or connection that keeps the contracts of `levada.transports.carriers.contracts`."""
    listen: Part[Listen[C]]
    """Listens, as `Listen` says."""
    config: Part[type[C]]
    """Class of the settings; it must work without arguments. Instances of other classes are refused."""
    requires: str = ""
    """The requirement to install for modules that the parts import, such as ``"levada[quic]"``. The error for a missing module names it."""

    def __str__(self) -> str:
        return name_of(self.dial).partition(":")[0]


def built_in(module: str, config: str, requires: str = "") -> Carrier[Any]:
    """Describe a carrier of levada: a module with ``dial``, ``listen`` and the class of its settings."""
    return Carrier(dial=f"{module}:dial", listen=f"{module}:listen", config=f"{module}:{config}", requires=requires)
