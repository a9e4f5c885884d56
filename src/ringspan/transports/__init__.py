"""Transports: they move bytes between ranks and know nothing of attention."""

from ringspan.transports.handshake import Hello, compare, digest_number, shake_hands, tell_invalid
from ringspan.transports.in_process import InProcess
from ringspan.transports.process_group import ProcessGroup, as_process_group
from ringspan.transports.requests import Post, Traffic, Wait, Walk

__all__ = [
    "Hello",
    "InProcess",
    "Post",
    "ProcessGroup",
    "Traffic",
    "Wait",
    "Walk",
    "as_process_group",
    "compare",
    "digest_number",
    "shake_hands",
    "tell_invalid",
]
