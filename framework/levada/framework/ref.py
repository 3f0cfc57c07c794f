"""`Ref`: what one holds of an actor, here or in another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from .errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .links import Reason
    from .message import Asks

__all__ = ["DEFAULT_TIMEOUT", "FromThread", "Ref"]

M_contra = TypeVar("M_contra", contravariant=True)
R = TypeVar("R")

DEFAULT_TIMEOUT: Final = -1.0
"""``timeout=DEFAULT_TIMEOUT`` (what leaving it out means): the system's ``ask_timeout``."""


class FromThread(ABC, Generic[M_contra]):
    """The same actor, for threads that do not run trio: `Ref.from_thread`."""

    __slots__ = ()

    @abstractmethod
    def tell(self, message: M_contra) -> None:
        """Put a message into the mailbox soon, without waiting; 2 µs at most.

        Messages of one thread arrive in order.  The mailbox's overflow policy is applied when it arrives; where it says
        ``wait`` or ``raise``, the message waits its turn outside the mailbox.

        Raises:
            MailboxFull: ``thread_inbox`` messages from threads (a setting of the system) are on their way already.
            ActorStopped: the system has been left.
        """

    @abstractmethod
    def ask(self, message: Asks[R], *, timeout: float | None = DEFAULT_TIMEOUT) -> R:
        """Send a question and block this thread until the answer.

        Raises:
            RuntimeError: called in the system's own thread, where it could never be answered.
            AskTimeout, ActorStopped, MailboxFull: as for `Ref.ask`.
        """


class Ref(ABC, Generic[M_contra]):
    """Address of an actor: give messages to it, watch it, stop it. Hashable; equal only to itself.

    A ref stays valid across restarts and is never reused: a ref to a stopped actor does not reach a later one of the
    same name.  Holding a ref does not keep the actor alive, dropping it does not stop the actor.
    """

    __slots__ = ()

    attachment_kind: ClassVar[str] = "ref"
    """How the message codec marks a ref inside a message."""

    @property
    @abstractmethod
    def path(self) -> str:
        """Names from the root of its system to the actor, for example ``"/desk/prices"``."""

    @property
    def where(self) -> str:
        """The path, and the peer if the actor is elsewhere: for texts of errors."""
        return self.path

    @property
    @abstractmethod
    def incarnation(self) -> int:
        """Number that no other actor of the same system has or had."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the actor has not ended for good yet."""

    @abstractmethod
    def tell(self, message: M_contra) -> None:
        """Put a message into the mailbox without waiting.

        To a stopped actor: a dead letter, not an error; the sender of a one-way message has no claim to an answer.

        Raises:
            MailboxFull: the mailbox is bounded, full, and its policy is ``wait`` or ``raise``.
            WrongThread: called from another thread or trio run, and the system would have to be woken; use `from_thread`.
        """

    @abstractmethod
    async def send(self, message: M_contra) -> None:
        """Put a message into the mailbox, waiting for room if it is bounded and full.

        Raises:
            MailboxFull: it is full and its policy is ``raise``.
            ActorStopped: the actor has stopped, or stops while this waits; the message is given back.
            AskCycle: waiting would never end (see `ask`).

        Cancellation:
            the message was not put in.  Does not always yield; a loop of sends yields at least every slice.
        """

    @abstractmethod
    async def ask(self, message: Asks[R], *, timeout: float | None = DEFAULT_TIMEOUT) -> R:
        """Send a question, wait for room and for the answer: what the handler returns.

        Args:
            message: an instance of a class that derives from ``Asks[R]``.
            timeout: seconds for the whole of it; ``None``: no limit.  Left out: the system's ``ask_timeout``.

        Raises:
            AskTimeout: no answer in time.
            ActorStopped: the actor has stopped, stops before it answers, or fails on this question (then the handler's
                exception is the ``__cause__``).  At once, also if the question was still queued.
            AskCycle: the actor asked waits, over one or more others, for the one that asks.
            MailboxFull: as for `send`.

        Cancellation:
            the question is withdrawn if no handler has begun with it; else the handler goes on and its answer is dropped.
            Always a cancellation point; does not always yield.
        """

    @abstractmethod
    def stop(self, *, now: bool = False) -> None:
        """Ask the actor to end: after the messages that are queued now, or (`now`) after the running handler."""

    @abstractmethod
    def kill(self) -> None:
        """End the actor: a waiting handler is cancelled, queued messages are not handled. Its children are killed too."""

    @abstractmethod
    async def terminated(self) -> Reason:
        """Wait until the actor has ended for good, and say why. For code outside actors; inside, use `Actor.watch`."""

    @property
    @abstractmethod
    def from_thread(self) -> FromThread[M_contra]:
        """The same actor for other threads."""

    # The next three are called by `Receiver.to_mailbox`, on local refs only.
    def try_tell(self, message: M_contra) -> bool:
        """Put a message into the mailbox; False, and nothing done, if it would have to wait or to be refused.

        Raises:
            ActorStopped: nobody will handle it.
        """
        raise self._elsewhere()

    def on_room(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once when the mailbox has room, in line with the senders that wait for it; return a function that takes this back."""
        raise self._elsewhere()

    def on_stopped(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once when the actor has ended, at once if it has; return a function that takes this back."""
        raise self._elsewhere()

    def _elsewhere(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self!r} has no mailbox in this process; receive in a task and send() it the messages"
        )

    def __repr__(self) -> str:
        return f"<Ref {self.path}#{self.incarnation}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled; send it in a message over a connection instead")
