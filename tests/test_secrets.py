"""No object of the library writes a secret of its fields: into a log, a traceback or a terminal, where reprs end up."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import levada.actors
import levada.framework
import levada.transports
from levada.actors.rsocket import ClientConfig, CoreConfig, Payload, Request, ServerConfig, connect, serve
from levada.framework import ActorSystem

SECRET = re.compile(r"token|secret|password|passphrase|credentials|authorization|cookie|headers|pairs|^setup|^payload$")
TEXT = re.compile(r"\b(bytes|str|Headers|Payload|dict|Any)\b")
HARMLESS = {
    "levada.actors.journal.columns.Envelope.headers",  # of a row
    "levada.actors.spark.asks.RemoteActor.token_file",
    "levada.actors.spark.worker.RemoteMailbox.token_file",
    "levada.framework.platform.Platform.token_bytes",  # a function
    "levada.transports.aqueduct.events.Settled.tokens",  # what the caller gave to `send`
    "levada.transports.carriers.contracts.CarrierInfo.peer_credentials",  # process, user and group
    "levada.transports.carriers.websocket_config.Refusal.headers",  # of an answer
    "levada.transports.lumberjack.events.Batch.tokens",
    "levada.transports.lumberjack.events.EventsAcked.tokens",
    "levada.transports.quic.config.EngineSettings.reset_token",  # a function
}
OF_MESSAGES = re.compile(r"payload$")
"""The contents of messages are not secrets of the connection; SETUP's are."""


def classes() -> Iterator[type[Any]]:
    for package in (levada.framework, levada.transports, levada.actors):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            try:
                module = importlib.import_module(found.name)
            except ImportError:  # an extra
                continue
            for value in vars(module).values():
                if isinstance(value, type) and attrs.has(value) and value.__module__ == found.name:
                    yield value


@pytest.mark.ci  # it imports all modules, with Spark and Arrow
def test_fields_that_may_hold_secrets_are_not_shown() -> None:
    shown = {
        f"{kind.__module__}.{kind.__name__}.{field.name}"
        for kind in classes()
        if "__repr__" in vars(kind)
        for field in attrs.fields(kind)
        if SECRET.search(field.name) and TEXT.search(str(field.type)) and field.repr
        if not OF_MESSAGES.search(field.name) or "Setup" in kind.__name__ or field.name == "setup_payload"
    }
    assert shown == HARMLESS & shown
    assert len([*classes()]) > 500


@pytest.mark.parametrize("resume", [False, True])
async def test_a_password_in_setup_is_not_in_the_settings_and_not_in_what_the_server_shows(resume: bool) -> None:
    core = CoreConfig(setup_payload=Payload(b"hunter2", b"hunter3"), resume=resume, resume_token=b"hunter4")
    client = ClientConfig(core=attrs.evolve(core, metadata_mime_type="text/plain"))

    async def handler(request: Request) -> bytes:
        (shown,) = listener.peers
        assert shown.setup is not None
        assert shown.setup.payload.data == b"hunter2"
        return repr(shown.setup).encode()

    server = ServerConfig(core=CoreConfig(resume=True))
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", handler, config=server) as listener,
        connect(system, listener.url, config=client) as peer,
    ):
        shown = (await peer.request_response(b"")).data.decode()
    assert "text/plain" in shown
    assert "hunter" not in shown + repr(client)
