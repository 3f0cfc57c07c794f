"""An app that sets up OpenTelemetry's SDK in each process."""

from __future__ import annotations

from collections.abc import AsyncIterator

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from levada.framework import Actor, ActorSystem, Asks, handles, message


@message("tests.nodes.traced.Where")
class Where(Asks[dict[str, str]]):
    """Ask about the process and the current span."""


class Tracer(Actor[Where]):
    """Tells."""

    @handles
    def tell(self, m: Where) -> dict[str, str]:
        """Tell."""
        resource = provider.resource.attributes
        return {
            "node": str(resource.get("levada.node")),
            "service": str(resource.get("service.name")),
            "instance": str(resource.get("service.instance.id")),
            "trace": f"{trace.get_current_span().get_span_context().trace_id:032x}",
        }


provider = TracerProvider(shutdown_on_exit=False)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Set it up."""
    trace.set_tracer_provider(provider)
    yield
