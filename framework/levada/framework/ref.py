"""`Ref`: the address of an actor, here or in another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from .durations import is_duration
from .errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._runtime.channel_core import Outcome
    from .links import Reason
    from .message import Question

__all__ = ["DEFAULT_TIMEOUT", "FromThread", "Ref", "check_timeout"]

M_contra = TypeVar("M_contra", contravariant=True)
R = TypeVar("R")

DEFAULT_TIMEOUT: Final = -1.0
"""``timeout=DEFAULT_TIMEOUT`` (what leaving it out means): the system's ``ask_timeout``. This object, not its value."""


def check_timeout(timeout: float | None) -> None:
    """Refuse what no clock can count, before anything is sent: a negative number, NaN, text.

    Raises:
        ConfigurationError: it is no number of seconds.
    """
    if timeout is not None and timeout is not DEFAULT_TIMEOUT and not is_duration(timeout, zero=True):
        raise ConfigurationError(f"timeout is {timeout!r}, wanted None, or 0 seconds or more")


class FromThread(ABC, Generic[M_contra]):
    """The same actor, for threads that do not run trio: `Ref.from_thread`."""

    __slots__ = ()

    @abstractmethod
    def tell(self, message: M_contra) -> None:
        """Put a message into the mailbox soon, without waiting; 2 µs at most.

        Messages of one thread arrive in order.  The overflow policy applies when a message arrives; under ``wait`` and ``raise``
        the message then waits outside the mailbox for room.

        Raises:
            MailboxFull: ``thread_inbox`` messages from threads (a setting of the system) are already on their way.
            ActorStopped: the system has ended.
        """

    @abstractmethod
    def ask(self, message: Question[M_contra, R], *, timeout: float | None = DEFAULT_TIMEOUT) -> R:
        """Send a question and block this thread until the answer.

        Raises:
            RuntimeError: called in the system's own thread, where it would wait forever.
            AskTimeout, ActorStopped, MailboxFull: as for `Ref.ask`.
        """


class Ref(ABC, Generic[M_contra]):
    """The address of an actor: send messages to it, watch it, stop it. Hashable; equal only to itself.

    A ref stays valid across restarts and is never reused: a ref to a stopped actor does not reach a later actor with the
    same name.  Holding a ref does not keep the actor alive; dropping it does not stop the actor.
    """

    __slots__ = ()

    attachment_kind: ClassVar[str] = "ref"
    """How the message codec marks a ref inside a message."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The names from the root of its system to the actor, for example ``"/desk/prices"``."""

    @property
    def where(self) -> str:
        """The path, and the peer if the actor is in another system: for error texts."""
        return self.path

    @property
    @abstractmethod
    def incarnation(self) -> int:
        """A number that no other actor of the same system has or had."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the actor has not ended; also true while it restarts."""

    @abstractmethod
    def tell(self, message: M_contra) -> None:
        """Put a message into the mailbox without waiting. If the actor has stopped, the message becomes a dead letter.

        Raises:
            MailboxFull: the mailbox is full, and its policy is ``wait`` or ``raise``.
            WrongThread: called from another thread or trio run, and the call would wake the system; use `from_thread`.
        """

    @abstractmethod
    async def send(self, message: M_contra) -> None:
        """Put a message into the mailbox, waiting for room if it is bounded and full.

        Raises:
            MailboxFull: it is full and its policy is ``raise``.
            ActorStopped: the actor has stopped, or stops while this waits; the error gives the message back.
            AskCycle: waiting would never end (see `ask`).

        Cancellation: the message was not sent.  Does not always yield; a loop of sends yields at least once a slice.
        """

    @abstractmethod
    async def ask(self, message: Question[M_contra, R], *, timeout: float | None = DEFAULT_TIMEOUT) -> R:
        """Send a question and return the answer. Waits for room in the mailbox, then for the answer.

        Args:
            message: an instance of a class that derives from ``Asks[R]``.
            timeout: seconds for both waits; ``None``: no limit.  The default is the system's ``ask_timeout``.

        Raises:
            AskTimeout: no answer came in time.
            ConfigurationError: `timeout` is not a number of seconds, 0 or more; nothing was sent.
            ActorStopped: the actor has stopped, stops before it answers (raised at once, even if the question was still queued),
                or fails on this question (then the handler's exception is the ``__cause__``).
            AskCycle: the target already waits for the asker, directly or through other actors.
            MailboxFull: as for `send`.

        Cancellation:
            a question that no handler has started is withdrawn; otherwise the handler goes on and its answer is dropped.
            Always a cancellation point; does not always yield.
        """

    @abstractmethod
    def stop(self, *, now: bool = False) -> None:
        """Ask the actor to end: after the messages queued so far, or, with `now`, after the running handler."""

    @abstractmethod
    def kill(self) -> None:
        """End the actor: cancel a waiting handler, handle no queued message. Its children are killed too."""

    @abstractmethod
    async def terminated(self) -> Reason:
        """Wait until the actor has ended for good; return the reason. For code outside actors; actors use `Actor.watch`.

        Raises:
            AskCycle: a handler of this actor would wait for its own end.

        Cancellation:
            has no effect.
        """

    @property
    @abstractmethod
    def from_thread(self) -> FromThread[M_contra]:
        """The same actor, for other threads."""

    # The next three are called by `Receiver.to_mailbox`, on local refs only.
    def try_tell(self, message: M_contra) -> bool:
        """Put a message into the mailbox; do nothing and return False if there is no room.

        Raises:
            ActorStopped: the actor has stopped.
        """
        raise self._elsewhere()

    def on_room(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once when the mailbox has room, in line with the waiting senders; return a function that undoes this."""
        raise self._elsewhere()

    def on_stopped(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once when the actor has ended, at once if it has; return a function that undoes this."""
        raise self._elsewhere()

    # Routers call the next three, on refs of actors in other systems only.
    @property
    def takes_work(self) -> bool:
        """Whether the actor's system reports when the actor has finished a message, and how many messages wait for it."""
        return False

    def work(self, entry: Any, over: Callable[[Outcome], None]) -> bool:
        """Give the actor one message or question, and report when it has finished.

        Args:
            entry: the message or the question.
            over: called once with ``PROCESSED``: finished; ``NOT_PROCESSED``: the actor ended before it began; ``UNKNOWN``: the
                actor is out of reach. A question fails by itself if it is out of reach.

        Returns:
            False if `entry` cannot travel: then it was refused, and `over` is never called.
        """
        raise self._elsewhere()

    def sample_load(self, got: Callable[[int | None], None]) -> None:
        """Ask how many messages wait for the actor, behind those already sent; None if the question cannot be sent."""
        raise self._elsewhere()

    def _elsewhere(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self!r} has no mailbox in this process; receive in a task and send() it the messages"
        )

    def __repr__(self) -> str:
        return f"<Ref {self.path}#{self.incarnation}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled; send it in a message over a connection instead")
