"""QUIC on trio: connections with many streams, and with datagrams, over UDP.

::

    async with listen("quic://127.0.0.1:0", QuicConfig(certificate="cert.pem", key="key.pem")) as listener:
        incoming = await listener.accept()
        async with incoming.accept() as connection:
            stream = await connection.accept_stream()

    async with dial("quic://localhost:4433", QuicConfig(ca="ca.pem")) as connection:
        stream = await connection.open_stream()
        await stream.send_all(b"hello")

``docs/reference/quic.md`` lists the supported and unsupported features.
"""

try:
    import aioquic
except ModuleNotFoundError as missing:
    text = "levada.transports.quic needs aioquic: pip install 'levada[quic]'"
    raise ModuleNotFoundError(text, name="aioquic") from missing
if not aioquic.__version__.startswith("1.7."):  # the engine overrides parts of this version
    raise ImportError(
        f"levada.transports.quic needs aioquic 1.7, and {aioquic.__version__} is installed: pip install 'levada[quic]'",
        name="aioquic",
    )

from .config import ClientSessions, QuicConfig, TicketStore
from .connection import QuicConnection, QuicDetails, QuicStream
from .endpoint import QuicEndpoint
from .entry import dial, listen
from .listener import QuicIncoming, QuicListener
from .port import DatagramPort, UdpPort

__all__ = [
    "ClientSessions", "DatagramPort", "QuicConfig", "QuicConnection", "QuicDetails", "QuicEndpoint", "QuicIncoming",
    "QuicListener", "QuicStream", "TicketStore", "UdpPort", "dial", "listen",
]  # fmt: skip
