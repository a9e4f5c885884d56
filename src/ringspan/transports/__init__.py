"""Transports: they move bytes between ranks and know nothing of attention."""

from ringspan.transports.handshake import Hello, compare, shake_hands
from ringspan.transports.in_process import InProcess
from ringspan.transports.messages import Post, Traffic, Wait, Walk
from ringspan.transports.process_group import ProcessGroup, as_process_group

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
    "shake_hands",
]
