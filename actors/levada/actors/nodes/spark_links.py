"""Links between members on several machines: mutual TLS, and a check that the client is a member."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import attrs

from levada.actors.aqueduct import Listener
from levada.actors.authentication import Credentials, Refused
from levada.framework import Identity

from .certificates import Carrier, carrier_settings, node_id_of
from .messages import MemberState
from .nodes import Nodes
from .spark_gate import listening_in, member_url

__all__ = ["SparkLinks"]

NEWS: Final = 3.0
"""Seconds to wait for the driver to announce a member that connects first. It is less than an authentication may take."""


@attrs.frozen(kw_only=True)
class SparkLinks:
    """Links to members that show the certificates of the fleet's authority; `levada.actors.nodes.fleet.Links`."""

    kind: Carrier
    """The carrier of the links."""
    authority: bytes
    """`Authority.certificate`."""
    certificate: str
    """The path of this member's key and certificate, from `MemberKey.with_certificate`."""
    driver: bytes
    """The driver's node id."""
    bind: str
    """The address to listen at."""
    ports: range
    """The ports to try; see `listening_in`."""

    @asynccontextmanager
    async def listen(self, nodes: Nodes, url: str) -> AsyncIterator[Listener]:
        """Listen for other members at this machine's address; only the scheme of the URL counts."""
        carrier = carrier_settings(self.kind, self.authority, certificate=self.certificate, clients="required")

        async def authenticate(credentials: Credentials) -> Identity | Refused:
            node_id = node_id_of(credentials.info.peer_names) or b""
            if node_id == self.driver or await nodes.directory.until(lambda: _is_member(nodes, node_id), NEWS):
                return Identity(node_id.hex())
            return Refused("This node is not a member of the fleet, or no longer one.")

        def listen(port: int) -> AbstractAsyncContextManager[Listener]:
            return nodes.serve_members(member_url(self.kind, self.bind, port), carrier, authenticate)

        async with listening_in(self.ports, listen) as listener:
            yield listener

    def carrier(self, node_id: bytes) -> Any:
        """Return the carrier's settings for a connection to this member. A peer with another certificate is refused."""
        return carrier_settings(self.kind, self.authority, certificate=self.certificate, dials=node_id)


def _is_member(nodes: Nodes, node_id: bytes) -> bool:
    return any(member.node_id == node_id and member.state is not MemberState.DOWN for member in nodes.members)
