"""The promises of `levada.transports.carriers.contracts` as checks for any carrier.

A factory is an async context manager that yields two connected ends: two `ByteStream`, two `MessageStream` or two `Connection`, the
client first.  `CarrierTraits` tells the shape of the carrier and its limits.  The checks know nothing else about it, so the same suite
runs on memory, simulated networks and real sockets.

Example:
    >>> import contextlib
    >>> from levada.transports.carriers.memory import memory_streams
    >>> @contextlib.asynccontextmanager
    ... async def pair():
    ...     yield memory_streams()
    >>> trio.run(check_carrier, pair, CarrierTraits(shape="bytes"))

In a test module::

    @pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
    async def test_keeps_the_promise(check: CarrierCheck) -> None:
        await check(pair)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio

from levada.transports.testing import (
    _connection_checks,
    _ending_checks,  # noqa: F401 - adds its checks to those of others
    _message_checks,  # noqa: F401 - likewise
    _stream_checks,  # noqa: F401 - likewise
    _stream_tools,
)
from levada.transports.testing.traits import CarrierTraits, Factory

__all__ = ["CarrierCheck", "carrier_checks", "check_carrier"]


@attrs.frozen
class CarrierCheck:
    """One promise. Call it with a factory; it raises `AssertionError` if the carrier breaks the promise."""

    name: str
    """The promise in words with underscores; ``str()`` returns it too, for the ids of parametrised tests."""
    traits: CarrierTraits
    """The traits of the carrier."""
    run: Callable[[CarrierTraits, Factory], Awaitable[None]] = attrs.field(repr=False)

    def __str__(self) -> str:
        return self.name

    async def __call__(self, factory: Factory) -> None:
        """Open a pair, check it, close it.

        Raises:
            AssertionError: the promise is broken. If a task of the check noticed it, the error is in an exception group.
            trio.TooSlowError: the check took longer than `CarrierTraits.timeout`.
        """
        with trio.fail_after(self.traits.timeout):
            await self.run(self.traits, factory)


def carrier_checks(traits: CarrierTraits) -> list[CarrierCheck]:
    """Return every check that applies to a carrier of these traits.

    The checks of a connection include those of a byte stream for its streams; their names begin with ``stream_``.
    """
    found = _connection_checks.CHECKS if traits.shape == "connection" else {}
    prefix = "stream_" if traits.shape == "connection" else ""
    found = found | {prefix + name: run for name, run in _stream_tools.CHECKS[traits.shape].items()}
    if traits.cut is None:
        found = {name: run for name, run in found.items() if "_cut_" not in name}
    if not traits.tells_loss:
        found = {name: run for name, run in found.items() if "abort_is_seen" not in name}
    if traits.max_message is None:
        found.pop("larger_message_than_allowed_closes", None)
    return [CarrierCheck(name, traits, run) for name, run in found.items()]


async def check_carrier(factory: Factory, traits: CarrierTraits) -> None:
    """Run every check against fresh pairs of `factory`, one after the other.

    Raises:
        AssertionError: a promise is broken; a note names the check. If a task of the check noticed it, the error is in an exception group.
        trio.TooSlowError: a check took longer than `CarrierTraits.timeout`; a note names the check.
    """
    for check in carrier_checks(traits):
        try:
            await check(factory)
        except Exception as error:
            error.add_note(f"carrier check: {check.name}")
            raise
