"""`Supervisor`: an actor that only starts children from a list and keeps them running.

Any actor can have supervised children (``self.spawn(…, supervise=restart())``).  A `Supervisor` is for the levels of a tree with no
other task: it has no state of its own that could go wrong.

Private fields used here: ``Cell._extras``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import attrs
import trio

from ._runtime.cell import Cell
from .actor import Actor
from .errors import ActorError, ConfigurationError
from .handlers import handles
from .links import SHUTDOWN
from .message import Asks
from .ref import Ref
from .supervision import ChildSpec, Strategy, one_for_one

__all__ = ["Children", "StartChild", "StopChild", "Supervisor"]

logger = logging.getLogger("levada.framework.supervisor")


@attrs.frozen
class StartChild(Asks[Ref[Any]]):
    """Ask a `Supervisor` to start one more child, after the others; the answer is its ref.

    If that fails (`NameTaken`, or the factory raises), the asker gets the error and the supervisor goes on.
    """

    spec: ChildSpec
    """Made by `child`."""


@attrs.frozen
class StopChild(Asks[bool]):
    """Ask a `Supervisor` to end a child for good, whatever its policy; the answer says whether it had such a child.

    The child ends after its running handler, and is killed if that takes longer than ``stop_timeout`` (a setting of the system).
    Until then the supervisor handles no other message; restarts of its children go on.
    """

    name: str
    """The name in its `child` spec."""


@attrs.frozen
class Children(Asks[list[Ref[Any]]]):
    """Ask a `Supervisor` for the children that have not ended, in order of start."""


def _specs(specs: Sequence[ChildSpec]) -> tuple[ChildSpec, ...]:
    wrong = [spec for spec in specs if not isinstance(spec, ChildSpec)]
    if wrong:
        raise ConfigurationError(f"a child is {wrong[0]!r}, wanted child(…)")
    names = [spec.name for spec in specs if spec.name is not None]
    if len(names) > len(set(names)):
        raise ConfigurationError(f"the children are named {names!r}, wanted different names")
    return tuple(specs)


class Supervisor(Actor[StartChild | StopChild | Children]):
    """Starts children in order, and restarts them according to their policies and its strategy.

    If a child fails too often, the supervisor fails: spawn it with ``supervise=restart()`` to restart the whole subtree, or with
    ``supervise="escalate"`` to pass the failure on.
    A restarted supervisor starts the children of its list; children added by `StartChild` are gone.

    Args:
        children: the children to start, made by `child`.
        strategy: who restarts together: `one_for_one`, `one_for_all` or `rest_for_one`.

    Raises:
        ConfigurationError: a child is not a `ChildSpec`, or two have the same name.

    Example:
        >>> import trio
        >>> from levada.framework import Actor, ActorSystem, Asks, child, handles, message, rest_for_one, restart
        >>> from levada.framework.supervisor import Children, Supervisor
        >>> @message
        ... class Next(Asks[int]):
        ...     pass
        >>> class Tickets(Actor[Next]):
        ...     last: int = 0
        ...     @handles
        ...     def next(self, m: Next) -> int:
        ...         self.last += 1
        ...         return self.last
        >>> async def main() -> None:
        ...     async with ActorSystem() as system:
        ...         team = system.spawn(
        ...             Supervisor,
        ...             [child(Tickets, 100, name="red"), child(Tickets, name="blue", supervise=restart("permanent"))],
        ...             rest_for_one(max=3, within=60),
        ...             name="team",
        ...         )
        ...         print([ref.path for ref in await team.ask(Children())])
        ...         red = system.lookup("/team/red")
        ...         print(await red.ask(Next()))
        >>> trio.run(main)
        ['/team/red', '/team/blue']
        101
    """

    specs: Sequence[ChildSpec] = attrs.field(default=(), converter=_specs)
    """The initial children."""
    strategy: Strategy = attrs.field(factory=one_for_one, validator=attrs.validators.instance_of(Strategy))
    """Who restarts together."""

    def started(self) -> None:
        """Start the children."""
        for spec in self.specs:
            self._start_child(spec)

    def child_ref(self, name: str) -> Ref[Any] | None:
        """Find a living child by its name; from outside, use `ActorSystem.lookup`."""
        extras = self._bound()._extras
        return extras.names.get(name) if extras is not None and extras.names is not None else None

    @handles
    def start_child(self, m: StartChild) -> Ref[Any] | None:
        """Start one more child."""
        try:
            return self._start_child(m.spec)
        except Exception as error:  # noqa: BLE001 - a bad spec is its sender's mistake
            self._refuse(m, error)
            return None

    @handles
    async def stop_child(self, m: StopChild) -> bool:
        """End a child for good."""
        ref = self.child_ref(m.name)
        if ref is None:
            return False
        self.system.lifecycle.request(cast("Cell", ref), SHUTDOWN, final=True)
        with trio.move_on_after(self.system.stop_timeout):
            await ref.terminated()
            return True
        ref.kill()
        await ref.terminated()
        return True

    @handles
    def list_children(self, _: Children) -> list[Ref[Any]]:
        """List the children."""
        return self.children

    def _start_child(self, spec: ChildSpec) -> Ref[Any]:
        return self.spawn(spec.factory, *spec.args, name=spec.name, mailbox=spec.mailbox, supervise=spec.supervise)

    def _refuse(self, m: StartChild, error: Exception) -> None:
        """Fail the ask; log the error of a tell."""
        try:
            reply = self.reply_later()
        except ActorError:
            text, path = "%s could not start a child", self.ref.path
            self.system.failure_log.log(logger, error, text, path, actor=path)
        else:
            reply.fail(error)
