"""The contract of ``levada interop aqueduct``: the answer to a message on the entrypoint, whatever its bytes are.

* A sender is attached at index 0: the message's payload comes back on it.
* Receivers are attached: they are consumed until they have finished.
* Both: when all receivers have finished, the number of their messages comes back too, as decimal ASCII digits.
* Then the sender is finished. If a receiver ends otherwise (cancelled, lost) it is cancelled instead.

A oneshot counts as a sender or a receiver, but gets no number after the payload. Other senders are cancelled, and so are handles in the
messages of a receiver. No connection headers are sent. The protocol name is ``aqueduct`` over QUIC and ``qmux-02.aqueduct``
over QMux.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio

from levada.actors.aqueduct import Listener, PeerConfig, RawMessage
from levada.actors.aqueduct import serve as serve_aqueduct
from levada.actors.aqueduct.halves import give_up
from levada.actors.protocols import carrier_settings
from levada.actors.stream_carriers import carrier_of
from levada.framework import ActorSystem, OneshotReceiver, OneshotSender, Receiver, Sender
from levada.framework.errors import ChannelError, EndOfChannel, NoValue
from levada.transports.carriers import TlsConfig

__all__ = ["CARRIERS", "add_arguments", "answer", "serve"]

CARRIERS = ("quic", "tcp", "unix", "tls", "ws", "wss")
AT_ONCE = 10_000
"""Messages of one client that are answered at once: as many as it may have channels."""


async def answer(m: RawMessage) -> None:
    """Do what the contract says with one message of the entrypoint."""
    first = m.attachments[0] if m.attachments else None
    sender = first if isinstance(first, Sender | OneshotSender) else None
    receivers = [handle for handle in m.attachments if isinstance(handle, Receiver | OneshotReceiver)]
    try:
        give_up(handle for handle in m.attachments if handle is not sender and handle not in receivers)
        if isinstance(sender, OneshotSender):
            sender.send(RawMessage(m.payload))
        elif sender is not None:
            await sender.send(RawMessage(m.payload))
        counts = [0] * len(receivers)
        async with trio.open_nursery() as nursery:
            for at, receiver in enumerate(receivers):
                nursery.start_soon(_consume, receiver, counts, at)
        if isinstance(sender, Sender):
            if receivers:
                await sender.send(RawMessage(b"%d" % sum(counts)))
            sender.finish_nowait()
    except* ChannelError:
        give_up(m.attachments)  # the peer wants no more, or gave something up


async def _consume(receiver: Receiver[Any] | OneshotReceiver[Any], counts: list[int], at: int) -> None:
    try:
        while True:
            give_up((await receiver.receive()).attachments)
            counts[at] += 1
    except (EndOfChannel, NoValue):
        pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: this contract has no options."""


def serve(
    system: ActorSystem, carrier: str, where: str, tls: TlsConfig | None, args: argparse.Namespace
) -> AbstractAsyncContextManager[Listener]:
    """Serve the contract; arguments as for `levada.actors.interop.rsocket.serve`."""
    config = PeerConfig(carrier=carrier_settings(carrier_of(carrier), tls), max_handlers=AT_ONCE)
    return serve_aqueduct(system, f"aqueduct+{carrier}://{where}", answer, RawMessage, config=config)
