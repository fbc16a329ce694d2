"""Values in and out of the store, through kombu's serializers as the app is configured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kombu import serialization
from kombu.exceptions import KombuError

from celery_lease.errors import NotSerializable

__all__ = ["Codec"]


class Codec:
    """Encodes a value to bytes that name their own content type.

    A blob is ``content-type;encoding`` on a line of its own, then the serialized body: what
    was written under one ``task_serializer`` can be read after the setting changed, as long
    as the content type is accepted.
    """

    def __init__(self, serializer: str = "json", accept: Iterable[str] | None = None) -> None:
        self.serializer = serializer
        self._accept = serialization.prepare_accept_content([serializer, *(accept or ("json",))])

    def encode(self, value: Any, *, what: str) -> bytes:
        """``value`` as bytes; raises :class:`NotSerializable` naming ``what``."""
        try:
            content_type, encoding, body = serialization.dumps(value, serializer=self.serializer)
        except (KombuError, TypeError, ValueError, RecursionError, AttributeError) as exc:
            raise NotSerializable(
                f"{what}: a value of type {type(value).__name__} cannot be encoded with the "
                f"serializer {self.serializer!r}: {exc}"
            ) from exc
        raw = body.encode() if isinstance(body, str) else bytes(body)
        return f"{content_type};{encoding}\n".encode() + raw

    def decode(self, blob: bytes) -> Any:
        """The value in ``blob``; content types that are not accepted raise kombu's error."""
        head, _, body = bytes(blob).partition(b"\n")
        content_type, _, encoding = head.decode().partition(";")
        return serialization.loads(body, content_type, encoding, accept=self._accept)
