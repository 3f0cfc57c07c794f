"""levada's runtime: actors, refs, channels and messages on trio.

Example:
    >>> import trio
    >>> from levada.framework import Actor, ActorSystem, Asks, handles, message
    >>> @message
    ... class Add:
    ...     n: int
    >>> @message
    ... class Get(Asks[int]):
    ...     pass
    >>> class Counter(Actor[Add | Get]):
    ...     total: int = 0
    ...     @handles
    ...     def add(self, m: Add) -> None:
    ...         self.total += m.n
    ...     @handles
    ...     def get(self, m: Get) -> int:
    ...         return self.total
    >>> async def main() -> None:
    ...     async with ActorSystem() as system:
    ...         counter = system.spawn(Counter)
    ...         counter.tell(Add(2))
    ...         print(await counter.ask(Get()))
    >>> trio.run(main)
    2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._runtime.ask import Reply
from ._runtime.remote import current_peer
from .actor import Actor, ReceiveTimeout, actor
from .channel import OneshotReceiver, OneshotSender, Receiver, Sender, TerminalState, channel, forward, oneshot
from .codec import Codec, schema_fingerprint
from .errors import (
    ActorError,
    ActorStopped,
    AskCycle,
    AskTimeout,
    ChannelCancelled,
    ChannelConnectionLost,
    ChannelError,
    ChannelLost,
    ConfigurationError,
    ConnectionLost,
    DecodeError,
    EndOfChannel,
    HandleMoved,
    HandleNotForwardable,
    LevadaError,
    MailboxFull,
    NameTaken,
    NameUnknown,
    NoValue,
    ReceiverClosed,
    RemoteFailure,
    SenderFinished,
    Undelivered,
    WrongThread,
)
from .events import (
    ActorFailed,
    ActorRestarted,
    ActorTerminated,
    DeadLetter,
    EventStream,
    SlowHandler,
    Subscriber,
    Unhandled,
)
from .handlers import Behaviour, blocking, handles
from .identity import Identity, Limits, RemotePeer
from .links import Cancelled, Down, Exit, Failed, Killed, Lost, Normal, Reason, Shutdown
from .loop import Inbox
from .mailbox import MailboxPolicy, Overflow, bounded, conflate, unbounded
from .message import Asks, message
from .metrics import Distribution, Measured, Metric, Sample
from .observe import ActorDetail, ActorInfo, ChannelInfo, FlowWindow, Histogram, Stalls
from .ref import FromThread, Ref
from .registry import Groups, Joined, Left, Registry
from .supervision import (
    ChildSpec,
    RestartPolicy,
    Strategy,
    Supervision,
    child,
    one_for_all,
    one_for_one,
    rest_for_one,
    restart,
)
from .supervisor import Children, StartChild, StopChild, Supervisor
from .system import PHASES, ActorSystem, Phase, Statistics
from .timers import Timers

__all__ = [
    "PHASES",
    "Actor",
    "ActorDetail",
    "ActorError",
    "ActorFailed",
    "ActorInfo",
    "ActorRestarted",
    "ActorStopped",
    "ActorSystem",
    "ActorTerminated",
    "AskCycle",
    "AskTimeout",
    "Asks",
    "Behaviour",
    "Cancelled",
    "ChannelCancelled",
    "ChannelConnectionLost",
    "ChannelError",
    "ChannelInfo",
    "ChannelLost",
    "ChildSpec",
    "Children",
    "Codec",
    "ConfigurationError",
    "ConnectionLost",
    "DeadLetter",
    "DecodeError",
    "Distribution",
    "Down",
    "EndOfChannel",
    "EventStream",
    "Exit",
    "Failed",
    "FlowWindow",
    "FromThread",
    "Groups",
    "HandleMoved",
    "HandleNotForwardable",
    "Histogram",
    "Identity",
    "Inbox",
    "Joined",
    "Killed",
    "Left",
    "LevadaError",
    "Limits",
    "Lost",
    "MailboxFull",
    "MailboxPolicy",
    "Measured",
    "Metric",
    "NameTaken",
    "NameUnknown",
    "NoValue",
    "Normal",
    "OneshotReceiver",
    "OneshotSender",
    "Overflow",
    "Phase",
    "Reason",
    "ReceiveTimeout",
    "Receiver",
    "ReceiverClosed",
    "Ref",
    "Registry",
    "RemoteFailure",
    "RemotePeer",
    "Reply",
    "RestartPolicy",
    "Sample",
    "Sender",
    "SenderFinished",
    "Shutdown",
    "SlowHandler",
    "Stalls",
    "StartChild",
    "Statistics",
    "StopChild",
    "Strategy",
    "Subscriber",
    "Supervision",
    "Supervisor",
    "TerminalState",
    "Timers",
    "Undelivered",
    "Unhandled",
    "WrongThread",
    "actor",
    "blocking",
    "bounded",
    "channel",
    "child",
    "conflate",
    "current_peer",
    "forward",
    "handles",
    "message",
    "one_for_all",
    "one_for_one",
    "oneshot",
    "rest_for_one",
    "restart",
    "schema_fingerprint",
    "unbounded",
]  # fmt: skip

if TYPE_CHECKING:
    __version__: str
    """The release of levada; ``unknown`` if it is not installed, but imported from an archive, for example."""


def __getattr__(name: str) -> str:
    """Look the release up when it is asked for: that takes 10 ms, and most programs need none."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("levada")
    except PackageNotFoundError:
        return "unknown"
