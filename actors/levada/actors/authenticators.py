"""Ready-made ``authenticate`` hooks: bearer tokens from a file, client certificates, users of a Unix socket, and `any_of` them.

``docs/how-to/identity.md`` shows them in use, and how to replace tokens and certificates while clients stay connected.
"""

from __future__ import annotations

import codecs
import hashlib
import re
import shlex
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import validators as v

from levada.framework import Identity, Limits, Ref
from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM
from levada.transports.private_files import warn_if_others_can_read

from .authentication import Authenticate, Credentials, Refused, Reloads, check_hook

__all__ = ["BearerTokens", "CertificateNames", "UnixUsers", "any_of", "new_token"]

_LIMITS: Final = {"max_connections": int, "max_operations": int, "max_bytes": int, "bytes_per_second": float}
_PLAIN: Final = re.compile(r"[\w=.:@+/ \t\r-]*", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_LINE: Final = "NAME [tenant=NAME] [role=NAME]... [max_connections=N]... sha256=DIGEST"
_ANY: Final = re.compile(r"(?s).*")
_KINDS: Final = re.compile(r"[A-Za-z0-9.]+=|(DNS|URI|email|IP Address):")


def _path(path: str | PathLike[str]) -> Path:
    return Path(path)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


@attrs.define(eq=False)
class BearerTokens:
    """Admits clients by bearer tokens, whose digests are in a file.

    Each line is a token: ``NAME [tenant=NAME] [role=NAME]... [max_connections=N]... sha256=DIGEST``, written as in a shell; ``#`` begins a
    comment. The limits are the fields of `Limits`. A name may have several tokens, so an old one and its successor can be valid at the same
    time. ``levada token new`` makes tokens and their lines. Digests protect random tokens only, not passwords that people choose.

    Args:
        path: of the file, which is read now, and again by `reload`.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not as above. The text has the line's number, and nothing of the line.

    Example:
        >>> import trio
        >>> from levada.transports.carriers import CarrierInfo
        >>> tokens = BearerTokens.of({b"secret": Identity("ada", roles={"reader"})})
        >>> info = CarrierInfo(scheme="tls", local="desk:1", peer="192.0.2.1:2")
        >>> shown = Credentials(protocol="maop", listener="maop+tls://desk:1", info=info, scheme="bearer", token=b"secret")
        >>> trio.run(tokens, shown).name
        'ada'
    """

    # A token is looked up by its digest, not compared, so the time tells nothing about the tokens: what an attacker could learn of a digest in
    # the table would not lead to a token with that digest.

    path: Path | None = attrs.field(converter=attrs.converters.optional(_path))
    """The file; None after `of`."""
    _identities: dict[bytes, Identity] = attrs.field(
        factory=dict[bytes, Identity], repr=False, kw_only=True, alias="identities"
    )

    def __attrs_post_init__(self) -> None:
        self.reload()

    @classmethod
    def of(cls, tokens: Mapping[bytes, Identity]) -> BearerTokens:
        """Admit clients by these tokens, without a file: for tests and small programs."""
        return cls(None, identities={_digest(token): identity for token, identity in tokens.items()})

    def reload(self) -> None:
        """Read the file again, for new clients; connected clients stay. Does nothing without a file.

        Raises:
            ConfigurationError: as for the constructor; the earlier tokens stay valid.
        """
        if self.path is not None:
            self._identities = _read(self.path)

    async def __call__(self, credentials: Credentials) -> Identity | Refused:
        """Decide on a client."""
        if credentials.scheme != "bearer":
            return Refused()
        return self._identities.get(_digest(credentials.token)) or Refused()


def _read(path: Path) -> dict[bytes, Identity]:
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigurationError(f"cannot read the tokens in {path}: {error.strerror or error}") from error
    warn_if_others_can_read(path, "digests of tokens")
    found: dict[bytes, Identity] = {}
    for number, line in enumerate(lines, 1):
        try:
            words = _words(line.decode())
            if not words:
                continue
            digest, identity = _parse(words)
        except (ValueError, TypeError, ConfigurationError):
            # Without the cause, which quotes the line: in the place of a digest there may be a token.
            raise ConfigurationError(f"{path}, line {number}: expected {_LINE}") from None
        if digest in found:
            raise ConfigurationError(f"{path}, line {number}: this token is on an earlier line, too")
        found[digest] = identity
    return found


def _words(line: str) -> list[str]:
    # The two are the same for a line without quotes and comments; `shlex` takes ten times as long, 5 s for 100,000 tokens.
    return line.split() if _PLAIN.fullmatch(line) else shlex.split(line, comments=True)


def _parse(words: list[str]) -> tuple[bytes, Identity]:
    name, *fields = words
    single: dict[str, str] = {}
    roles = set[str]()
    for field in fields:
        key, _, value = field.partition("=")
        if not value or key in single:
            raise ValueError
        if key == "role":
            roles.add(value)
        else:
            single[key] = value
    digest, tenant = single.pop("sha256", ""), single.pop("tenant", "")
    if not _DIGEST.fullmatch(digest) or not single.keys() <= _LIMITS.keys():
        raise ValueError
    limits: dict[str, Any] = {key: _LIMITS[key](value) for key, value in single.items()}
    return bytes.fromhex(digest), Identity(name, tenant=tenant, roles=roles, limits=Limits(**limits))


def new_token(identity: Identity) -> tuple[bytes, str]:
    """Make a token of 256 random bits, and its line for the file of `BearerTokens`.

    Raises:
        ConfigurationError: a role has a character that cannot be printed.

    Example:
        >>> token, line = new_token(Identity("web 1", tenant="shop", roles={"reader"}))
        >>> len(token), line.rpartition("=")[0]
        (43, "'web 1' tenant=shop role=reader sha256")
    """
    token = urlsafe_b64encode(PLATFORM.get().token_bytes(32)).rstrip(b"=")
    words = [identity.name]
    if identity.tenant != identity.name:
        words.append(f"tenant={identity.tenant}")
    words += [f"role={role}" for role in sorted(identity.roles)]
    values = attrs.asdict(identity.limits).items()
    words += [f"{name}={value}" for name, value in values if value is not None]
    line = shlex.join([*words, f"sha256={_digest(token).hex()}"])
    if not line.isprintable():  # names are, and roles can be anything
        raise ConfigurationError("a role in the file has printable characters only")
    return token, line


class CertificateNames:
    """Admits clients by the verified certificates that they show (mutual TLS).

    The carrier's settings ask for the certificates: `levada.transports.carriers.TlsConfig.client_certificates`, and the same of
    `levada.transports.quic.QuicConfig`.

    Args:
        names: identities, by patterns of what `CarrierInfo.peer_subject` or `CarrierInfo.peer_names` say, for example
            ``"CN=*,O=Example"`` or ``"DNS:*.example.org"``; the first that matches counts. A ``*`` matches one or more characters other
            than ``, + . / @`` and the backslash. None: the identity gets the name that matched, ``"DNS:web.example.org"``. Without patterns
            every verified certificate is accepted, and the identity gets its subject, or its first name if there is no subject.

    Raises:
        ConfigurationError: a pattern does not begin with ``CN=`` or another type, or with ``DNS:``, ``URI:``, ``email:`` or
            ``IP Address:``.
    """

    def __init__(self, names: Mapping[str, Identity | None] | None = None) -> None:
        self._names: list[tuple[re.Pattern[str], Identity | None]] = [(_ANY, None)]
        if names is not None:
            self._names = [(_compiled(pattern), identity) for pattern, identity in names.items()]

    async def __call__(self, credentials: Credentials) -> Identity | Refused:
        """Decide on a client."""
        info = credentials.info
        if info.peer_certificate is None:
            return Refused("A client certificate is required here.")
        texts = [text for text in (info.peer_subject, *info.peer_names) if text is not None]
        for pattern, identity in self._names:
            for text in texts:
                if pattern.fullmatch(text):
                    try:
                        return identity or Identity(text)
                    except ConfigurationError:  # too long, or not printable
                        continue
        return Refused("The names in the client certificate are not known here.")


def _compiled(pattern: str) -> re.Pattern[str]:
    if not _KINDS.match(pattern):
        raise ConfigurationError(f"the pattern is {pattern!r}, wanted one such as 'CN=*' or 'DNS:*.example.org'")
    parts = map(re.escape, pattern.split("*"))
    return re.compile(r"[^,+./@\\]+".join(parts), re.IGNORECASE | re.ASCII if pattern.startswith("DNS:") else 0)


class UnixUsers:
    """Admits the users of this machine that connect to a Unix socket.

    `levada.transports.carriers.UnixConfig.allowed_uids` turns other users away before any protocol begins; this hook gives each user an identity.

    Args:
        users: identities, by the numbers of the users.
    """

    def __init__(self, users: Mapping[int, Identity]) -> None:
        self._users = dict(users)

    async def __call__(self, credentials: Credentials) -> Identity | Refused:
        """Decide on a client."""
        shown = credentials.info.peer_credentials
        if shown is None:
            return Refused("A connection over a Unix socket is required here.")
        return self._users.get(shown[1]) or Refused("This user is not known here.")


@attrs.frozen
class _AnyOf:
    hooks: tuple[Authenticate, ...] = attrs.field(validator=v.deep_iterable(check_hook))

    async def __call__(self, credentials: Credentials) -> Identity | Refused:
        refusal: Refused | None = None
        for hook in self.hooks:
            answer = await (hook.ask(credentials, timeout=None) if isinstance(hook, Ref) else hook(credentials))
            if not isinstance(answer, Refused):
                return answer
            refusal = refusal or answer
        assert refusal is not None
        return refusal

    def reload(self) -> None:
        for hook in self.hooks:
            if isinstance(hook, Reloads):
                hook.reload()


def any_of(first: Authenticate, *others: Authenticate) -> Callable[[Credentials], Awaitable[Identity | Refused]]:
    """Ask several hooks in turn: the first that does not refuse decides. If all refuse, the client gets the first one's refusal.

    If a hook fails, the client is refused.

    Raises:
        ConfigurationError: a hook is neither an async function nor a ref.

    Example:
        ``any_of(BearerTokens("tokens"), CertificateNames({"CN=*,O=Example": None}))``
    """
    return _AnyOf((first, *others))
